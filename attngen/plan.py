"""Launching on a GPU with little work in Python: all that follows from shapes and strides is worked out once."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from attngen.arguments import TORCH, grid, map_for, number, table_of, tables, values_of
from attngen.execute import device_arch, empty_like_rows, head_bytes, scalars_of
from attngen.ir.schedule import PERSISTENT, WORK_TABLE
from attngen.ir.schedule import Kernel as KernelText
from attngen.kernel import Generated, Kernel, settled
from attngen.params import Kind, MapUse, fields, map_uses, packer
from attngen.progress import Progress
from attngen.runtime.launch import Launcher
from attngen.runtime.load import LoadedKernel, device_facts, load
from attngen.tensormap import BYTES, encode_driver

Layout = tuple[tuple[int, ...], tuple[int, ...]]  # shape, strides
Empty = Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], torch.Tensor]
KEPT_MAPS = 256
_EMPTY_CUDA: Empty | None = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None)


@dataclass(frozen=True)
class MapSlot:
    """A tensor map of a launch. Maps are kept by pointer: a caching allocator gives the same ones again and again."""

    argument: int
    device_index: int
    use: MapUse
    layout: Layout
    made: dict[int, bytes] = field(default_factory=dict)

    def make(self, pointer: int) -> bytes:
        """The map of a pointer that is not among those kept."""
        if len(self.made) >= KEPT_MAPS:
            self.made.clear()
        made = self.made[pointer] = encode_driver(map_for(self.use, pointer, *self.layout), self.device_index)
        return made


@dataclass(frozen=True)
class Step:
    """One launch. What changes from call to call are tensor maps and pointers; they lie in front."""

    launcher: Launcher
    maps: tuple[MapSlot, ...]
    arguments: tuple[int, ...]  # numbers of the tensors: q, k, v, captures, out, lse, workspaces, tables

    def run(self, pointers: Sequence[int]) -> None:
        front: list[int | bytes] = [
            slot.made.get(pointers[slot.argument]) or slot.make(pointers[slot.argument]) for slot in self.maps
        ]
        front += [pointers[n] for n in self.arguments]
        self.launcher.run(front)


@dataclass(frozen=True)
class Space:
    """A workspace, fresh in each call."""

    layout: Layout
    dtype: torch.dtype
    zero: bool


@dataclass(frozen=True)
class Launches:
    """What a module launches on tensors of given shapes and strides. `tables` are its own."""

    device: torch.device
    workspaces: tuple[Space, ...]
    steps: tuple[Step, ...]
    tables: tuple[torch.Tensor, ...]

    def run(self, pointers: list[int]) -> None:
        """`pointers`: to the tensors in the order in which their layouts were given."""
        if self.workspaces or self.tables:
            empty = empty_on(self.device)
            work = [empty(*space.layout, space.dtype) for space in self.workspaces]
            for t, space in zip(work, self.workspaces, strict=True):
                if space.zero:
                    t.zero_()
            pointers += [t.data_ptr() for t in (*work, *self.tables)]  # `work` has to live until the last launch
        for step in self.steps:
            step.run(pointers)


@dataclass(frozen=True)
class Plan:
    """A call with given shapes and strides. Refers to no tensor of the caller."""

    dtype: torch.dtype
    out: Layout
    lse: Layout
    launches: Launches

    def run(self, given: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """(out, lse) of the call's tensors, which `given` points to: q, k, v and the captured ones."""
        empty = empty_on(self.launches.device)
        out, lse = empty(*self.out, self.dtype), empty(*self.lse, torch.float32)
        self.launches.run([*given, out.data_ptr(), lse.data_ptr()])
        return out, lse


def empty_on(device: torch.device) -> Empty:
    """An uninitialised tensor on a device: on the current one made as Inductor's code makes it, in half the time."""
    if device.type == "cuda" and _EMPTY_CUDA is not None and torch._C._cuda_getDevice() == device.index:
        return _EMPTY_CUDA
    return lambda shape, strides, dtype: torch.empty_strided(shape, strides, dtype=dtype, device=device)


def plan(
    kernel: Kernel, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
    captures: Sequence[torch.Tensor], names: Sequence[str], scale: float,
) -> Plan:  # fmt: skip
    """Compiles and loads what the call needs. No size may be 0."""
    with Progress() as progress:
        arch = device_arch(kernel.target, q.device.index)
        progress.step(f"compiling {kernel.variant.description} for {arch}")
        chosen = settled(kernel, arch)
        out, lse = empty_like_rows(q, v.size(3)), q.shape[:3] if chosen.has_lse else (0,)
        shapes = layouts({"q": q, "k": k, "v": v, **dict(zip(names, captures, strict=True)), "out": out})
        shapes["lse"] = _contiguous(lse)
        made = launches(chosen, arch, shapes, scalars_of(q, k, scale), head_bytes({"k": k, "v": v}), q.device)
    return Plan(q.dtype, shapes["out"], shapes["lse"], made)


def layouts(tensors: Mapping[str, torch.Tensor]) -> dict[str, Layout]:
    return {n: (tuple(t.shape), t.stride()) for n, t in tensors.items()}


def launches(
    module: Generated, arch: str, shapes: Mapping[str, Layout], scalars: Mapping[str, int | float],
    bytes_of_head: int, device: torch.device,
) -> Launches:  # fmt: skip
    """`shapes`: of the tensors that a call gives, in its order. Compiles and loads."""
    sizes = {n: x for n, x in scalars.items() if isinstance(x, int)}
    sizes["ctas"] = device_facts(device.index).sm_count
    more, made = tables(module.schedule, sizes, bytes_of_head, device)
    sizes |= made
    spaces = module.schedule.workspaces
    work = tuple(Space(_contiguous([number(e, sizes) for e in w.shape]), TORCH[w.elem], w.zero) for w in spaces)
    every = {**shapes, **{w.name: x.layout for w, x in zip(spaces, work, strict=True)}, **layouts(more)}
    artifact, numbers = module.artifact(arch), {**scalars, **sizes}
    steps = tuple(
        _step(text, load(artifact, text.name, text.smem_bytes, device_index=device.index), every, numbers)
        for text in module.schedule.kernels
    )
    return Launches(device, work, steps, tuple(more.values()))


def _contiguous(shape: Sequence[int]) -> Layout:
    strides = [1]
    for n in reversed(shape[1:]):
        strides.insert(0, strides[0] * n)
    return tuple(shape), tuple(strides)


def _step(text: KernelText, loaded: LoadedKernel, shapes: dict[str, Layout], scalars: dict[str, int | float]) -> Step:
    values = values_of(text, shapes, scalars)
    listed = fields(text)
    pointers = [f.name for f in listed if f.kind is Kind.POINTER]  # behind the maps
    uses = map_uses(text)
    values.update(dict.fromkeys(pointers, 0) | {f"{name}_map": bytes(BYTES) for name in uses})
    layout, names = packer(text)
    whole = layout.pack(*(values[n] for n in names))
    numbers = {name: n for n, name in enumerate(shapes)}
    if text.work.source in PERSISTENT:
        numbers[WORK_TABLE] = numbers[table_of(text)]
    sizes = {n: x for n, x in scalars.items() if isinstance(x, int)}
    front = struct.Struct("=" + f"{BYTES}s" * len(uses) + "Q" * len(pointers))
    maps = tuple(MapSlot(numbers[name], loaded.device_index, use, shapes[name]) for name, use in uses.items())
    launcher = Launcher(loaded, grid(text, sizes), text.threads, whole, front)
    return Step(launcher, maps, tuple(numbers[n] for n in pointers))
