"""tile: Graph -> Program. Cuts the rows into tiles of block_m queries and the streamed axis into tiles of block_n keys.

Before   a graph whose reductions over N are one Fold
After    loads, contractions, maps and reductions on tiles; a loop over the visited key tiles; item scalars
Why      nothing here knows softmax: the fold's states say what is reduced, corrected and finalised"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from attngen.config import Config
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
    load,
    make,
    maximum,
    minimum,
    mul,
    rewrite,
    sub,
    substitute,
    var,
    variables,
    walk,
)  # fmt: skip
from attngen.fold import fold as fold_expr
from attngen.interval import analyse
from attngen.ir.graph import Fold, Graph, Map, Mask, Output, State
from attngen.ir.ops import Fill, Heads, Reduce, ReduceKind, Ref, Scope, Stmt
from attngen.ir.ops import Map as MapOp
from attngen.ir.ops import Op as TileOp
from attngen.ir.program import ContractTile, LoadTile, Program, StoreTile, StoreVector, TileLoop, TileValue
from attngen.ir.schedule import Access, Elem, Fact, ScalarArg, TensorArg, Workspace
from attngen.passes.choose import padded
from attngen.passes.ranges import Visit, VisitSource
from attngen.passes.scopes import Scopes, Target
from attngen.passes.simplify import simplify_expr
from attngen.passes.stream import before, neutral, reference
from attngen.passes.textbook import SINK
from attngen.signature import Signature
from attngen.spec import Storage, Variant
from attngen.sums import tidy

M_TILE, T = var("m", DType.I32), var("t", DType.I32)
I_LO, I_HI = var("i_lo", DType.I32), var("i_hi", DType.I32)
VISIT = "visit"
_STORAGE = {Storage.F32: Elem.F32, Storage.F16: Elem.F16, Storage.BF16: Elem.BF16}
_STORAGE |= {Storage.I32: Elem.I32, Storage.I64: Elem.I64, Storage.U8: Elem.U8}
RESERVED = frozenset((  # names that the text of a kernel gives a meaning to
    "b h i j m n t p q k v o out lse rS rP rO sQ sK sV sO tid warp lane quad smem m_tiles bh hkv i_lo i_hi "
    "n_lo n_hi full_lo full_hi end0 end1 end2 seen_lo seen_hi masked count ri ci ei at packed i0 j0 i_f j_f "
    "i0_f j0_f scale seqlen_q seqlen_k heads batch group kv_heads n_tiles dout dlse delta dq dk dv"
).split())


def i32(name: str) -> Expr:
    return var(name, DType.I32)


def bounded(e: Expr, work: frozenset[str] = frozenset()) -> Expr:
    """Every index of a captured tensor clamped to the tensor: rows and columns of padding, and masked positions, then
    never read outside of it. Indices of visible positions are inside by the user's contract."""

    def clamp(x: Expr) -> Expr | None:
        if x.op is not Op.LOAD or x.name in work:
            return None
        sizes = (i32(f"{x.name}_n{k}") for k in range(len(x.args)))
        return load(x.name, tuple(_clamped(a, n) for a, n in zip(x.args, sizes, strict=True)), x.dtype)

    return rewrite(e, clamp)


def _clamped(a: Expr, size: Expr) -> Expr:
    last = sub(size, const(1))
    if a.op is Op.CONST:
        return a
    return minimum(a, last) if a.op is Op.VAR else minimum(maximum(a, const(0)), last)


@dataclass
class _Tiler:
    graph: Graph
    fold: Fold
    variant: Variant
    signature: Signature
    config: Config
    visit: Visit
    elem: Elem
    scopes: Scopes
    ops: list[TileOp] = field(default_factory=list)
    rows: list[TileValue] = field(default_factory=list)
    seen: tuple[Expr | None, Expr] = (None, SEQLEN_K)  # keys that some row of the tile may see
    factor: dict[str, str] = field(default_factory=dict)  # accumulator -> row value that corrects it

    def next_id(self) -> str:
        return f"o{len(self.ops)}"

    def row_value(self, name: str, dtype: str = "f32") -> None:
        if all(v.name != name for v in self.rows):
            self.rows.append(
                TileValue(name=name, elem=Elem.F32, rows=self.config.block_m, cols=0, axes=("M", ""), dtype=dtype)
            )

    def map(self, over: str, body: tuple[Stmt, ...], only: str = "", note: str = "") -> None:
        if body:
            self.ops.append(MapOp(id=self.next_id(), over=Ref(name=over), body=body, only=only, note=note))

    # ---- the body of the loop ----------------------------------------------------------------------------------

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
        fragment = var("rS", DType.F32)
        if isinstance(score, Map):
            value = substitute(bounded(score.expr), {var(i, DType.F32): fragment for i in score.inputs})
            self.map("rS", self.scopes.split(Target("rS", value)), note=_where(self.variant, "score"))
        visible = conj(make(Op.LT, J, SEQLEN_K), bounded(mask.visible))
        hidden = make(Op.WHERE, visible, fragment, mask.hidden)
        self.map("rS", self.scopes.split(Target("rS", hidden)), only="masked", note=_where(self.variant, "mask"))

    def references(self) -> dict[Expr, Expr]:
        """Moves the maxima over the tile's elements; what later statements use as reference."""
        used: dict[Expr, Expr] = {}
        for s in self.fold.states:
            if s.kind is not ReduceKind.MAX:
                continue
            self.row_value("x")
            self.ops.append(Reduce(id=self.next_id(), kind=ReduceKind.MAX, dst=Ref(name="x"), src=Ref(name="rS")))
            x = var("x", DType.F32)
            body = self.move(s, x if s.units is None else mul(x, self.scopes.hoist_item(s.units)), used)
            self.map("rS", tuple(body))
        return used

    def move(self, s: State, x: Expr, used: dict[Expr, Expr]) -> list[Stmt]:
        """Row statements: reference := max(reference, x), factors of what was summed so far, sums corrected."""
        old, ref, r = f"{s.name}_old", f"{s.name}_ref", var(s.name, DType.F32)
        self.row_value(ref)
        used[r] = var(ref, DType.F32)
        body = [
            Stmt(scope=Scope.ROW, target=old, value=r),
            Stmt(scope=Scope.ROW, target=s.name, value=maximum(var(old, DType.F32), x)),
            Stmt(scope=Scope.ROW, target=ref, value=reference(r)),
        ]
        factors: dict[Expr, str] = {}
        for other in self.fold.states:
            if other.correction is None or before(s.name) not in set(_vars(other.correction)):
                continue
            factor = substitute(other.correction, used)
            if factor not in factors:
                factors[factor] = "a" if not factors else f"a{len(factors)}"
                self.row_value(factors[factor])
                body.append(Stmt(scope=Scope.ROW, target=factors[factor], value=factor))
            if not other.operand:
                scaled = mul(var(other.name, DType.F32), var(factors[factor], DType.F32))
                body.append(Stmt(scope=Scope.ROW, target=other.name, value=scaled))
            else:
                self.factor[other.name] = factors[factor]
        return body

    def sums(self, used: dict[Expr, Expr]) -> None:
        """The accumulators corrected, elements of the sums from the scores, p . v."""
        z = {var(self.fold.x, DType.F32): var("rS", DType.F32)}
        # before the elements: the factors are then dead while scores and weights are both alive
        for s in self.fold.states:
            if s.operand and s.name in self.factor:
                scaled = mul(var("rO", DType.F32), var(self.factor[s.name], DType.F32))
                self.map("rO", (Stmt(scope=Scope.ELEM, target="rO", value=scaled),))
        targets = [
            Target("rP", value) if s.operand else Target(s.name, value, accumulate=True)
            for s in self.fold.states if s.kind is not ReduceKind.MAX
            for value in (substitute(s.element, {**z, **used}),)
        ]  # fmt: skip
        self.map("rS", self.scopes.split(*targets))
        # values of keys that no row of the tile sees are zeros: whatever they hold, 0 * NaN would reach every row
        first, limit = self.seen
        self.ops.append(LoadTile(id=self.next_id(), dst=Ref(name="sV"), src="v", heads=Heads.KV,
                                 row=mul(i32("n"), const(self.config.block_n)), limit=limit, first=first))
        self.ops.append(ContractTile(id=self.next_id(), d=Ref(name="rO"), a=Ref(name="rP"), b=Ref(name="sV")))

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
            name = "rO" if s.operand else s.name
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
            self.factor.clear()
            used: dict[Expr, Expr] = {}
            for s in self.fold.states:
                if s.kind is ReduceKind.MAX and s.extra is not None:
                    body += self.move(s, self.scopes.hoist_item(bounded(s.extra)), used)
                elif s.extra is not None:
                    more = self.scopes.split(Target(s.name, substitute(bounded(s.extra), used), Scope.ROW))
                    body += [
                        *more[:-1],
                        Stmt(scope=Scope.ROW, target=s.name, value=add(var(s.name, DType.F32), more[-1].value)),
                    ]
            late = {name: var(a, DType.F32) for name, a in self.factor.items()}
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
                    self.row_value("inv")
                    body.append(Stmt(scope=Scope.ROW, target="inv", value=factor))
                stores.append(StoreTile(id="", dst=out.x, src=Ref(name="rO"), scaled=scaled,
                                        row=mul(M_TILE, const(self.config.block_m)), limit=SEQLEN_Q))  # fmt: skip
            else:
                self.row_value(out.x)
                body.append(Stmt(scope=Scope.ROW, target=out.x, value=expr))
                stores.append(StoreVector(id="", dst=out.x, src=Ref(name=out.x), limit=SEQLEN_Q))
        self.map("rO", tuple(body))
        for op in stores:
            self.ops.append(replace(op, id=self.next_id()))
        return tuple(self.ops)


def _vars(e: Expr) -> list[Expr]:
    return [x for x in walk(e) if x.op is Op.VAR]


def _where(variant: Variant, what: str) -> str:
    root = variant.score if what == "score" else variant.mask
    places = dict(variant.locations)
    at = places.get(root)
    return f"{what} {variant.description}" + (f" {at.file.rsplit('/', 1)[-1]}:{at.line}" if at else "")


def tile(graph: Graph, variant: Variant, signature: Signature, config: Config, visit: Visit) -> Program:
    fold = next(iter(graph.of(Fold)))
    assert isinstance(fold, Fold)
    names = {simplify_expr(e): n for e, n in variant.names} | {s.units: "scale_log2" for s in fold.states if s.units}
    base = {"rS": Scope.ELEM, "rO": Scope.ELEM, "x": Scope.ROW} | {
        n: Scope.ROW for s in fold.states for n in (s.name, f"{s.name}_old", f"{s.name}_ref", "a", "a1", "inv")
    }
    taken = {*RESERVED, *base, *(c.name for c in variant.captures)}
    scopes = Scopes(base, names, taken)
    elem = Elem.BF16 if signature.dtype.value == "bf16" else Elem.F16
    seen_lets, seen = _seen(variant.mask)
    t = _Tiler(graph, fold, variant, signature, config, visit, elem, scopes, seen=seen)
    t.scores()
    t.sums(t.references())
    body = tuple(t.ops)
    epilogue = t.epilogue()
    for s in fold.states:
        if not s.operand:
            t.row_value(s.name)
    for stmt in scopes.rows.values():
        t.row_value(stmt.target, {DType.I32: "i32", DType.BOOL: "bool"}.get(stmt.value.dtype, "f32"))
    lets, loop, workspaces = _visit(visit, config, variant, scopes, body)
    return Program(
        name="attn_fwd", head_dim_qk=signature.head_dim_qk, head_dim_v=signature.head_dim_v, config=config,
        tensors=_tensors(graph, variant, elem, workspaces), scalars=_SCALARS,
        lets=(*lets, *seen_lets, *scopes.lets.values()),
        values=(*_tiles(config, signature, elem, t.reads_logits), *t.rows),
        prologue=t.prologue(), loop=loop, epilogue=epilogue,
        workspaces=workspaces, visit_mask=graph[fold.x].visible if workspaces else None,  # type: ignore[attr-defined]
        facts=(Fact(subject="ranges", text=_ranges_fact(visit)),),
    )  # fmt: skip


_SCALARS = (
    *(ScalarArg(name=n, dtype=DType.I32) for n in ("batch", "heads", "group", "seqlen_q", "seqlen_k")),
    ScalarArg(name=SCALE.name, dtype=DType.F32),
)


def _tiles(config: Config, signature: Signature, elem: Elem, logits: bool) -> tuple[TileValue, ...]:
    m, n, d, dv = config.block_m, config.block_n, padded(signature.head_dim_qk), padded(signature.head_dim_v)
    shapes: Mapping[str, tuple[Elem, int, int, tuple[str, str]]] = {
        "sQ": (elem, m, d, ("M", "D")), "sK": (elem, n, d, ("N", "D")), "sV": (elem, n, dv, ("N", "Dv")),
        "rS": (Elem.F32, m, n, ("M", "N")), "rP": (elem, m, n, ("M", "N")), "rO": (Elem.F32, m, dv, ("M", "Dv")),
    }  # fmt: skip
    return tuple(
        TileValue(name=k, elem=e, rows=r, cols=c, axes=a)
        for k, (e, r, c, a) in shapes.items() if logits or k not in ("sQ", "sK")
    )  # fmt: skip


def _tensors(graph: Graph, variant: Variant, elem: Elem, workspaces: tuple[Workspace, ...]) -> tuple[TensorArg, ...]:
    tensors = [TensorArg(name=n, elem=elem, rank=4, access=Access.IN) for n in ("q", "k", "v")]
    for out in graph.of(Output):
        assert isinstance(out, Output)
        rows_only = out.x == "lse"
        tensors.append(
            TensorArg(name=out.x, elem=Elem.F32 if rows_only else elem, rank=3 if rows_only else 4, access=Access.OUT)
        )
    if variant.sink:
        tensors.append(TensorArg(name=SINK, elem=_STORAGE[variant.sink], rank=1, access=Access.CAPTURE))
    tensors += [
        TensorArg(name=c.name, elem=_STORAGE[c.storage], rank=c.rank, access=Access.CAPTURE) for c in variant.captures
    ]
    tensors += [
        TensorArg(name=w.name, elem=w.elem, rank=len(w.shape), access=Access.WORK)
        for w in workspaces
        if w.name == VISIT
    ]
    return tuple(tensors)


def _seen(mask: Expr) -> tuple[tuple[Stmt, ...], tuple[Expr | None, Expr]]:
    """Bounds of the keys that some row of a tile sees, as item scalars."""
    span = analyse(mask).any
    lets: list[Stmt] = []
    first, limit = None, SEQLEN_K
    if span.hi is not None:
        lets.append(_let("seen_hi", tidy(minimum(bounded(span.hi), SEQLEN_K))))
        limit = i32("seen_hi")
    if span.lo is not None:
        lets.append(_let("seen_lo", bounded(span.lo)))
        first = i32("seen_lo")
    return tuple(lets), (first, limit)


def row_lets(config: Config) -> tuple[Stmt, ...]:
    """First and last query row of the item's tile."""
    first = mul(M_TILE, const(config.block_m))
    last = sub(minimum(add(first, const(config.block_m)), SEQLEN_Q), const(1))
    return (
        Stmt(scope=Scope.ITEM, target="i_lo", value=first),
        Stmt(scope=Scope.ITEM, target="i_hi", value=last),
    )


def _let(name: str, value: Expr) -> Stmt:
    return Stmt(scope=Scope.ITEM, target=name, value=value)


def _visit(
    visit: Visit, config: Config, variant: Variant, scopes: Scopes, body: tuple[TileOp, ...]
) -> tuple[tuple[Stmt, ...], TileLoop, tuple[Workspace, ...]]:
    """Which key tiles an item visits: closed forms of the mask, or a list made on the device."""
    lets = list(row_lets(config))
    if visit.source is VisitSource.TABLE:
        at = (
            i32("b") if "b" in variables(variant.mask) else const(0),
            i32("h") if "h" in variables(variant.mask) else const(0),
        )

        def entry(k: Expr) -> Expr:
            return load(VISIT, (*at, M_TILE, k), DType.I32)

        lets += [_let("masked", entry(const(0))), _let("count", add(i32("masked"), entry(const(1))))]
        masked = make(Op.LT, T, i32("masked"))
        back = sub(sub(i32(f"{VISIT}_n3"), const(1)), sub(T, i32("masked")))
        n = entry(make(Op.WHERE, masked, add(T, const(2)), back))
        loop = TileLoop(classes=("masked", "full"), ends=(i32("masked"), i32("count")), tile=n, body=body)
        lead = tuple(i32(s) if x.op is Op.VAR else const(1) for s, x in zip(("batch", "heads"), at, strict=True))
        rows, keys = _tile_count(SEQLEN_Q, config.block_m), _tile_count(SEQLEN_K, config.block_n)
        return tuple(lets), loop, (
            Workspace(name=VISIT, elem=Elem.I32, shape=(*lead, rows, add(keys, const(2)))),
            Workspace(name="classes", elem=Elem.U8, shape=(*lead, rows, keys)),
        )  # fmt: skip
    closed = {k: bounded(getattr(visit, k)) for k in ("lo", "hi", "full_lo", "full_hi")}
    lets += [_let(f"n_{k}" if k in ("lo", "hi") else k, v) for k, v in closed.items()]
    lo, hi = i32("n_lo"), i32("n_hi")
    classes = tuple(c.value for c in visit.ranges)
    ends = (sub(hi, i32("full_hi")), sub(hi, i32("full_lo")), sub(hi, lo))[: len(classes)]
    if len(classes) == 2:
        ends = (ends[0], sub(hi, lo))
    lets += [_let(f"end{k}", e) for k, e in enumerate(ends)]
    names = tuple(i32(f"end{k}") for k in range(len(ends)))
    return tuple(lets), TileLoop(classes=classes, ends=names, tile=sub(sub(hi, const(1)), T), body=body), ()


def _tile_count(length: Expr, block: int) -> Expr:
    return make(Op.FLOORDIV, add(length, const(block - 1)), const(block))


def _ranges_fact(visit: Visit) -> str:
    if visit.source is VisitSource.TABLE:
        return f"a list of tiles made on the device, since the mask has no closed form: {visit.reason}"
    return f"closed forms of the mask, tiles from the last key down: {', '.join(c.value for c in visit.ranges)}"
