"""Runs a kernel on tensors: on their GPU, or for CPU tensors in the emulator. The same text either way."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch

from attngen import emulator
from attngen.arguments import Launch, bind, table_of, tables, workspaces
from attngen.errors import MissingToolError
from attngen.ir.schedule import PERSISTENT
from attngen.kernel import Generated, Kernel, settled
from attngen.runtime.load import LoadedKernel, device_facts, load, runs_on
from attngen.signature import VECTOR_BYTES, Shapes, Signature
from attngen.spec import Variant
from attngen.target import SM80, SM90, Target
from attngen.tensormap import encode_driver, encode_emulator

EMULATED_CTAS = 3  # of a persistent kernel: several items each, and one CTA more than rounds


def empty_like_rows(q: torch.Tensor, head_dim: int) -> torch.Tensor:
    """[B, Hq, Sq, head_dim] as contiguous [B, Sq, Hq, head_dim] where q looks like a transposed view of one, else
    contiguous.

    One comparison of strides decides: with symbolic sizes it is the only guard."""
    b, h, s = q.size(0), q.size(1), q.size(2)
    if q.stride(1) < q.stride(2):
        strides = (s * h * head_dim, head_dim, h * head_dim, 1)
    else:
        strides = (h * s * head_dim, s * head_dim, head_dim, 1)
    return q.new_empty_strided((b, h, s, head_dim), strides)


def run(
    kernel: Generated,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    captures: Mapping[str, torch.Tensor],
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out [B, Hq, Sq, Dv], lse [B, Hq, Sq] fp32); lse is empty [0] for a variant without a sum."""
    shapes = Shapes(q.size(0), q.size(1), k.size(1), q.size(2), k.size(2))
    out = empty_like_rows(q, v.size(3))
    lse = q.new_empty((shapes.B, shapes.Hq, shapes.Sq) if kernel.has_lse else (0,), dtype=torch.float32)
    if 0 in (shapes.B, shapes.Hq, shapes.Sq, shapes.Sk):
        return _nothing_visible(out, lse, captures.get("sink"))
    run_into(kernel, q, k, v, captures, scale, out, lse)
    return out, lse


def run_into(
    kernel: Generated, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, captures: Mapping[str, torch.Tensor],
    scale: float,
    out: torch.Tensor, lse: torch.Tensor, mode: emulator.Mode = emulator.Mode.LATE, seed: int = 0,
) -> None:  # fmt: skip
    """As `run`, into tensors that the caller made, for shapes without a 0. `mode` and `seed`: of the emulator."""
    tensors = {"q": q, "k": k, "v": v, "out": out, "lse": lse, **captures}
    launch_module(kernel, tensors, scalars_of(q, k, scale), mode, seed)


def scalars_of(q: torch.Tensor, k: torch.Tensor, scale: float) -> dict[str, int | float]:
    """The numbers every attention kernel may take, for shapes without a 0."""
    batch, heads, seqlen_q, _ = q.shape
    group, seqlen_k = heads // k.size(1), k.size(2)
    return {"batch": batch, "heads": heads, "group": group, "seqlen_q": seqlen_q, "seqlen_k": seqlen_k, "scale": scale}


def _nothing_visible(
    out: torch.Tensor, lse: torch.Tensor, sink: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """No query or no key: the neutral element, or the sink alone."""
    out.zero_()
    if lse.dim() == 3:
        lse.copy_(sink.float().view(1, -1, 1).expand_as(lse)) if sink is not None else lse.fill_(float("-inf"))
    return out, lse


def launch_module(
    module: Generated, tensors: Mapping[str, torch.Tensor], scalars: Mapping[str, int | float],
    mode: emulator.Mode = emulator.Mode.LATE, seed: int = 0,
) -> None:  # fmt: skip
    """Launches every kernel of a module on the device of its tensors; nothing waits."""
    device = next(iter(tensors.values())).device
    if device.type == "cuda" and isinstance(module, Kernel):
        module = settled(module, device_arch(module.target, device.index))
    sizes = {k: v for k, v in scalars.items() if isinstance(v, int)}
    sizes["ctas"] = EMULATED_CTAS if device.type == "cpu" else device_facts(device.index).sm_count
    more, numbers = tables(module.schedule, sizes, head_bytes(tensors), device)
    sizes |= numbers
    held = {**tensors, **workspaces(module.schedule, sizes, device), **more}
    encode = encode_emulator if device.type == "cpu" else partial(encode_driver, device_index=device.index)
    launches = bind(module.schedule, held, {**scalars, **sizes}, encode)
    if device.type == "cpu":
        for item in launches:
            emulate(module, item, held, mode, seed)
    else:
        from attngen.runtime.launch import launch

        for item in launches:
            launch(loaded(module, item, device.index), grid=item.grid, threads=item.kernel.threads, params=item.params)


def head_bytes(tensors: Mapping[str, torch.Tensor]) -> int:
    """Keys and values of one head, in bytes; 0 for a module without them."""
    if "k" not in tensors:
        return 0
    k, v = tensors["k"], tensors["v"]
    return k.element_size() * k.size(2) * (k.size(3) + v.size(3))


def target_for(variant: Variant, signature: Signature, device: torch.device) -> Target:
    """The target that serves a call best: the device's own where there is a schedule for the call, else sm80."""
    hopper = device.type == "cuda" and runs_on(SM90.archs[0], device_facts(device.index).capability)
    return SM90 if hopper else SM80


def backward_target(target: Target, signature: Signature) -> Target:
    """The target of gradients where `target` is that of the forward pass; on Hopper the copy engine loads all their
    tiles, which needs aligned rows."""
    return target if signature.alignment == VECTOR_BYTES else SM80


def device_arch(target: Target, device_index: int) -> str:
    """The architecture of a target that runs on this device."""
    capability = device_facts(device_index).capability
    for arch in reversed(target.archs):
        if runs_on(arch, capability):
            return arch
    raise MissingToolError(
        f"kernels for {target.name} run on {', '.join(target.archs)}; this device has capability "
        f"{capability[0]}.{capability[1]}. CPU tensors run in the emulator"
    )


def loaded(module: Generated, item: Launch, device_index: int) -> LoadedKernel:
    artifact = module.artifact(device_arch(module.target, device_index))
    return load(artifact, item.kernel.name, item.kernel.smem_bytes, device_index=device_index)


# ---- the emulator ------------------------------------------------------------------------------------------------


def regions(tensors: Mapping[str, torch.Tensor], writable: set[str]) -> list[emulator.Region]:
    """The memory a kernel may touch: from the first to the last element of each tensor."""
    result = []
    for name, t in tensors.items():
        if t.numel():
            last = sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
            result.append(emulator.Region(name, t.data_ptr(), (last + 1) * t.element_size(), name in writable))
    return result


def emulate(
    module: Generated,
    item: Launch,
    tensors: Mapping[str, torch.Tensor],
    mode: emulator.Mode = emulator.Mode.LATE,
    seed: int = 0,
) -> emulator.Stats:
    """One launch in the emulator. Raises EmulatorError naming the op at fault."""
    entries = tuple(emulator.KernelEntry(k.name, k.threads, k.smem_bytes) for k in module.schedule.kernels)
    built = emulator.build(module.source.body, entries)
    used = {t.name: t for t in item.kernel.tensors}
    writable = {n for n, t in used.items() if t.access.value in ("out", "work")}
    table = [table_of(item.kernel)] if item.kernel.work.source in PERSISTENT else []
    memory = regions({n: tensors[n] for n in (*used, *table)}, writable)
    return built.run(item.kernel.name, item.grid, item.params, memory, mode, seed, module.source.line_ops)
