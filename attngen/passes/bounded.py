"""Indices of captured tensors, kept inside of them."""

from __future__ import annotations

from attngen.expr import (
    FALSE,
    SEQLEN_Q,
    DType,
    Expr,
    I,
    J,
    Op,
    conj,
    const,
    load,
    make,
    maximum,
    minimum,
    rewrite,
    sub,
    substitute,
    var,
    variables,
    where,
)
from attngen.sums import depends, linear


def bounded(e: Expr, inside: frozenset[str] = frozenset(), guarded: frozenset[str] = frozenset()) -> Expr:
    """Every index of a captured tensor clamped to the tensor: rows and columns of padding, and masked positions, then
    never read outside of it. Indices of visible positions are inside by the user's contract; those of the tensors
    `inside` always are. In the last dimension of tensors `guarded` an index of the key alone is not clamped, so that
    neighbours keep addresses which differ by a number: what lies outside is not read, and is 0."""

    def clamp(x: Expr) -> Expr | None:
        if x.op is not Op.LOAD or x.name in inside:
            return None
        sizes = [var(f"{x.name}_n{k}", DType.I32) for k in range(len(x.args))]
        index = [_clamped(a, n) for a, n in zip(x.args, sizes, strict=True)]
        if x.name not in guarded or not x.args or not _of_key(x.args[-1]):
            return load(x.name, tuple(index), x.dtype)
        read = make(Op.LE, x.args[-1], sub(sizes[-1], const(1)))
        if x.args[-1].op is not Op.VAR:
            read = conj(make(Op.GE, x.args[-1], const(0)), read)
        nothing = FALSE if x.dtype is DType.BOOL else const(0.0) if x.dtype is DType.F32 else const(0)
        return where(read, load(x.name, (*index[:-1], x.args[-1]), x.dtype), nothing)

    return rewrite(e, clamp)


def _of_key(index: Expr) -> bool:
    total = linear(index)
    return J in dict(total.terms) and not any(depends(x, "i", "j") for x, _ in total.terms if x is not J)


def _clamped(a: Expr, size: Expr) -> Expr:
    last = sub(size, const(1))
    if a.op is Op.CONST:
        return a
    return minimum(a, last) if a.op is Op.VAR else minimum(maximum(a, const(0)), last)


def within(e: Expr, whole: bool) -> Expr:
    """Indices for a tile whose pairs are all visible: those of positions are inside, but rows of padding, unless all
    rows are `whole`; they are moved to the last query. `bounded(e)` where nothing is read by position."""

    def last_row(x: Expr) -> Expr | None:
        if x.op is not Op.LOAD:
            return None
        if not variables(*x.args) & {"i", "j"}:
            return bounded(x)
        if whole and "j" in variables(*x.args):  # what a row reads is read once an item, before tiles have a class
            return x
        return load(x.name, tuple(substitute(a, {I: minimum(I, sub(SEQLEN_Q, const(1)))}) for a in x.args), x.dtype)

    return rewrite(e, last_row)
