"""tile: Graph -> Program. Cuts the rows into tiles of block_m queries and the streamed axis into tiles of block_n keys.

Before   a graph whose reductions over N are one Fold
After    loads, contractions, maps and reductions on tiles; a loop over the visited key tiles; item scalars
Why      nothing here knows softmax: the fold's states say what is reduced, corrected and finalised"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from attngen.config import AnyConfig, Config, FoldPolicy, HopperConfig
from attngen.expr import (
    ONE,
    SCALE,
    SEQLEN_K,
    SEQLEN_Q,
    DType,
    Expr,
    J,
    Op,
    add,
    conj,
    const,
    loads,
    make,
    mul,
    substitute,
    var,
    variables,
)
from attngen.fold import fold as fold_expr
from attngen.ir.graph import Fold, Graph, Map, Mask, Output
from attngen.ir.ops import Fill, Heads, Reduce, ReduceKind, Ref, Scope, Stmt
from attngen.ir.ops import Map as MapOp
from attngen.ir.ops import Op as TileOp
from attngen.ir.program import ContractTile, LoadTile, Program, StoreTile, StoreVector, TileValue, numbered
from attngen.ir.schedule import Access, Elem, ScalarArg, Step, TensorArg, Workspace
from attngen.layout import Fragment
from attngen.naming import RESERVED
from attngen.passes.bounded import bounded, within
from attngen.passes.choose import padded
from attngen.passes.exponent import exponent, tile_addresses
from attngen.passes.policy import ACCUMULATOR, WEIGHTS, FoldOps
from attngen.passes.ranges import Visit, VisitSource
from attngen.passes.scopes import Scopes, Target
from attngen.passes.simplify import simplify_expr
from attngen.passes.stream import neutral
from attngen.passes.textbook import SINK
from attngen.passes.visits import BY_LENGTH, M_TILE, VISIT, i32, ranges_fact, seen_keys, visits
from attngen.signature import Signature
from attngen.spec import Storage, Variant

_STORAGE = {Storage.F32: Elem.F32, Storage.F16: Elem.F16, Storage.BF16: Elem.BF16}
_STORAGE |= {Storage.I32: Elem.I32, Storage.I64: Elem.I64, Storage.U8: Elem.U8}


@dataclass
class _Tiler:
    graph: Graph
    fold: Fold
    variant: Variant
    signature: Signature
    config: AnyConfig
    elem: Elem
    scopes: Scopes
    fold_ops: FoldOps
    ops: list[Step] = field(default_factory=list)
    seen: tuple[Expr | None, Expr] = (None, SEQLEN_K)  # keys that some row of the tile may see
    captures: tuple[TensorArg, ...] = ()
    whole: bool = False  # full tiles have no rows of padding

    def next_id(self) -> str:
        return f"o{len(self.ops)}"

    def map(self, over: str, body: tuple[Stmt, ...], only: str = "", note: str = "") -> None:
        if body:
            self.ops.append(MapOp(id=self.next_id(), over=Ref(name=over), body=body, only=only, note=note))

    # ---- the body of the loop ----------------------------------------------------------------------------------

    @property
    def contiguous(self) -> frozenset[str]:
        """Captured tensors whose elements are read at a distance from the thread's first one."""
        return frozenset(t.name for t in self.captures if not t.strided and isinstance(self.config, HopperConfig))

    @property
    def reads_logits(self) -> bool:
        """A score of the positions alone needs neither queries nor keys."""
        mask = self.graph[self.fold.x]
        assert isinstance(mask, Mask)
        score = self.graph[mask.x]
        return not isinstance(score, Map) or bool(score.inputs)

    def scores(self) -> None:
        """s = q . k, the user's score, the mask."""
        mask = self.graph[self.fold.x]
        assert isinstance(mask, Mask)
        if self.reads_logits:
            self.ops.append(LoadTile(id=self.next_id(), dst=Ref(name="sK"), src="k", heads=Heads.KV,
                                     row=mul(i32("n"), const(self.config.block_n)), limit=SEQLEN_K))
            self.ops.append(ContractTile(id=self.next_id(), d=Ref(name="rS"), a=Ref(name="sQ"),
                                         b=Ref(name="sK", transposed=True), zero=True))  # fmt: skip
        score = self.graph[mask.x]
        visible = conj(make(Op.LT, J, SEQLEN_K), bounded(mask.visible, guarded=self.contiguous))
        if isinstance(score, Map):
            self.score(score)
        hidden = make(Op.WHERE, visible, var("rS", DType.F32), mask.hidden)
        self.map("rS", self.scopes.split(Target("rS", hidden)), only="masked", note=_where(self.variant, "mask"))

    def score(self, score: Map) -> None:
        """The user's score in place of the logits. In a full tile every pair of a query and a key is visible, and so
        inside of what a captured tensor has: only rows of padding are moved, to the last query."""
        logits = {var(i, DType.F32): var("rS", DType.F32) for i in score.inputs}
        note = _where(self.variant, "score")
        if isinstance(self.config, Config):
            anywhere = substitute(bounded(score.expr), logits)
            self.map("rS", self.scopes.split(Target("rS", anywhere)), note=note)
            return
        m, n = self.config.block_m, self.config.block_n
        anywhere = substitute(bounded(score.expr, guarded=self.contiguous), logits)
        contiguous = self.contiguous if self.whole else frozenset()
        full = substitute(tile_addresses(within(score.expr, self.whole), m, n, contiguous), logits)
        # elements made of the logits keep both alive: too much where loads have to be in flight as well
        if self.config.policy is FoldPolicy.REFERENCE and not by_position(score.expr):
            self.fold_ops.full_score = full
        versions = [(anywhere, "masked"), (full, "full")] if full is not anywhere else [(anywhere, "")]
        if self.fold_ops.full_score is not None:  # elements of full tiles are made of the logits
            versions = [(anywhere, "masked")]
        for value, only in versions:
            grouped = exponent(value, None, var("rS", DType.F32), self.scopes, self.config.block_n)
            self.map("rS", self.scopes.split(Target("rS", grouped)), only=only, note=note)

    def fold_steps(self) -> tuple[tuple[Step, ...], tuple[Step, ...]]:
        """What the fold does with a tile's scores before the contraction with the values: first tile, later ones."""
        if isinstance(self.config, Config):
            return (), tuple(self.fold_ops.update(FoldPolicy.RUNNING))
        later = tuple(self.fold_ops.update(self.config.policy))
        return tuple(self.fold_ops.lift(self.config.policy)), later

    def contraction(self) -> None:
        """p . v. Values of keys that no row of the tile sees are zeros: whatever they hold, 0 * NaN would reach every
        row."""
        first, limit = self.seen
        self.ops.append(LoadTile(id=self.next_id(), dst=Ref(name="sV"), src="v", heads=Heads.KV,
                                 row=mul(i32("n"), const(self.config.block_n)), limit=limit, first=first))
        self.ops.append(ContractTile(id=self.next_id(), d=Ref(name=ACCUMULATOR), a=Ref(name=WEIGHTS),
                                     b=Ref(name="sV")))  # fmt: skip

    # ---- before and after ----------------------------------------------------------------------------------------

    def prologue(self) -> tuple[TileOp, ...]:
        row = mul(M_TILE, const(self.config.block_m))
        ops: list[TileOp] = []
        if self.reads_logits:
            ops.append(LoadTile(id="o0", dst=Ref(name="sQ"), src="q", heads=Heads.Q, row=row, limit=SEQLEN_Q))
        if self.scopes.rows:
            body = tuple(self.scopes.rows.values())
            ops.append(MapOp(id=f"o{len(ops)}", over=Ref(name="rS"), body=body, note="once an item"))
        for s in self.fold.states:
            if s.operand or isinstance(self.config, Config):  # else the first tile is the state
                name = ACCUMULATOR if s.operand else s.name
                ops.append(Fill(id=f"o{len(ops)}", dst=Ref(name=name), value=neutral(s)))
        return tuple(ops)

    def epilogue(self) -> tuple[TileOp, ...]:
        self.ops = []
        for s in self.fold.states:
            if s.kind is ReduceKind.SUM and not s.operand:
                self.ops.append(
                    Reduce(id=self.next_id(), kind=ReduceKind.SUM, dst=Ref(name=s.name), src=Ref(name=s.name))
                )
        body: list[Stmt] = []
        late: dict[str, Expr] = {}  # factors of accumulators that the sink brings
        if any(s.extra is not None for s in self.fold.states):
            ops = replace(self.fold_ops, factor={})
            used: dict[Expr, Expr] = {}
            for s in self.fold.states:
                if s.kind is ReduceKind.MAX and s.extra is not None:
                    body += ops.move(s, self.scopes.hoist_item(bounded(s.extra)), used)
                elif s.extra is not None:
                    more = self.scopes.split(Target(s.name, substitute(bounded(s.extra), used), Scope.ROW))
                    body += [
                        *more[:-1],
                        Stmt(scope=Scope.ROW, target=s.name, value=add(var(s.name, DType.F32), more[-1].value)),
                    ]
            late = {name: var(a, DType.F32) for name, a in ops.factor.items()}
        stores: list[TileOp] = []
        for out in self.graph.of(Output):
            assert isinstance(out, Output)
            final = self.graph[out.x]
            accumulator = next((s.name for s in self.fold.states if s.operand), "")
            expr = final.expr if isinstance(final, Map) else var(out.x, DType.F32)
            if accumulator in variables(expr):
                factor = fold_expr(substitute(expr, {var(accumulator, DType.F32): late.get(accumulator, ONE)}))
                scaled = "" if factor is ONE else "inv"
                if scaled:
                    self.fold_ops.row("inv")
                    body.append(Stmt(scope=Scope.ROW, target="inv", value=factor))
                stores.append(StoreTile(id="", dst=out.x, src=Ref(name="rO"), scaled=scaled,
                                        row=mul(M_TILE, const(self.config.block_m)), limit=SEQLEN_Q))  # fmt: skip
            else:
                self.fold_ops.row(out.x)
                body.append(Stmt(scope=Scope.ROW, target=out.x, value=expr))
                stores.append(StoreVector(id="", dst=out.x, src=Ref(name=out.x), limit=SEQLEN_Q))
        self.map("rO", tuple(body))
        for op in stores:
            self.ops.append(replace(op, id=self.next_id()))
        return tuple(op for op in self.ops if isinstance(op, TileOp))


def by_position(score: Expr) -> bool:
    """Whether a captured tensor is read by query or key."""
    return any(variables(*x.args) & {"i", "j"} for x in loads(score))


def _where(variant: Variant, what: str) -> str:
    root = variant.score if what == "score" else variant.mask
    places = dict(variant.locations)
    at = places.get(root)
    return f"{what} {variant.description}" + (f" {at.file.rsplit('/', 1)[-1]}:{at.line}" if at else "")


def tile(graph: Graph, variant: Variant, signature: Signature, config: AnyConfig, visit: Visit) -> Program:
    fold = next(iter(graph.of(Fold)))
    assert isinstance(fold, Fold)
    names = {simplify_expr(e): n for e, n in variant.names} | {s.units: "scale_log2" for s in fold.states if s.units}
    base = dict.fromkeys(("x", "inv", "a", "a1", "a_f", "a1_f"), Scope.ROW)
    base |= {"rS": Scope.ELEM, "rO": Scope.ELEM}
    if not isinstance(config, Config):
        base["n"] = Scope.ROW  # of the tile: nothing that depends on it is done once an item
    base |= {f"{s.name}{end}": Scope.ROW for s in fold.states for end in ("", "_old", "_ref", "_next", "_t")}
    taken = {*RESERVED, *base, *(c.name for c in variant.captures)}
    scopes = Scopes(base, names, taken)
    elem = elem_of(signature)
    # the copy engine has no other limit than the tensor's end
    seen_lets, seen = seen_keys(variant.mask) if isinstance(config, Config) else ((), (None, SEQLEN_K))
    whole = isinstance(config, HopperConfig) and visit.source is VisitSource.CLOSED and by_position(variant.score)
    t = _Tiler(
        graph, fold, variant, signature, config, elem, scopes, FoldOps(fold, scopes, config.block_n), seen=seen,
        captures=_captures(variant, signature), whole=whole,
    )  # fmt: skip
    t.scores()
    scored = tuple(t.ops)
    first, later = t.fold_steps()
    t.ops = []
    t.contraction()
    contracted = tuple(t.ops)
    epilogue = t.epilogue()
    lets, loop, workspaces = visits(visit, config, variant.mask, (*scored, *later, *contracted), whole)
    return Program(
        name="attn_fwd", head_dim_qk=signature.head_dim_qk, head_dim_v=signature.head_dim_v, config=config,
        tensors=_tensors(graph, variant, signature, workspaces), scalars=_SCALARS,
        lets=(*lets, *seen_lets, *scopes.lets.values()),
        values=(*_tiles(config, signature, elem, t.reads_logits), *_rows(t), *_uniform(t)),
        prologue=t.prologue(), first=_unmasked((*scored, *first, *contracted)) if first else (), loop=loop,
        epilogue=epilogue,
        workspaces=workspaces, visit_mask=graph[fold.x].visible if workspaces else None,  # type: ignore[attr-defined]
        facts=(ranges_fact(visit),),
    )  # fmt: skip


def _unmasked(ops: tuple[Step, ...]) -> tuple[Step, ...]:
    """For the first tile, whose class is not known: as if masked."""
    return numbered(tuple(replace(op, only="") for op in ops if op.only in ("", "masked")))


def _uniform(t: _Tiler) -> tuple[TileValue, ...]:
    return tuple(
        TileValue(name=name, elem=Elem.U8, rows=0, cols=0, axes=("", ""), fragment=Fragment.UNI, dtype="bool")
        for name in t.fold_ops.uniform
    )


def _rows(t: _Tiler) -> tuple[TileValue, ...]:
    """Row values; the fold's state last."""
    rows, state = dict(t.fold_ops.rows), [s.name for s in t.fold.states if not s.operand]
    for name in state:
        rows.pop(name, None)
    rows |= dict.fromkeys(state, "f32")
    for stmt in t.scopes.rows.values():
        rows[stmt.target] = {DType.I32: "i32", DType.BOOL: "bool"}.get(stmt.value.dtype, "f32")
    return tuple(
        TileValue(name=name, elem=Elem.F32, rows=t.config.block_m, cols=0, axes=("M", ""), dtype=dtype)
        for name, dtype in rows.items()
    )


_SCALARS = (
    *(ScalarArg(name=n, dtype=DType.I32) for n in ("batch", "heads", "group", "seqlen_q", "seqlen_k")),
    ScalarArg(name=SCALE.name, dtype=DType.F32),
)


def _tiles(config: AnyConfig, signature: Signature, elem: Elem, logits: bool) -> tuple[TileValue, ...]:
    m, n, d, dv = config.block_m, config.block_n, padded(signature.head_dim_qk), padded(signature.head_dim_v)
    shapes: Mapping[str, tuple[Elem, int, int, tuple[str, str]]] = {
        "sQ": (elem, m, d, ("M", "D")), "sK": (elem, n, d, ("N", "D")), "sV": (elem, n, dv, ("N", "Dv")),
        "rS": (Elem.F32, m, n, ("M", "N")), "rP": (elem, m, n, ("M", "N")), "rO": (Elem.F32, m, dv, ("M", "Dv")),
    }  # fmt: skip
    return tuple(
        TileValue(name=k, elem=e, rows=r, cols=c, axes=a)
        for k, (e, r, c, a) in shapes.items() if logits or k not in ("sQ", "sK")
    )  # fmt: skip


def captured(name: str, storage: Storage, rank: int, signature: Signature) -> TensorArg:
    strided = name in signature.strided and rank > 0
    return TensorArg(name=name, elem=_STORAGE[storage], rank=rank, access=Access.CAPTURE, strided=strided)


def _captures(variant: Variant, signature: Signature) -> tuple[TensorArg, ...]:
    sink = (captured(SINK, variant.sink, 1, signature),) if variant.sink else ()
    return (*sink, *(captured(c.name, c.storage, c.rank, signature) for c in variant.captures))


def elem_of(signature: Signature) -> Elem:
    return Elem.BF16 if signature.dtype.value == "bf16" else Elem.F16


def _tensors(
    graph: Graph, variant: Variant, signature: Signature, workspaces: tuple[Workspace, ...]
) -> tuple[TensorArg, ...]:
    elem = elem_of(signature)
    tensors = [TensorArg(name=n, elem=elem, rank=4, access=Access.IN) for n in ("q", "k", "v")]
    for out in graph.of(Output):
        assert isinstance(out, Output)
        rows_only = out.x == "lse"
        tensors.append(
            TensorArg(name=out.x, elem=Elem.F32 if rows_only else elem, rank=3 if rows_only else 4, access=Access.OUT)
        )
    tensors += _captures(variant, signature)
    tensors += [
        TensorArg(name=w.name, elem=w.elem, rank=len(w.shape), access=Access.WORK)
        for w in workspaces
        if w.name in (VISIT, BY_LENGTH)
    ]
    return tuple(tensors)
