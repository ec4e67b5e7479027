"""Program -> Kernel for kernels of plain sums: which op runs in which step and role, then what orders the roles, then
slots for counters, then addresses."""

from __future__ import annotations

from attngen.config import HopperSumsConfig
from attngen.ir.program import Program
from attngen.ir.schedule import Kernel
from attngen.passes.hopper.allocate import allocate_kernel
from attngen.passes.hopper.expand_sums import expand_sums
from attngen.passes.hopper.stage_sums import stage_sums
from attngen.passes.hopper.synchronize_sums import synchronize_sums
from attngen.target import Target


def sums_kernel(program: Program, target: Target) -> Kernel:
    assert isinstance(program.config, HopperSumsConfig)
    kernel = stage_sums(program, target)
    kernel = synchronize_sums(kernel, program.config.turns)
    kernel = expand_sums(kernel, program.config.unroll)
    return allocate_kernel(kernel)
