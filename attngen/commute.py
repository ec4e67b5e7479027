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
from attngen.ir.rules.touch import overlaps
from attngen.ir.schedule import Block, Guard, Kernel, Role, Step, Tiles, steps_of
from attngen.ir.walk import operands, reads, writes

_ARITHMETIC = (o.Fill, o.Map, o.Reduce, o.Vote)
_ISSUED = (o.Wgmma, o.MmaSync)
_COPIES = (o.CpAsync, o.CpVector)
_ENGINE = (o.TmaLoad, o.BulkLoad)


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


def of_two_classes(swap: Swap) -> bool:
    """Ops of which no step runs both."""
    return isinstance(swap.one, Op) and isinstance(swap.two, Op) and "" != swap.one.only != swap.two.only != ""


def waits_earlier(swap: Swap) -> bool:
    """A wait for copies moved in front of a step that does not need them."""
    return isinstance(swap.one, o.Map | o.MmaSync) and isinstance(swap.two, o.CpWait)


def apart(first: Kinds, second: Kinds) -> Rule:
    """One of each that share nothing, nor bytes of shared memory: none writes a buffer that the other touches, or that
    lies over one of these."""
    def rule(swap: Swap) -> bool:
        over = any(written_by(a) & shared_by(swap.kernel, b) for a, b in either(swap))
        return both(first, second)(swap) and not over

    return rule


def shared_by(kernel: Kernel, step: Step, names: Callable[[Step], set[str]] | None = None) -> set[str]:
    """The buffers that a step touches (or of its `names`), and those that lie over them."""
    found = names(step) if names else read_by(step) | written_by(step)
    near = overlaps(kernel)
    return found | {other for key, others in near.items() if key[0] in found for other, _ in others}


def around(role: Role, step: Step, ahead: bool) -> Iterator[Step]:
    """What runs behind a step of a role with one loop, or before it, nearest first: round the loop once, where the step
    is in it or reaches it."""
    nodes = [node.ops if isinstance(node, Block) else node.step for node in role.item.body]
    at = next(n for n, steps in enumerate(nodes) if any(s is step for s in steps))
    own = nodes[at]
    here = next(n for n, s in enumerate(own) if s is step)
    loop = next((n for n, node in enumerate(role.item.body) if isinstance(node, Tiles)), None)
    yield from own[here + 1 :] if ahead else reversed(own[:here])
    if loop is not None and (at == loop or (at > loop) is not ahead):
        yield from nodes[loop] if ahead else reversed(nodes[loop])


def untouched_until_a_barrier(
    role: Role, start: Step, ahead: bool, buffers: set[str], names: Callable[[Step], set[str]]
) -> bool:
    """Whether a barrier comes before a step that touches one of these buffers."""
    for step in around(role, start, ahead):
        if isinstance(step, o.CtaSync):
            return True
        if names(step) & buffers:
            return False
    return False


def another_barrier_before(swap: Swap) -> bool:
    """A write to shared memory in front of a barrier, where what it overwrites was last touched before another one. An
    item without a tile comes there from the copies in front of its loop: those of the bytes that are written run only
    where there is a tile."""
    barrier, store = swap.one, swap.two
    if not (isinstance(barrier, o.CtaSync) and isinstance(store, o.CpAsync | o.CpVector | o.StFrag)):
        return False
    buffers = shared_by(swap.kernel, store, written_by)
    if isinstance(store, o.StFrag):
        first = next((n.ops for n in swap.role.item.body if isinstance(n, Block)), ())
        if any(written_by(s) & buffers and isinstance(s, Op) and s.when is None for s in first):
            return False
    touched: Callable[[Step], set[str]] = lambda s: read_by(s) | written_by(s)  # noqa: E731
    return untouched_until_a_barrier(swap.role, barrier, False, buffers, touched)


def another_barrier_behind(swap: Swap) -> bool:
    """A barrier in front of a product, where another one lies between the product and what overwrites its tiles."""
    product, barrier = swap.one, swap.two
    if not (isinstance(product, o.MmaSync) and isinstance(barrier, o.CtaSync)):
        return False
    tiles = shared_by(swap.kernel, product, read_by)
    return untouched_until_a_barrier(swap.role, barrier, True, tiles, written_by)


def nothing_left_to_arrive(swap: Swap) -> bool:
    """A wait for all copies behind the barrier of the epilogue, where what is staged next lies over tiles whose copies
    run only with a step of the loop, which waited for them."""
    if not (isinstance(swap.one, o.CpWait) and isinstance(swap.two, o.CtaSync)):
        return False
    staged = set[str]()
    for step in around(swap.role, swap.two, True):
        if not isinstance(step, o.StFrag):
            break
        staged |= shared_by(swap.kernel, step, written_by)
    copies = [s for s in steps_of(swap.role) if isinstance(s, _COPIES) and written_by(s) & staged]
    return bool(staged) and all(copy.when is not None for copy in copies)


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
    kinds = (o.MbarWait, o.MbarExpect, *_ENGINE, o.CpAsync, o.CopyTile)
    one, two = swap.one, swap.two
    apart = ring_of(swap, one) != ring_of(swap, two)
    return isinstance(one, kinds) and isinstance(two, kinds) and apart and independent(one, two)


def handed_over_later(swap: Swap) -> bool:
    """A slot handed over behind the wait for another, which was filled before it: who frees that one does not need this
    one. So it is with another slot of the same ring, and with what only the first tile of an item hands over."""
    arrives, waits = swap.one, swap.two
    if not (isinstance(arrives, o.MbarArrive) and isinstance(waits, o.MbarWait) and waits.bar.name.endswith(".free")):
        return False
    if arrives.bar.name.endswith(".free"):
        return given_back_later(swap, arrives, waits)
    if ring_of(swap, arrives) == ring_of(swap, waits):
        return arrives.bar.index != waits.bar.index
    return arrives.when is not None and arrives.when.op is ExprOp.EQ


def given_back_later(swap: Swap, arrives: o.MbarArrive, waits: o.MbarWait) -> bool:
    """A slot of what is copied, given back behind the wait for a slot that this role fills: with several of these, the
    one waited for was filled a step before, and who frees it waits for no copy of a later step."""
    name = ring_of(swap, waits)
    several = any(r.name == name and r.slots > 1 for r in swap.kernel.rings)
    fills = any(isinstance(s, o.MbarArrive) and s.bar.name == f"{name}.full" for s in steps_of(swap.role))
    return several and fills and ring_of(swap, arrives) != name


def copied_elsewhere(swap: Swap) -> bool:
    """A copy of the engine beside a wait for products that touch no byte of it."""
    return any(
        isinstance(a, _ENGINE)
        and isinstance(b, o.Retire)
        and not shared_by(swap.kernel, a) & in_flight(swap.role, b.group)
        for a, b in either(swap)
    )


def waits_for_other_data(swap: Swap) -> bool:
    """A wait for a slot beside arithmetic that touches no tile of its ring."""
    rings = {ring.name: set(ring.buffers) for ring in swap.kernel.rings}
    return any(
        isinstance(a, o.MbarWait)
        and arithmetic(b)
        and not rings.get(ring_of(swap, a), read_by(b)) & (read_by(b) | written_by(b))
        for a, b in either(swap)
    )


def of_one_group(swap: Swap) -> bool:
    """Two products that are closed and waited for together, and of which none makes what the other reads."""
    one, two = swap.one, swap.two
    together = isinstance(one, o.Wgmma) and isinstance(two, o.Wgmma) and one.group == two.group
    return together and independent(one, two)


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
    (both(_ENGINE, _ENGINE), "two copies of the engine, each counted by its barrier"),
    (apart(o.MmaSync, o.MmaSync), "two products that share no result"),
    (of_one_group, "two products of one group that share no result"),
    (apart(o.StFrag, (o.StFrag, o.MmaSync)), "a tile is staged beside what does not touch it"),
    (of_two_classes, "a step runs one of the two: they are of two classes of tiles"),
    (another_barrier_before, "another barrier lies between the last use of these bytes and the write"),
    (another_barrier_behind, "another barrier lies between the product and what overwrites its tiles"),
    (nothing_left_to_arrive, "all copies to these bytes were waited for in the loop"),
    (closes_later, "a group is closed later, and nothing of it is issued or touched between"),
    (waits_earlier, "the wait comes earlier than it has to"),
    (both(o.StTile, (o.StTile, o.StRows)), "two outputs are stored, in either order"),
    (both(o.MbarWait, o.MbarWait), "two waits that must both have ended, in either order"),
    (both(o.MbarWait, o.Enter), "data and turn are waited for, in either order"),
    (fence_of_registers, "a fence of registers beside an op that touches none"),
    (both(o.Leave, (o.Retire, o.Commit)), "the turn is for issuing products, and all are issued"),
    (beside_arithmetic(o.Leave), "the turn is for issuing products, and all are issued"),
    (waits_elsewhere, "no register of the products waited for is touched"),
    (copied_elsewhere, "a copy to where the products waited for read nothing"),
    (both(o.MbarArrive, o.MbarArrive), "two slots are given back, in either order"),
    (beside_arithmetic(o.MbarArrive), "a slot is given back beside arithmetic on registers"),
    (both(o.MbarArrive, o.RedFrag), "a slot is given back beside an addition from registers to global memory"),
    (waits_for_other_data, "a slot is waited for beside arithmetic that touches no tile of its ring"),
    (beside_arithmetic(o.BulkRetire), "stores are waited for beside arithmetic on registers"),
    (handed_over_later, "the slot waited for was filled before this one, and is freed without it"),
    (other_ring, "slots of two rings that do not depend on one another"),
    (both(o.StRows, (o.BulkRetire, o.Sync)), "a store to global memory beside a wait for shared memory"),
    (masked_rows_are_redone, "a row with a masked key in a later tile saw none before, and is redone by the guard"),
)
