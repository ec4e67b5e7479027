"""Evaluating an `Expr` with torch, element by element over broadcast grids: the meaning of every operation,
written down once for references and interpreters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import reduce

import torch
from torch import Tensor

from attngen.expr import DType, Expr, Op, walk

Operand = Tensor | float | int | bool


def _floordiv(a: Tensor, b: Tensor) -> Tensor:
    # an integer division by zero has no defined result in a kernel, and must not stop the evaluation either
    return torch.div(a, torch.where(b == 0, 1, b), rounding_mode="floor")


def _mod(a: Tensor, b: Tensor) -> Tensor:
    return torch.remainder(a, torch.where(b == 0, 1, b))


_MEANING: dict[Op, Callable[..., Tensor]] = {
    Op.NEG: torch.neg,
    Op.ADD: torch.add,
    Op.SUB: torch.sub,
    Op.MUL: torch.mul,
    Op.DIV: torch.div,
    Op.FLOORDIV: _floordiv,
    Op.MOD: _mod,
    Op.MIN: torch.minimum,
    Op.MAX: torch.maximum,
    Op.EQ: torch.eq,
    Op.NE: torch.ne,
    Op.LT: torch.lt,
    Op.LE: torch.le,
    Op.GT: torch.gt,
    Op.GE: torch.ge,
    Op.AND: torch.logical_and,
    Op.OR: torch.logical_or,
    Op.NOT: torch.logical_not,
    Op.WHERE: torch.where,
    Op.ABS: torch.abs,
    Op.EXP: torch.exp,
    Op.LOG: torch.log,
    Op.TANH: torch.tanh,
    Op.TANH_APPROX: torch.tanh,
    Op.SIGMOID: torch.sigmoid,
    Op.SQRT: torch.sqrt,
    Op.FLOOR: torch.floor,
    Op.EXP2: torch.exp2,
    Op.LOG2: torch.log2,
    Op.RCP: torch.reciprocal,
    Op.FMA: lambda a, b, c: a * b + c,
}


def evaluate(
    root: Expr,
    env: Mapping[str, Operand],
    captures: Mapping[str, Tensor] | None = None,
    float_dtype: torch.dtype = torch.float64,
) -> Tensor:
    """The value of `root`. `env` gives the variables, as numbers or tensors that broadcast against each
    other.

    Integers are evaluated in 64 bits. Indices of captured tensors are clamped to the valid range. The result
    has the shape that its operands broadcast to, which is [] for a constant."""
    kinds = {DType.F32: float_dtype, DType.I32: torch.int64, DType.BOOL: torch.bool}
    device = next((v.device for v in env.values() if isinstance(v, Tensor)), torch.device("cpu"))
    done: dict[Expr, Tensor] = {}
    for e in walk(root):
        args = [done[a] for a in e.args]
        if e.op is Op.CONST:
            done[e] = torch.tensor(e.value, dtype=kinds[e.dtype], device=device)
        elif e.op is Op.VAR:
            done[e] = torch.as_tensor(env[e.name], dtype=kinds[e.dtype], device=device)
        elif e.op is Op.LOAD:
            done[e] = _load((captures or {})[e.name], args).to(kinds[e.dtype])
        elif e.op in (Op.F32, Op.I32):
            done[e] = args[0].to(kinds[e.dtype])
        else:
            done[e] = _MEANING[e.op](*args)
    return done[root]


def _load(tensor: Tensor, index: list[Tensor]) -> Tensor:
    if not index:
        return tensor
    if not tensor.numel():  # nothing to read: whatever reads it has no elements either, or is masked
        return tensor.new_zeros(reduce(torch.add, index).shape)
    return tensor[tuple(i.clamp(0, n - 1) for i, n in zip(index, tensor.shape, strict=True))]
