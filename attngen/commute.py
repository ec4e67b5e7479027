"""Which neighbours of a schedule may change places, and why the result is the same.

Fault injection asks this of swaps that nobody noticed. The rules look at what two ops are and touch, not at their names
or places, so they hold for any schedule. None of them speaks for two ops that share a register."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from attngen.expr import DType, Expr, variables, walk
from attngen.expr import Op as ExprOp
from attngen.ir import ops as o
from attngen.ir.mutate import Swap
from attngen.ir.ops import Op
from attngen.ir.schedule import Guard, Role, Step, steps_of
from attngen.ir.walk import operands, reads, writes

_ARITHMETIC = (o.Fill, o.Map, o.Reduce, o.Vote)
_ISSUED = (o.Wgmma, o.MmaSync)
_COPIES = (o.CpAsync, o.CpVector)


def why_equal(swap: Swap) -> str:
    """The reason why two neighbours may be swapped, or nothing."""
    return next((reason for holds, reason in RULES if holds(swap)), "")


# ---- what a step touches ---------------------------------------------------------------------------------------------


def ops_in(step: Step) -> tuple[Op, ...]:
    return step.body if isinstance(step, Guard) else (step,)


def read_by(step: Step) -> set[str]:
    names = set(variables(step.pred)) if isinstance(step, Guard) else set()
    for op in ops_in(step):
        names |= {r.name for r in reads(op)} | operands(op)
    return names


def written_by(step: Step) -> set[str]:
    return {r.name for op in ops_in(step) for r in writes(op)}


def independent(one: Step, two: Step) -> bool:
    """Neither writes what the other reads or writes."""
    first, second = written_by(one), written_by(two)
    return not (first & (read_by(two) | second) or second & read_by(one))


def arithmetic(step: Step) -> bool:
    """Registers alone."""
    return all(isinstance(op, _ARITHMETIC) for op in ops_in(step))


def in_flight(role: Role, group: str) -> set[str]:
    """Registers and buffers of the products of a group."""
    found = [op for op in steps_of(role) if isinstance(op, o.Wgmma) and op.group == group]
    return {ref.name for op in found for ref in (op.d, op.a, op.b)}


# ---- pairs -----------------------------------------------------------------------------------------------------------


Kinds = type[Op] | tuple[type[Op], ...]
Rule = Callable[[Swap], bool]


def either(swap: Swap) -> Iterator[tuple[Step, Step]]:
    """The pair in both orders: most rules do not care which came first."""
    yield swap.one, swap.two
    yield swap.two, swap.one


def both(first: Kinds, second: Kinds) -> Rule:
    """One of each, in either order, that share nothing."""
    return lambda swap: any(
        isinstance(a, first) and isinstance(b, second) and independent(a, b) for a, b in either(swap)
    )


def beside_arithmetic(kinds: Kinds) -> Rule:
    """An op of these kinds beside arithmetic that shares nothing with it."""
    return lambda swap: any(isinstance(a, kinds) and arithmetic(b) and independent(a, b) for a, b in either(swap))


def closes_later(swap: Swap) -> bool:
    """A commit behind a step that issues nothing and touches nothing of its group."""
    group, other = swap.one, swap.two
    if not isinstance(group, o.Commit | o.CpCommit):
        return False
    if isinstance(group, o.CpCommit):
        return not isinstance(other, Guard) and (arithmetic(other) or isinstance(other, o.MmaSync))
    issues = any(isinstance(op, (*_ISSUED, o.Open, o.Retire, o.Commit)) for op in ops_in(other))
    return not issues and not (read_by(other) | written_by(other)) & in_flight(swap.role, group.group)


def waits_elsewhere(swap: Swap) -> bool:
    """A wait for products beside arithmetic that touches none of their registers."""
    return any(
        isinstance(a, o.Retire)
        and arithmetic(b)
        and not (read_by(b) | written_by(b)) & in_flight(swap.role, a.group)
        for a, b in either(swap)
    )


def waits_earlier(swap: Swap) -> bool:
    """A wait for copies moved in front of a step that does not need them."""
    return isinstance(swap.one, o.Map | o.MmaSync) and isinstance(swap.two, o.CpWait)


def fence_of_registers(swap: Swap) -> bool:
    """A fence of registers beside a turn, which touches none. A wait that loops is another matter: with one between a
    fence and a product the assembler adds its own."""
    return any(isinstance(a, o.Open) and isinstance(b, o.Enter | o.Leave) for a, b in either(swap))


def ring_of(swap: Swap, step: Step) -> str:
    """The ring of a barrier, or of the slot that a copy by threads fills: the one that was claimed last before it."""
    bar = getattr(step, "bar", None)
    if isinstance(step, o.CpAsync | o.CopyTile):
        claims: list[o.Ref] = []
        for s in steps_of(swap.role):
            if s is step:
                break
            claims += [s.bar] if isinstance(s, o.MbarWait) else []
        bar = claims[-1] if claims else None
    return bar.name.partition(".")[0] if isinstance(bar, o.Ref) else ""


def other_ring(swap: Swap) -> bool:
    """Work on one ring beside a wait or an announcement on another."""
    kinds = (o.MbarWait, o.MbarExpect, o.TmaLoad, o.CpAsync, o.CopyTile)
    one, two = swap.one, swap.two
    apart = ring_of(swap, one) != ring_of(swap, two)
    return isinstance(one, kinds) and isinstance(two, kinds) and apart and independent(one, two)


def handed_over_later(swap: Swap) -> bool:
    """A slot handed over behind the wait for another, which was filled before it: who frees that one does not need this
    one. So it is with another slot of the same ring, and with what only the first tile of an item hands over."""
    arrives, waits = swap.one, swap.two
    if not (isinstance(arrives, o.MbarArrive) and isinstance(waits, o.MbarWait) and waits.bar.name.endswith(".free")):
        return False
    if not arrives.bar.name.endswith(".full"):
        return False
    if ring_of(swap, arrives) == ring_of(swap, waits):
        return arrives.bar.index != waits.bar.index
    return arrives.when is not None and arrives.when.op is ExprOp.EQ


def conjuncts(e: Expr) -> Iterator[Expr]:
    if e.op is ExprOp.AND:
        for a in e.args:
            yield from conjuncts(a)
    else:
        yield e


def masked_rows_are_redone(swap: Swap) -> bool:
    """Mask and weights of a tile whose mask bounds keys from above alone, where tiles come from the last key down: a
    row that has a masked key here has seen none before, its reference is the lowest number and the guard behind redoes
    it."""
    mask, weights = swap.one, swap.two
    if not (isinstance(mask, o.Map) and mask.only and isinstance(weights, o.Map) and mask.over == weights.over):
        return False
    steps = list(steps_of(swap.role))
    at = next((k for k, s in enumerate(steps) if s is weights), None)
    if at is None or not (isinstance(steps[at + 1], o.Vote) and isinstance(steps[at + 2], Guard)):
        return False
    redone = {r.name for r in writes(weights)} <= written_by(steps[at + 2])
    parts = {s.target: s.value for s in mask.body}
    conditions = [s.value.args[0] for s in mask.body if s.value.op is ExprOp.WHERE]
    conditions = [parts.get(e.name, e) if e.op is ExprOp.VAR else e for c in conditions for e in conjuncts(c)]
    tests = [e for c in conditions for e in walk(c) if e.dtype is DType.BOOL and e.op is not ExprOp.AND]
    above = all(e.op in (ExprOp.LE, ExprOp.LT) and e.args[0].name == "j" for e in tests)
    return redone and bool(tests) and above


RULES: tuple[tuple[Rule, str], ...] = (
    (lambda s: arithmetic(s.one) and arithmetic(s.two) and independent(s.one, s.two), "they share no value"),
    (both(_COPIES, _COPIES), "copies of one group, which arrive together"),
    (closes_later, "a group is closed later, and nothing of it is issued or touched between"),
    (waits_earlier, "the wait comes earlier than it has to"),
    (both(o.StTile, o.StRows), "two outputs are stored, in either order"),
    (both(o.MbarWait, o.MbarWait), "two waits that must both have ended, in either order"),
    (both(o.MbarWait, o.Enter), "data and turn are waited for, in either order"),
    (fence_of_registers, "a fence of registers beside an op that touches none"),
    (both(o.Leave, (o.Retire, o.Commit)), "the turn is for issuing products, and all are issued"),
    (beside_arithmetic(o.Leave), "the turn is for issuing products, and all are issued"),
    (waits_elsewhere, "no register of the products waited for is touched"),
    (both(o.MbarArrive, o.MbarArrive), "two slots are given back, in either order"),
    (beside_arithmetic(o.MbarArrive), "a slot is given back beside arithmetic on registers"),
    (handed_over_later, "the slot waited for was filled before this one, and is freed without it"),
    (other_ring, "slots of two rings that do not depend on one another"),
    (both(o.StRows, (o.BulkRetire, o.Sync)), "a store to global memory beside a wait for shared memory"),
    (masked_rows_are_redone, "a row with a masked key in a later tile saw none before, and is redone by the guard"),
)
