"""The exponent of an element, summed in the order in which it costs an element least.

An exponent is `score - reference`. Its terms are grouped by the index they depend on: what belongs to the item or the
row is added to the reference once a row, what belongs to the column once a column; an element then costs one addition
for each group it needs, and one FMA for the logit and for each term of its own.

Distances are split at the tile: `i - j` = (i - n * block_n) - jt with jt the column within the tile, in integers, so
that the row's part and the column's stay small where the weight is not."""

from __future__ import annotations

from dataclasses import dataclass

from attngen.expr import (
    FLOAT_RANGE,
    ONE,
    DType,
    Expr,
    I,
    J,
    Op,
    add,
    const,
    load,
    make,
    minimum,
    mul,
    neg,
    rewrite,
    sub,
    substitute,
    to_f32,
    var,
)
from attngen.ir.columns import COLUMN as COLUMN_NAME
from attngen.ir.columns import ROW as ROW_NAME
from attngen.ir.ops import Scope
from attngen.passes.scopes import Scopes
from attngen.passes.simplify import is_within, scaled
from attngen.sums import BIG, Sum, depends, linear

ROW, COLUMN = var(ROW_NAME, DType.I32), var(COLUMN_NAME, DType.I32)
ROW_TILE, TILE = var("m", DType.I32), var("n", DType.I32)


@dataclass(frozen=True)
class Term:
    """sign * factor * base, the factor a scalar of the item."""

    sign: int
    factor: Expr
    base: Expr


def terms(e: Expr, logit: Expr, scopes: Scopes, sign: int = 1, factor: Expr = ONE) -> list[Term]:
    """`e` as a sum. What the user added up without the logit stays one term, in the user's order: its parts may be
    large and cancel. Distances are exact in any order, and are split, their factor distributed."""
    whole = not depends(e, logit.name) and not _is_distance(e, scopes)
    if whole and e.op is not Op.MUL:
        return [Term(sign, factor, e)]
    if e.op in (Op.ADD, Op.SUB):
        second = -sign if e.op is Op.SUB else sign
        return [*terms(e.args[0], logit, scopes, sign, factor), *terms(e.args[1], logit, scopes, second, factor)]
    if e.op is Op.NEG:
        return terms(e.args[0], logit, scopes, -sign, factor)
    if e.op is Op.MUL:
        free = next((k for k in (0, 1) if scopes.scope(e.args[k]) is Scope.ITEM), None)
        kept = e.args[1 - free] if free is not None else e
        if free is not None and (_distributes(kept, logit, scopes) if not whole else kept.op not in _SUMS):
            scaled = e.args[free] if factor is ONE else mul(factor, e.args[free])
            return terms(e.args[1 - free], logit, scopes, sign, scaled)
    return [Term(sign, factor, e)]


_SUMS = (Op.ADD, Op.SUB)


def _is_distance(e: Expr, scopes: Scopes) -> bool:
    """Sums of conversions of integers, and their products with scalars of the item."""
    if e.op in (Op.ADD, Op.SUB):
        return all(_is_distance(a, scopes) for a in e.args)
    if e.op is Op.NEG:
        return _is_distance(e.args[0], scopes)
    if e.op is Op.MUL:
        return any(
            scopes.scope(a) is Scope.ITEM and _is_distance(b, scopes) for a, b in (e.args, reversed(e.args))
        )
    return e.op is Op.F32 and e.args[0].dtype is DType.I32


def _distributes(e: Expr, logit: Expr, scopes: Scopes) -> bool:
    """A factor may be given to each part: to distances, and to sums of the logit's own part and constants."""
    if e.op in (Op.ADD, Op.SUB):
        return all(a.op is Op.CONST or depends(a, logit.name) for a in e.args) or _is_distance(e, scopes)
    return True


def split_distances(parts: list[Term], block_n: int) -> list[Term]:
    """Conversions of integers that share a factor as one integer, split into the row's and the column's part."""
    result = [t for t in parts if not _converted(t)]
    for factor in dict.fromkeys(t.factor for t in parts if _converted(t)):
        own = [t for t in parts if _converted(t) and t.factor is factor]
        total = Sum()
        for t in own:
            total += linear(t.base.args[0]).times(t.sign)
        if not is_within(total.expr(), BIG):  # one integer may overflow where the user's floats do not
            result += own
            continue
        slope = dict(total.terms).get(J, 0)
        rest = Sum.of(((x, c) for x, c in total.terms if x is not J), total.constant)
        if any(depends(x, "j") for x, _ in rest.terms):
            result.append(Term(1, factor, to_f32(total.expr())))
            continue
        row = rest + linear(mul(TILE, const(block_n))).times(slope)
        if row.terms or row.constant:
            result.append(Term(1, factor, to_f32(row.expr())))
        if slope:
            sign, size = (1, slope) if slope > 0 else (-1, -slope)
            result.append(Term(sign, factor, to_f32(COLUMN if size == 1 else mul(COLUMN, const(size)))))
    return result


def _converted(t: Term) -> bool:
    return t.base.op is Op.F32 and t.base.args[0].dtype is DType.I32


def tile_addresses(e: Expr, block_m: int, block_n: int, contiguous: frozenset[str] = frozenset()) -> Expr:
    """Indices of captured tensors that are linear in the key, as the row's part and a multiple of the column within the
    tile: an element's address is then that of its row and one product. In the last dimension of `contiguous` tensors
    the row within the tile is split off as well, so that elements of one distance have one address, and no element
    computes it. What is read by column alone is left: it is loaded once a column."""

    def one(x: Expr) -> Expr | None:
        if x.op is not Op.LOAD or not depends(x, "i"):
            return None
        last = len(x.args) - 1 if x.name in contiguous else -1
        return load(x.name, tuple(
            _tile_index(a, block_n, block_m if k == last else None) for k, a in enumerate(x.args)
        ), x.dtype)  # fmt: skip

    return rewrite(e, one)


def _tile_index(index: Expr, block_n: int, block_m: int | None) -> Expr:
    """`block_m` None: the row is part of the base."""
    total = linear(index)
    slopes = dict(total.terms)
    down, along = slopes.get(I, 0), slopes.get(J, 0)
    rest = Sum.of(((x, c) for x, c in total.terms if x not in (I, J)), total.constant)
    if not along or any(depends(x, "j") for x, _ in rest.terms):
        return index
    base = rest + linear(mul(TILE, const(block_n))).times(along)
    if not down:
        return add(base.expr(), _times(COLUMN, along))
    if block_m is None or any(depends(x, "i") for x, _ in rest.terms):
        return add((base + Sum(((I, down),))).expr(), _times(COLUMN, along))
    base += linear(mul(ROW_TILE, const(block_m))).times(down)
    return add(add(base.expr(), _times(ROW, down)), _times(COLUMN, along))


def _times(x: Expr, factor: int) -> Expr:
    return x if factor == 1 else mul(x, const(factor))


def exponent(score: Expr, reference: Expr | None, logit: Expr, scopes: Scopes, block_n: int) -> Expr:
    """`score - reference`, or the score alone (None)."""
    parts = split_distances(terms(score, logit, scopes), block_n)
    groups: dict[Scope, list[Term]] = {Scope.ROW: [], Scope.COL: [], Scope.ELEM: []}
    for t in parts:
        scope = scopes.scope(t.base)
        groups[Scope.ROW if scope is Scope.ITEM else scope].append(t)
    # the logit last: its product is the one that is not ready before the loop body starts
    own = sorted(groups[Scope.ELEM], key=lambda t: depends(t.base, logit.name))
    total = None if reference is None else neg(reference)
    for t in groups[Scope.ROW]:
        total = plus(total, t)
    if groups[Scope.COL]:
        column: Expr | None = None
        for t in groups[Scope.COL]:
            column = plus(column, t)
        assert column is not None
        total = column if total is None else add(column, total)
    for t in own:
        total = plus(total, t)
    return const(0.0) if total is None else total


def plus(total: Expr | None, t: Term) -> Expr:
    factor = t.factor if t.sign > 0 else neg(t.factor)
    if total is None:
        product = t.base if t.factor is ONE else mul(t.base, t.factor)
        return product if t.sign > 0 else neg(product)
    if t.factor is ONE:
        return add(total, t.base) if t.sign > 0 else sub(total, t.base)
    return make(Op.FMA, t.base, factor, total)


def with_score(e: Expr, z: Expr, score: Expr, logit: Expr, scopes: Scopes, block_n: int) -> Expr:
    """`e`, an element as an expression of the score `z`, on the logit itself."""
    if e.op is Op.EXP2:
        difference, unit = e.args[0], ONE
        if difference.op is Op.MUL and difference.args[1].op is Op.CONST:
            difference, unit = difference.args
        if difference.op is Op.SUB and difference.args[0] is z and scopes.scope(difference.args[1]) is Scope.ROW:
            # in another unit a value may overflow: the weights are then infinite, or no numbers, and the tile is redone
            # (with a reference of +inf they would all be 0)
            reference = difference.args[1]
            if unit is not ONE:
                score, reference = scaled(score, unit), minimum(mul(reference, unit), const(FLOAT_RANGE[1]))
            return make(Op.EXP2, exponent(score, reference, logit, scopes, block_n))
    return substitute(e, {z: score})
