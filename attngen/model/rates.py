"""What the units of a chip can do, in SM cycles: a table a target, read from JSON (`h200.json`, `a100.json`).

The numbers of an H200 are written by `benchmarks/calibrate.py`; those of an A100 are published rates. Each number
stands in the JSON beside where it comes from. Costs of instructions are cycles of one warp instruction on one of the
four sub-partitions of an SM: a warpgroup has one warp on each."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any

from attngen.errors import SignatureError
from attngen.target import Target

PARTITIONS = 4  # sub-partitions of an SM
TABLES = {"sm80": "a100.json", "sm90": "h200.json"}


class Instr(Enum):
    """Kinds of warp instruction that have a rate of their own."""

    FMA = "fma"  # FFMA, FADD, FMUL, IMAD
    ALU = "alu"  # FMNMX, compare, select, integer add, F2FP (two elements packed)
    MUFU = "mufu"  # ex2, lg2, rcp, sqrt, tanh
    CONVERT = "convert"  # I2F, F2I, FRND: the same quarter-rate unit
    SHUFFLE = "shuffle"
    SHARED = "shared"  # ldmatrix, stmatrix, LDS, STS: 512 bytes an instruction
    GLOBAL = "global"  # LDG, STG, LDGSTS


SLOW = (Instr.MUFU, Instr.CONVERT)  # one unit, which works beside the others


@dataclass(frozen=True)
class Rate:
    """`throughput`: cycles an instruction when several warps feed the unit; `stream`: one warp alone; `beside`: one
    warp while another warpgroup keeps the tensor cores busy; `latency`: until a dependent instruction may issue."""

    throughput: float
    stream: float
    beside: float
    latency: float


@dataclass(frozen=True)
class Rates:
    """The table of a target. `asynchronous`: products run beside the warp that issued them (wgmma)."""

    device: str
    asynchronous: bool
    instructions: Mapping[Instr, Rate]
    tensor_flops: float  # a cycle and SM, dense 16-bit
    shared_bytes: float  # a cycle and SM, of shared memory
    product_latency: float  # from the last step of a product until a warp that waits for it goes on
    product_queue: int  # steps of products that a warp can have issued and not started
    slowed_by_one: float  # products, beside one warp a partition that does nothing but FFMA
    slowed_by_two: float
    handover: float  # named barrier: from the arrival until the waiting warps go on
    barrier: float  # named barrier of one warpgroup, all there
    arrive: float  # mbarrier: from an arrival until a waiting warp goes on
    wait: float  # mbarrier: a wait for a phase that is complete
    issue: float  # an op of one or two instructions that waits for nothing
    branch: float  # a vote or a compare, and the branch on it
    copy_latency: float  # of a tile by the copy engine (or cp.async), besides its bytes
    copy_bytes: float  # a cycle, of one tile
    copy_bandwidth: float  # bytes a cycle and SM from L2 with all SMs loading
    copy_credit: float  # bytes that an SM may be ahead of that
    store_latency: float  # from a tile store until shared memory may be overwritten
    launch: float  # a CTA's start, where each item has one
    port: float  # cycles for which an instruction holds the issue slot and operand ports of a partition

    @property
    def product_ports(self) -> float:
        """Share of the operand ports that products at full speed take: what a stream of FFMA beside them leaves."""
        if not self.asynchronous:
            return 0.0
        return (1 - self.port / self.instructions[Instr.FMA].beside) * self.slowed_by_one

    @property
    def product_weight(self) -> float:
        """How many warps the products count as where they compete for the ports, from what two warps of FFMA do."""
        if not self.asynchronous:
            return 1.0
        share = self.product_ports / self.slowed_by_two
        return 2 * share / (1 - share)


def load_rates(text: str) -> Rates:
    """The table in the JSON text that `benchmarks/calibrate.py` writes."""
    data: dict[str, Any] = json.loads(text)
    values = {k: v["value"] for k, v in data["values"].items()}
    instructions = {
        Instr(k): Rate(v["throughput"], v["stream"], v["beside"], v["latency"]) for k, v in data["instructions"].items()
    }
    return Rates(device=data["device"], asynchronous=data["asynchronous"], instructions=instructions, **values)


@cache
def rates_of(name: str) -> Rates:
    """The shipped table of a target."""
    if name not in TABLES:
        raise SignatureError(f"target={name!r}: there are rates for {', '.join(TABLES)}")
    return load_rates((Path(__file__).parent / TABLES[name]).read_text(encoding="utf-8"))


def rates(target: Target) -> Rates:
    return rates_of(target.name)
