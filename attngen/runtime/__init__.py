"""From generated text to a running kernel: compile, check, cache, load, launch."""

from attngen.runtime.cache import Unit, compile_cached, precompile_into
from attngen.runtime.compile import Artifact, Resources, compile_cuda
from attngen.runtime.gate import GateReport, check

__all__ = [
    "Artifact",
    "GateReport",
    "Resources",
    "Unit",
    "check",
    "compile_cached",
    "compile_cuda",
    "precompile_into",
]
