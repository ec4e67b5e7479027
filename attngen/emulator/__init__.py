"""Runs the body of a generated kernel on the CPU, unchanged, and reports what a GPU would leave undefined.

Threads are fibers. Warp collectives run when all their lanes arrive, asynchronous copies complete as early or
as late as their waits allow or at random, and every access is checked for bounds, alignment and ordering. It
is a test instrument: exact and slow.

    built = emulator.build(body, (emulator.KernelEntry("fwd", threads=128, smem_bytes=49152),))
    regions = [emulator.Region("Q", q.data_ptr(), q.nbytes, writable=False), ...]
    built.run("fwd", grid=4, params=packed, regions=regions)
"""

from attngen.emulator.build import KernelEntry, build, find_compiler
from attngen.emulator.run import Built, Mode, Region, Stats

__all__ = ["Built", "KernelEntry", "Mode", "Region", "Stats", "build", "find_compiler"]
