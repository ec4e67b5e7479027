"""Merging of partial results: two calls over disjoint sets of keys give the call over their union."""

from __future__ import annotations

from functools import cache

import torch

from attngen.errors import GradientError, SignatureError
from attngen.execute import launch_module
from attngen.ir.schedule import Elem
from attngen.ir.verify import verify
from attngen.kernel import Generated
from attngen.passes.merge_kernel import merge_kernel
from attngen.passes.simplify import simplify
from attngen.passes.stream import stream
from attngen.passes.textbook import textbook
from attngen.spec import Attention
from attngen.target import target

_ELEMS = {torch.bfloat16: Elem.BF16, torch.float16: Elem.F16, torch.float32: Elem.F32}
_NAMES = ("out_1", "lse_1", "out_2", "lse_2")


@cache
def merge_module(elem: Elem, target_name: str = "sm80") -> Generated:
    """The generated merge kernel for outputs of one storage type."""
    graph = stream(simplify(textbook(Attention().variant)))
    schedule = merge_kernel(graph, elem, target_name)
    return Generated(
        verify(schedule), target(target_name), "merge of two partial results", f"out {elem.value}, lse f32"
    )


def merge(
    out_1: torch.Tensor, lse_1: torch.Tensor, out_2: torch.Tensor, lse_2: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) over the union of two disjoint sets of keys.

    out_1, out_2: [B, H, Sq, Dv], fp16, bf16 or fp32, equal shapes and types, any strides. lse_1, lse_2: [B, H, Sq]
    fp32, natural logarithms. A row with lse -inf is empty; two empty rows give out 0 and lse -inf."""
    _check(out_1, lse_1, out_2, lse_2)
    _reject_gradients((out_1, lse_1, out_2, lse_2))
    # the kernel reads memory, where a lazy negation has not happened yet
    out_1, lse_1, out_2, lse_2 = (t.resolve_neg() for t in (out_1, lse_1, out_2, lse_2))
    out = torch.empty_like(out_1, memory_format=torch.contiguous_format)
    lse = torch.empty_like(lse_1, memory_format=torch.contiguous_format)
    if out.numel():
        batch, heads, seqlen_q, head_dim = out.shape
        tensors = {"out_1": out_1, "out_2": out_2, "lse_1": lse_1, "lse_2": lse_2, "out": out, "lse": lse}
        sizes: dict[str, int | float] = {"batch": batch, "heads": heads, "seqlen_q": seqlen_q, "head_dim": head_dim}
        launch_module(merge_module(_ELEMS[out.dtype]), tensors, {**sizes, "elements": out.numel()})
    else:  # the kernel writes lse beside an element of out: without one (head dim 0) nothing would
        torch.logaddexp(lse_1, lse_2, out=lse)
    return out, lse


def _reject_gradients(tensors: tuple[torch.Tensor, ...]) -> None:
    for name, t in zip(_NAMES, tensors, strict=True):
        if torch.is_grad_enabled() and t.requires_grad:
            raise GradientError(
                f"`{name}` requires a gradient, and attngen.merge has no derivative. Call it under torch.no_grad() or "
                f"torch.inference_mode(), or give {name}.detach()"
            )


def _check(out_1: torch.Tensor, lse_1: torch.Tensor, out_2: torch.Tensor, lse_2: torch.Tensor) -> None:
    for name, given in zip(_NAMES, (out_1, lse_1, out_2, lse_2), strict=True):
        if not isinstance(given, torch.Tensor):
            raise SignatureError(f"{name} is a {type(given).__name__}. Allowed: a tensor")
    if out_1.device.type not in ("cuda", "cpu"):
        raise SignatureError(f"out_1 is on {out_1.device}. Allowed: cuda, and cpu (in the emulator)")
    if out_1.dtype not in _ELEMS:
        raise SignatureError(f"out_1 has dtype {out_1.dtype}. Allowed: bfloat16, float16, float32")
    if (
        out_1.dim() != 4
        or lse_1.shape != out_1.shape[:3]
        or lse_1.dtype != torch.float32
        or lse_1.device != out_1.device
    ):
        raise SignatureError(
            f"lse_1 is {list(lse_1.shape)} {lse_1.dtype} for out_1 {list(out_1.shape)}. Allowed: out [B, H, Sq, Dv], "
            f"lse [B, H, Sq] float32 on one device"
        )
    for name, t, like in (("out_2", out_2, out_1), ("lse_2", lse_2, lse_1)):
        if t.shape != like.shape or t.dtype != like.dtype or t.device != like.device:
            raise SignatureError(
                f"{name} is {list(t.shape)} {t.dtype} on {t.device}; it must be as the first: {list(like.shape)} "
                f"{like.dtype} on {like.device}"
            )
