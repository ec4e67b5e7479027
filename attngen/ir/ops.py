"""The ops of a schedule: about forty, each a dataclass here or in `small_ops`, a macro in `templates/ops`, a meaning
in the emulator.

Fields are typed; the printed form of an op is `ID kind field=value ...` (see `attngen.ir.text`), so a new op needs no
printer and no parser. `reads` and `writes` name the buffers and values an op touches: the verifier and the passes see
ops through them and through `unit` alone."""

from __future__ import annotations

from dataclasses import dataclass

from attngen.expr import Expr, variables, walk
from attngen.expr import Op as ExprOp
from attngen.ir.small_ops import CastFrag as CastFrag
from attngen.ir.small_ops import CompactTiles as CompactTiles
from attngen.ir.small_ops import DealItems as DealItems
from attngen.ir.small_ops import Pointwise as Pointwise
from attngen.ir.small_ops import RankTile as RankTile
from attngen.ir.small_ops import ScanTiles as ScanTiles
from attngen.ir.small_ops import SortItems as SortItems
from attngen.ir.small_ops import SumRows as SumRows
from attngen.ir.terms import (
    Assign as Assign,
)
from attngen.ir.terms import (
    Completion as Completion,
)
from attngen.ir.terms import (
    Heads as Heads,
)
from attngen.ir.terms import (
    Op as Op,
)
from attngen.ir.terms import (
    ReduceKind as ReduceKind,
)
from attngen.ir.terms import (
    Ref as Ref,
)
from attngen.ir.terms import (
    Scope as Scope,
)
from attngen.ir.terms import (
    Stmt as Stmt,
)
from attngen.ir.terms import (
    Unit as Unit,
)
from attngen.ir.terms import read, updated, written

# ---- copies ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class CpAsync(Op):
    """cp.async of a tile's rows [row, row + buffer rows) of tensor `src`, `bytes` (4, 8 or 16) at once; rows outside
    [first, limit) are zero-filled (first None: 0). head: which head, where it changes inside an item (None: the
    item's)."""

    dst: Ref = written()
    src: str
    heads: Heads
    row: Expr
    limit: Expr
    first: Expr | None = None
    head: Expr | None = None
    bytes: int = 16
    unit = Unit.COPY


@dataclass(frozen=True, kw_only=True)
class CpVector(Op):
    """4-byte cp.async of the elements [row, row + buffer columns) of a tensor of row values, in groups with those of
    `cp_async`; elements from `limit` on are zero-filled."""

    dst: Ref = written()
    src: str
    row: Expr
    limit: Expr
    head: Expr | None = None
    unit = Unit.COPY


@dataclass(frozen=True, kw_only=True)
class CopyTile(Op):
    """The same copy element by element through registers, for rows that start at any element."""

    dst: Ref = written()
    src: str
    heads: Heads
    row: Expr
    limit: Expr
    first: Expr | None = None
    head: Expr | None = None
    unit = Unit.SHARED


@dataclass(frozen=True, kw_only=True)
class CpCommit(Op):
    """Closes a group of cp.async; groups are numbered by issue order."""

    group: str
    unit = Unit.SYNC


@dataclass(frozen=True, kw_only=True)
class CpWait(Op):
    """Waits until at most `pending` newer groups than `group` are in flight."""

    group: str
    pending: int
    unit = Unit.SYNC


@dataclass(frozen=True, kw_only=True)
class TmaLoad(Op):
    """One tile by the copy engine; completes `bar` with its bytes. Rows outside the tensor arrive as zeros. head: which
    head, where it is not that of the step."""

    dst: Ref = written()
    src: str
    heads: Heads
    row: Expr
    bar: Ref
    head: Expr | None = None
    unit = Unit.COPY


@dataclass(frozen=True, kw_only=True)
class TmaStore(Op):
    """Shared tile to columns `column`.. of global by the copy engine, one thread; what lies outside the tensor is not
    written."""

    dst: str
    src: Ref = read()
    heads: Heads
    row: Expr
    column: int = 0
    unit = Unit.COPY


@dataclass(frozen=True, kw_only=True)
class TmaReduce(Op):
    """As tma_store, adding to what is there (fp32)."""

    dst: str
    src: Ref = read()
    heads: Heads
    row: Expr
    mode: Assign
    unit = Unit.COPY


@dataclass(frozen=True, kw_only=True)
class BulkLoad(Op):
    """Rows from `at` of a per-row tensor of f32 (a multiple of 16 bytes, from one) by the copy engine; completes
    `bar`. head: as in tma_load."""

    dst: Ref = written()
    src: str
    heads: Heads
    at: Expr
    bytes: int
    bar: Ref
    head: Expr | None = None
    unit = Unit.COPY


@dataclass(frozen=True, kw_only=True)
class BulkCommit(Op):
    unit = Unit.SYNC


@dataclass(frozen=True, kw_only=True)
class BulkRetire(Op):
    """Waits until at most `pending` committed bulk groups are unfinished."""

    pending: int
    until: Completion
    unit = Unit.SYNC


# ---- order -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class CtaSync(Op):
    unit = Unit.SYNC


@dataclass(frozen=True, kw_only=True)
class MbarWait(Op):
    bar: Ref
    unit = Unit.SYNC


@dataclass(frozen=True, kw_only=True)
class MbarArrive(Op):
    """One arrival: of a single thread, or of each warp by one lane, which speaks for a warp that ran together. With
    `each_thread` one of each thread: what a thread wrote or copied itself is handed over by its own arrival alone."""

    bar: Ref
    each_thread: bool = False
    unit = Unit.SYNC


@dataclass(frozen=True, kw_only=True)
class MbarExpect(Op):
    """Arrive, and expect `bytes` of asynchronous copies in this phase."""

    bar: Ref
    bytes: int
    unit = Unit.SYNC


@dataclass(frozen=True, kw_only=True)
class Enter(Op):
    """Waits for this role's turn in an order ring."""

    ring: str
    unit = Unit.SYNC


@dataclass(frozen=True, kw_only=True)
class Leave(Op):
    """Hands the turn to the next role of an order ring."""

    ring: str
    unit = Unit.SYNC


@dataclass(frozen=True, kw_only=True)
class Sync(Op):
    """Named barrier over `threads` threads."""

    bar: Ref
    threads: int
    unit = Unit.SYNC


@dataclass(frozen=True, kw_only=True)
class Proxy(Op):
    """fence.proxy.async: earlier generic writes to shared memory become visible to asynchronous reads."""

    unit = Unit.SYNC


# ---- tensor cores ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Ldmatrix(Op):
    """The role's rows of a shared tile as an opA fragment."""

    dst: Ref = written()
    src: Ref = read()
    unit = Unit.SHARED


@dataclass(frozen=True, kw_only=True)
class MmaSync(Op):
    """d (+)= a . b with mma.sync; a: opA fragment or shared tile, b: shared tile (`.T`: its rows are columns of d).

    A warp has the rows of d that it has of all values. With a shared tile `a.T` all warps share d in blocks of the size
    of its value: blocks of rows side by side, then blocks of columns."""

    d: Ref = updated()
    a: Ref = read()
    b: Ref = read()
    zero: bool = False
    unit = Unit.TENSOR


@dataclass(frozen=True, kw_only=True)
class Wgmma(Op):
    """d (+)= a . b as asynchronous wgmma of `group`; zero: the first step overwrites d."""

    d: Ref = updated()
    a: Ref = read()
    b: Ref = read()
    group: str
    zero: bool = False
    unit = Unit.TENSOR


@dataclass(frozen=True, kw_only=True)
class Open(Op):
    """wgmma.fence: starts an issue segment; `regs` are registers written since the last one."""

    regs: tuple[Ref, ...] = ()
    unit = Unit.SYNC


@dataclass(frozen=True, kw_only=True)
class Commit(Op):
    group: str
    unit = Unit.SYNC


@dataclass(frozen=True, kw_only=True)
class Retire(Op):
    """Waits for `group`; how many newer groups may stay in flight follows from the issue order."""

    group: str
    unit = Unit.SYNC


# ---- registers -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Map(Op):
    """Scalar statements over the elements (or, without ELEM statements, the rows) of the fragment `over`. A name of a
    shared vector is its element at the column. Statements of scope ITEM are worked out at each execution, so that they
    take no registers between two."""

    over: Ref
    copies: tuple[Ref, ...] = ()  # which copy or slot is meant, for values and vectors that have several: `rP[k]`
    body: tuple[Stmt, ...]

    def _ref(self, name: str) -> Ref:
        return next((r for r in (self.over, *self.copies) if r.name == name), Ref(name=name))

    def reads(self) -> tuple[Ref, ...]:
        names = {n: None for s in self.body for e in walk(*s.exprs) if e.op is ExprOp.VAR for n in (e.name,)}
        names.update({s.target: None for s in self.body if s.accumulate and not s.index})
        return tuple(self._ref(n) for n in names)

    def writes(self) -> tuple[Ref, ...]:
        return tuple(self._ref(n) for n in {s.target: None for s in self.body if not s.index})


@dataclass(frozen=True, kw_only=True)
class Reduce(Op):
    """Row reduction of a fragment over its columns into a row value, across the quad; or of a row value itself
    (`src` a ROW value: the partial results of the four lanes)."""

    kind: ReduceKind
    dst: Ref = written()
    src: Ref = read()


@dataclass(frozen=True, kw_only=True)
class Vote(Op):
    """dst = any lane of the warp for which `pred`, over row values, holds for one of its rows."""

    dst: Ref = written()
    pred: Expr

    def reads(self) -> tuple[Ref, ...]:
        return tuple(Ref(name=n) for n in sorted(variables(self.pred)))


@dataclass(frozen=True, kw_only=True)
class Fill(Op):
    """Every element of a value becomes `value`."""

    dst: Ref = written()
    value: Expr


# ---- registers <-> memory ----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class StFrag(Op):
    """Fragment, or a block of its columns as wide as the tile (`rO[:1]`), to a shared tile (stmatrix where the target
    has it); transposed: the tile holds its transpose. A packed opA fragment is stored as it is."""

    dst: Ref = written()
    src: Ref = read()
    scaled: str = ""  # a row value that multiplies the rows on the way
    unit = Unit.SHARED


@dataclass(frozen=True, kw_only=True)
class LdFrag(Op):
    dst: Ref = written()
    src: Ref = read()
    unit = Unit.SHARED


@dataclass(frozen=True, kw_only=True)
class LdVec(Op):
    """A COL value from a shared vector."""

    dst: Ref = written()
    src: Ref = read()
    unit = Unit.SHARED


@dataclass(frozen=True, kw_only=True)
class StTile(Op):
    """Shared tile to columns `column`.. of global with stores of 16 bytes, or 4 where rows are no multiples of 16; rows
    >= limit and columns beyond the head dim are not written."""

    dst: str
    src: Ref = read()
    heads: Heads
    row: Expr
    limit: Expr
    column: int = 0
    bytes: int = 16
    unit = Unit.GLOBAL


@dataclass(frozen=True, kw_only=True)
class StRows(Op):
    """A ROW value to a per-row tensor (one lane of each quad), rows < limit."""

    dst: str
    src: Ref = read()
    heads: Heads
    limit: Expr
    unit = Unit.GLOBAL


@dataclass(frozen=True, kw_only=True)
class RedAdd(Op):
    """Fragment added to a global fp32 tensor with red.add; its rows and columns lie as those of a product with a
    shared tile `a.T` (see mma_sync). The tensor has all rows of the tile. head: which head, where it changes inside an
    item."""

    dst: str
    src: Ref = read()
    heads: Heads
    row: Expr
    mode: Assign
    head: Expr | None = None
    unit = Unit.GLOBAL


@dataclass(frozen=True, kw_only=True)
class RedFrag(Op):
    """Accumulator of a warpgroup added to a workspace of f32 from element `at` of its head on, in the order of its
    registers: four of each thread, thread by thread, then the next four (attngen.layout.block_offset). rows: with fewer
    than a warpgroup's 64, the warps of the others add nothing."""

    dst: str
    src: Ref = read()
    heads: Heads
    at: Expr
    mode: Assign
    rows: int = 64
    unit = Unit.GLOBAL


OPS: dict[str, type[Op]] = {}


def kind_of(op: type[Op]) -> str:
    """`CpAsync` -> `cp_async`: the word in the text, and the name of the macro."""
    return "".join(("_" if i and c.isupper() else "") + c.lower() for i, c in enumerate(op.__name__))


OPS.update({kind_of(c): c for c in Op.__subclasses__()})
