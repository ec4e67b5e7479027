"""Shared memory of a kernel: buffers and slots at their addresses."""

from __future__ import annotations

from dataclasses import dataclass

from attngen.draw.picture import Line, Picture, Rect, Text, ticks
from attngen.ir.schedule import Buffer, Kernel, Ring

LEFT, WIDE, HIGH, GAP, TOP = 150, 820, 26, 6, 26
COLOURS = ("c0", "c4", "c2", "c5", "c6", "c1")


@dataclass(frozen=True)
class _Row:
    """Buffers that share bytes stand on rows of their own."""

    label: str
    note: str
    first: int
    slots: int
    bytes: int  # a slot


def memory_picture(kernel: Kernel, limit: int) -> Picture:
    """`limit`: bytes that a CTA may have on the target."""
    rings = {b: r for r in kernel.rings for b in r.buffers}
    rows = [_buffer(b, rings.get(b.name)) for b in kernel.buffers if b.offset is not None]
    rows += [_Row(f"ring {r.name}", _ring(r), r.offset, r.slots, 16) for r in kernel.rings if r.offset is not None]
    scale = WIDE / limit
    rects = [Rect(LEFT, TOP, WIDE, len(rows) * (HIGH + GAP) + GAP, "frame")]
    texts: list[Text] = []
    for n, row in enumerate(rows):
        y = TOP + GAP + n * (HIGH + GAP)
        texts.append(Text(LEFT - 10, y + 17, row.label, "label", "end"))
        for slot in range(row.slots):
            start = row.first + slot * row.bytes
            said = f"{row.label}, slot {slot}: bytes {start} to {start + row.bytes}"
            width = max(row.bytes * scale - 1, 1)
            rects.append(Rect(LEFT + start * scale, y, width, HIGH, COLOURS[n % len(COLOURS)], said))
        texts.append(Text(LEFT + (row.first + row.slots * row.bytes) * scale + 8, y + 17, row.note, "note"))
    bottom = TOP + len(rows) * (HIGH + GAP) + GAP
    kib = ticks(limit / 1024, 8)
    lines = [Line(((LEFT + t * 1024 * scale, TOP - 4), (LEFT + t * 1024 * scale, bottom)), "tick") for t in kib]
    texts += [Text(LEFT + t * 1024 * scale, TOP - 10, f"{t:.0f} KiB", "small", "middle") for t in kib]
    end = LEFT + kernel.smem_bytes * scale
    lines.append(Line(((end, TOP - 4), (end, bottom + 6)), "reached"))
    side = "end" if end > LEFT + WIDE / 2 else "start"
    texts.append(Text(end, bottom + 20, f"{kernel.smem_bytes} bytes of {limit}", "note", side))
    title = f"shared memory of {kernel.name}"
    return Picture(title, LEFT + WIDE + 240, bottom + 26, tuple(rects), tuple(lines), tuple(texts))


def _buffer(b: Buffer, ring: Ring | None) -> _Row:
    assert b.offset is not None
    shape = f"{b.layout.rows} x {b.layout.cols} {b.elem.value}, {b.layout.swizzle.value}"
    slots = f", {b.slots} slots" if b.slots > 1 else ""
    return _Row(b.name, shape + slots + (f", ring {ring.name}" if ring else ""), b.offset, b.slots, b.layout.bytes)


def _ring(r: Ring) -> str:
    return f"barriers full and free, {r.full_bytes} bytes and {r.free_arrivals} arrivals a phase"
