"""Indices of captured tensors, kept inside of them."""

from __future__ import annotations

from attngen.expr import (
    SEQLEN_Q,
    DType,
    Expr,
    I,
    Op,
    const,
    load,
    maximum,
    minimum,
    rewrite,
    sub,
    substitute,
    var,
    variables,
)


def bounded(e: Expr, inside: frozenset[str] = frozenset()) -> Expr:
    """Every index of a captured tensor clamped to the tensor: rows and columns of padding, and masked positions, then
    never read outside of it. Indices of visible positions are inside by the user's contract; those of the tensors
    `inside` always are."""

    def clamp(x: Expr) -> Expr | None:
        if x.op is not Op.LOAD or x.name in inside:
            return None
        sizes = (var(f"{x.name}_n{k}", DType.I32) for k in range(len(x.args)))
        return load(x.name, tuple(_clamped(a, n) for a, n in zip(x.args, sizes, strict=True)), x.dtype)

    return rewrite(e, clamp)


def _clamped(a: Expr, size: Expr) -> Expr:
    last = sub(size, const(1))
    if a.op is Op.CONST:
        return a
    return minimum(a, last) if a.op is Op.VAR else minimum(maximum(a, const(0)), last)


def within(e: Expr) -> Expr:
    """Indices for a tile whose pairs are all visible: those of positions are inside, but rows of padding, which are
    moved to the last query. `bounded(e)` where nothing is read by position."""

    def last_row(x: Expr) -> Expr | None:
        if x.op is not Op.LOAD:
            return None
        if not variables(*x.args) & {"i", "j"}:
            return bounded(x)
        return load(x.name, tuple(substitute(a, {I: minimum(I, sub(SEQLEN_Q, const(1)))}) for a in x.args), x.dtype)

    return rewrite(e, last_row)
