"""Constant addresses of shared memory: set, inside the limit, aligned, and not shared by what lives at the same
time."""

from __future__ import annotations

from collections.abc import Iterator

from attngen.ir.rules.case import Case, Finding

MBARRIER_ALIGN = 8


def offsets(case: Case) -> Iterator[Finding]:
    """A buffer starts at a multiple of its swizzle atom, or descriptors and bank arithmetic address other bytes."""
    for b in case.kernel.buffers:
        if b.offset is None:
            yield Finding("offsets", f"buffer {b.name} has no offset")
        elif b.offset < 0 or b.offset % b.layout.align:
            yield Finding("offsets", f"buffer {b.name} at {b.offset}: its layout needs a multiple of {b.layout.align}")
        if b.layout.itemsize != b.elem.bytes:
            yield Finding(
                "offsets", f"buffer {b.name}: elements of {b.elem.bytes} bytes in a layout of {b.layout.itemsize}"
            )
    for r in case.kernel.rings:
        if r.offset is None:
            yield Finding("offsets", f"the barriers of ring {r.name} have no offset")
        elif r.offset < 0 or r.offset % MBARRIER_ALIGN:
            yield Finding(
                "offsets", f"the barriers of ring {r.name} at {r.offset}: a multiple of {MBARRIER_ALIGN} is needed"
            )


def limit(case: Case) -> Iterator[Finding]:
    """A launch with more shared memory than a CTA can have, or than the CTAs of an SM share, fails or lacks
    occupancy."""
    kernel, target = case.kernel, case.target
    used = kernel.smem_bytes
    if used > target.smem_per_cta:
        yield Finding("smem-limit", f"{used} bytes of shared memory; a CTA of {target.name} has {target.smem_per_cta}")
    together = kernel.min_ctas * (used + target.reserved_smem)
    if together > target.smem_per_sm:
        yield Finding(
            "smem-limit", f"{kernel.min_ctas} CTAs take {together} of the {target.smem_per_sm} bytes of an SM"
        )


def overlap(case: Case) -> Iterator[Finding]:
    """Buffers share bytes only when one is dead before the other is written; that a barrier lies between is the rule
    `race`. Barriers share bytes with nothing."""
    spans = [(b.name, b.offset, b.offset + b.bytes) for b in case.kernel.buffers if b.offset is not None]
    bars = [(f"barriers of {r.name}", r.offset, r.offset + r.bytes) for r in case.kernel.rings if r.offset is not None]
    for k, (name, start, end) in enumerate(bars):
        for other, low, high in (*bars[:k], *spans):
            if start < high and low < end:
                yield Finding("overlap", f"{name} lie in {other}")
    told: set[tuple[str, str]] = set()
    for walked in case.memory.walks:
        last: dict[tuple[int, str], int] = {}
        first: dict[tuple[int, str], int] = {}
        for at, (item, op) in enumerate((s.item, e.op) for s in walked.stretches for e in s.events):
            facts = case.facts.get(id(op))
            for ref in (*facts.reads, *facts.writes) if facts else ():
                last[item, ref.name] = at
                first.setdefault((item, ref.name), at)
        for k, (a, start, end) in enumerate(spans):
            for b, low, high in spans[:k]:
                if start < high and low < end and (a, b) not in told:
                    for item in {i for i, _ in last}:
                        if (item, a) in last and (item, b) in last:
                            one, two = (item, a), (item, b)
                            if first[one] <= last[two] and first[two] <= last[one]:
                                told.add((a, b))
                                yield Finding("overlap", f"{a} and {b} share bytes and are alive together")
                                break
