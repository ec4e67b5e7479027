"""tile_sums: Owned -> Program. Cuts a kernel of plain sums into tiles: its own axis across the CTAs, the other in time.

Before   a graph with contractions over the streamed axis, of weights made element by element from contractions over
         head dimensions, row values and positions
After    tiles of the owned inputs loaded once, tiles of the streamed ones in a loop; one map that makes all weights of
         a step; an accumulator for each sum
Why      the tile of scores has the owned axis as its rows in either kernel, so the weights are left operands of the
         sums where they are: in registers. Row values of the queries become values of its rows or of its columns, as
         the owned axis says. Where keys are owned, the loop runs over the heads of the group too: a key head's gradient
         is summed where it is, and nothing is expanded"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from attngen.config import Config, HopperSumsConfig, SumsConfig
from attngen.errors import PassError
from attngen.expr import (
    SCALE,
    SEQLEN_Q,
    ZERO,
    B,
    DType,
    Expr,
    H,
    I,
    J,
    Op,
    conj,
    const,
    load,
    make,
    mul,
    neg,
    rewrite,
    sub,
    substitute,
    var,
    variables,
    walk,
    where,
)  # fmt: skip
from attngen.fold import fold as fold_expr
from attngen.ir.graph import Axis, Contract, Graph, Input, Map, Mask
from attngen.ir.ops import Fill, Heads, Reduce, ReduceKind, Ref, Scope, Stmt
from attngen.ir.ops import Map as MapOp
from attngen.ir.ops import Op as TileOp
from attngen.ir.program import (
    AddTile,
    ContractTile,
    LoadTile,
    LoadVector,
    Program,
    StageTile,
    StoreTile,
    StoreVector,
    TileValue,
)  # fmt: skip
from attngen.ir.schedule import Access, Elem, Fact, TensorArg, Workspace
from attngen.naming import RESERVED
from attngen.passes.bounded import bounded
from attngen.passes.choose import padded
from attngen.passes.choose_sums import width
from attngen.passes.key_visits import group_loop, key_workspaces, query_tiles
from attngen.passes.partition import Owned
from attngen.passes.ranges import TileClass, Visit, VisitSource, ranges
from attngen.passes.scopes import Scopes, Target
from attngen.passes.simplify import LOG2E, simplify_expr
from attngen.passes.split_weights import Halves, halves, lift_rows
from attngen.passes.sum_bounds import Seen, seen_rows, visit_fact
from attngen.passes.sum_names import (
    GIVEN_ROWS,
    KEY_HEADS,
    KEY_KERNEL,
    LENGTH,
    PLAIN,
    TILE,
    WIDTH,
    by_step,
    check_hidden,
    clamped,
    element_sums,
    own_name,
    row_space,
    row_sums,
    tile_name,
    vector_name,
)
from attngen.passes.tile import _SCALARS, _STORAGE, _where, elem_of
from attngen.passes.visits import _let, i32, visits
from attngen.signature import Signature
from attngen.spec import Variant


@dataclass
class _Tiler:
    owned: Owned
    variant: Variant
    signature: Signature
    config: SumsConfig
    visit: Visit
    elem: Elem
    scopes: Scopes
    fragments: dict[str, Scope]  # what expressions read, by how much of it there is
    names: set[str]  # captured tensors
    seen: Seen
    values: dict[str, TileValue] = field(default_factory=dict)
    vectors: dict[Expr, str] = field(default_factory=dict)  # of query rows, by what they are made of

    @property
    def graph(self) -> Graph:
        return self.owned.graph

    def value(self, name: str, rows: int, cols: int, axes: tuple[str, str], elem: Elem = Elem.F32) -> Ref:
        self.values.setdefault(name, TileValue(name=name, elem=elem, rows=rows, cols=cols, axes=axes))
        return Ref(name=name)

    def width(self, axis: Axis) -> int:
        head_dim = getattr(self.signature, WIDTH[axis])
        return width(self.owned, head_dim) if isinstance(self.config, Config) else padded(head_dim)

    # ---- loads -------------------------------------------------------------------------------------------------

    def inputs(self) -> Iterator[tuple[Input, bool]]:
        """Inputs that contractions read, with whether they lie along the owned axis."""
        read = {name for n in self.graph.of(Contract) for name in n.operands()}
        for node in self.graph.of(Input):
            if node.id in read:
                assert isinstance(node, Input)
                yield node, self.owned.own in node.axes

    def load(self, op_id: str, node: Input, own: bool) -> LoadTile:
        axis = self.owned.own if own else self.owned.stream
        rows = self.config.block_m if own else self.config.block_n
        width = node.axes[3]
        dst = self.value(tile_name("s", node.id), rows, self.width(width), (axis.value, width.value), self.elem)
        heads = Heads.KV if node.id in KEY_HEADS else Heads.Q
        first, limit = self.seen.own if own else self.seen.streamed
        head = H if self.owned.own is Axis.N and heads is Heads.Q else None
        row = mul(i32(TILE[axis]), const(rows))
        return LoadTile(id=op_id, dst=dst, src=node.id, heads=heads, row=row, limit=limit, first=first, head=head)

    # ---- weights -----------------------------------------------------------------------------------------------

    def weight(self, name: str, hidden: bool = False) -> Expr:
        """A node over both axes as an expression of fragments, row values and positions. hidden: where masked."""
        node = self.graph[name]
        match node:
            case Contract():
                return var(tile_name("r", name), DType.F32)
            case Input():
                # rows of padding read the last one
                return load(name, (B, H, make(Op.MIN, I, sub(SEQLEN_Q, const(1)))), DType.F32)
            case Mask():
                return node.hidden if hidden else self.weight(node.x)
            case Map():
                return substitute(node.expr, {var(i, DType.F32): self.weight(i, hidden) for i in node.inputs})
            case _:
                raise PassError(f"tile_sums: {name} is no value of an element")

    def visible(self) -> Expr:
        masks = {n.visible for n in self.graph.of(Mask) if isinstance(n, Mask)}
        if len(masks) > 1:
            raise PassError("tile_sums: the weights have different masks")
        inside = [make(Op.LT, J if self.owned.stream is Axis.N else I, LENGTH[self.owned.stream])]
        if self.owned.shed():  # owned rows beyond the last have no sum of their own, but a part of others
            inside.append(make(Op.LT, I if self.owned.own is Axis.M else J, LENGTH[self.owned.own]))
        return bounded(conj(*inside, *masks))

    def targets(self) -> tuple[Target, ...]:
        """The left operands of all sums, and what is summed along rows, where a pair is visible."""
        targets = [Target(tile_name("r", name), self.value_of(name)) for name in self.left_operands()]
        targets += [Target(out.x, self.value_of(out.x), accumulate=True) for out in row_sums(self.graph)]
        # rows beyond the last have no element to be added to
        exists = make(Op.LT, I if self.owned.own is Axis.M else J, LENGTH[self.owned.own])
        targets += [
            Target(out.x, where(exists, self.value_of(out.x), ZERO), accumulate=True, index=clamped(out))
            for out in element_sums(self.graph)
        ]
        if self.owned.own is Axis.M:
            return tuple(targets)
        # row values of the queries are values of the columns
        rows = frozenset(node.id for node in self.graph.of(Input))
        return tuple(replace(t, value=lift_rows(t.value, rows, self.vector)) for t in targets)

    def weights(self, targets: tuple[Target, ...], masked: bool) -> tuple[Stmt, ...]:
        """Statements that make them."""
        if masked:
            visible = self.visible()
            targets = tuple(replace(t, value=where(visible, t.value, ZERO)) for t in targets)
        return self.scopes.split(*targets)

    def row_values(self) -> dict[Expr, Expr]:
        """What a load of a row value is where rows are worked out."""
        loads = {x for e in self.vectors for x in walk(e) if x.op is Op.LOAD}
        return {x: var(x.name, DType.F32) for x in loads}

    def vector(self, e: Expr) -> Expr:
        """The value of the columns that a row value is."""
        if e not in self.vectors:
            base = next(x.name for x in walk(e) if x.op is Op.LOAD)
            number = sum(n.startswith(f"{base}_rows") for n in self.vectors.values())
            name = self.vectors[e] = f"{base}_rows{number or ''}"
            self.value(vector_name(name), self.config.block_n, 0, (self.owned.stream.value, ""))
            self.fragments[vector_name(name)] = Scope.COL
        return var(vector_name(self.vectors[e]), DType.F32)

    def vector_loads(self) -> Iterator[LoadVector]:
        for name in self.vectors.values():
            row = mul(i32(TILE[self.owned.stream]), const(self.config.block_n))
            yield LoadVector(id="", dst=Ref(name=vector_name(name)), src=name, row=row, limit=SEQLEN_Q, head=H)

    def shared(self, *targets: Target) -> tuple[Ref, ...]:
        """The vectors that targets read."""
        names = {n for t in targets for e in (t.value, *t.index) for n in variables(e)}
        found = (vector_name(name) for name in self.vectors.values())
        return tuple(Ref(name=n) for n in found if n in names)

    def value_of(self, name: str) -> Expr:
        check_hidden(name, self.weight(name, hidden=True))
        own = frozenset(n.id for n in self.graph.of(Input))
        return bounded(fold_expr(self.fused(self.weight(name))), own)

    def left_operands(self) -> Iterator[str]:
        yield from dict.fromkeys(self.left(c) for _, c in (*self.owned.sums(), *self.owned.shed()))

    def left(self, node: Contract) -> str:
        """The operand of a sum that has both axes."""
        return node.a if {Axis.M, Axis.N} <= set(self.graph[node.a].axes) else node.b

    def right(self, node: Contract) -> str:
        return node.b if self.left(node) == node.a else node.a

    def fused(self, e: Expr) -> Expr:
        """(scale*s - r) * log2e with one FMA an element, where the scale is of a usual size."""

        def one(x: Expr) -> Expr | None:
            if x.op is not Op.MUL or x.args[1] is not LOG2E or x.args[0].op is not Op.SUB:
                return None
            scaled, r = x.args[0].args
            if scaled.op is not Op.MUL or scaled.args[0] is not SCALE or scaled.args[1].op is not Op.VAR:
                return None
            return make(Op.FMA, scaled.args[1], mul(SCALE, LOG2E), neg(mul(r, LOG2E)))

        return rewrite(e, one) if self.variant.scale_positive else e

    # ---- the parts of the program ------------------------------------------------------------------------------

    def products(self) -> Iterator[tuple[Contract, str, str]]:
        """Contractions over a head dimension, with the owned and the streamed operand."""
        for node in self.graph.of(Contract):
            assert isinstance(node, Contract)
            if node.over in WIDTH:
                own, stream = (node.a, node.b) if self.owned.own in self.graph[node.a].axes else (node.b, node.a)
                yield node, own, stream

    def body(self) -> tuple[TileOp, ...]:
        targets = self.targets()
        heads = list(self.head_products())
        parts = None
        if isinstance(self.config, HopperSumsConfig) and self.config.split and len(heads) > 1:
            names = [op.d.name for op in heads]
            parts = halves(targets, names[0], frozenset(names[1:]))
            if parts is None:
                raise PassError(f"tile_sums: a weight of {self.graph.name} is no product of what S and dP make alone. "
                                "Use split=False")  # fmt: skip
        for name in self.left_operands():
            if self.operand(parts, name) == own_name(name):
                self.element(own_name(name))
        for out in row_sums(self.graph):
            self.value(out.x, self.config.block_m, 0, (self.owned.own.value, ""))
        loads = [self.load("", node, False) for node, own in self.inputs() if not own]
        made = self.together(heads, targets) if parts is None else self.apart(heads, parts)
        shed = (op for _, node in self.owned.shed() for op in self.part(node))
        ops = (*loads, *self.vector_loads(), *made, *shed)
        return tuple(replace(op, id=f"o{n}") for n, op in enumerate(ops))

    def element(self, name: str) -> None:
        """A value of 16 bits for each pair of a step."""
        axes = (self.owned.own.value, self.owned.stream.value)
        self.value(name, self.config.block_m, self.config.block_n, axes, self.elem)

    def head_products(self) -> Iterator[ContractTile]:
        rows, cols = self.config.block_m, self.config.block_n
        for node, own, stream in self.products():
            d = self.value(tile_name("r", node.id), rows, cols, (self.owned.own.value, self.owned.stream.value))
            a, b = Ref(name=tile_name("s", own)), Ref(name=tile_name("s", stream), transposed=True)
            yield ContractTile(id="", d=d, a=a, b=b, zero=True)

    def sum_products(self, parts: Halves | None) -> Iterator[ContractTile]:
        for _, node in self.owned.sums():
            axes = (self.owned.own.value, node.axes[3].value)
            d = self.value(tile_name("r", node.id), self.config.block_m, self.width(node.axes[3]), axes)
            a, b = Ref(name=self.operand(parts, self.left(node))), Ref(name=tile_name("s", self.right(node)))
            yield ContractTile(id="", d=d, a=a, b=b)

    def operand(self, parts: Halves | None, node: str) -> str:
        """The value that holds a left operand."""
        name = own_name(node)
        return name if parts is None else parts.place.get(name, name)

    def maps(self, over: Ref | None, targets: tuple[Target, ...]) -> Iterator[TileOp]:
        """The map that makes some targets, one for each class of tiles."""
        for cls in self.classes:
            yield self.map(over, targets, cls == TileClass.MASKED.value, cls if len(self.classes) > 1 else "")

    def map(self, over: Ref | None, targets: tuple[Target, ...], masked: bool, only: str = "") -> MapOp:
        statements = self.weights(targets, masked)
        if over is None:  # a weight of the positions alone, the only one there is
            axes = (self.owned.own.value, self.owned.stream.value)
            over = self.value(PLAIN, self.config.block_m, self.config.block_n, axes)
            *first, last = statements
            statements = (*first, replace(last, target=PLAIN), replace(last, value=var(PLAIN, DType.F32)))
        return MapOp(id="", over=over, copies=self.shared(*targets), body=statements, only=only,
                     note=_where(self.variant, "score"))  # fmt: skip

    def together(self, heads: list[ContractTile], targets: tuple[Target, ...]) -> Iterator[TileOp]:
        """All products of scores, then one map that makes all weights."""
        yield from heads
        yield from self.maps(heads[0].d if heads else None, targets)
        yield from self.staged(None)
        yield from self.sum_products(None)

    def apart(self, heads: list[ContractTile], parts: Halves) -> Iterator[TileOp]:
        """The first product, and what is known behind it; the others, and the rest. A sum whose operand is ready is
        taken before the operand's place is taken by another."""
        for name in (t.name for t in (*parts.early, *parts.late)):
            self.fragments.setdefault(name, Scope.ELEM)
        first, *others = heads
        yield first
        # one map for all tiles, and what masked pairs have is taken back behind it: no branch around it
        later = len(self.classes) > 1 and not any(t.accumulate or t.index for t in parts.early)
        if later:
            yield self.map(first.d, parts.early, masked=False)
        else:
            yield from self.maps(first.d, parts.early)
        for op in others:
            start = parts.start.get(op.d.name)
            if start is not None:
                target = Target(op.d.name, make(Op.NEG, start))
                yield MapOp(id="", over=op.d, copies=self.shared(target), body=self.scopes.split(target))
        early = {t.name for t in parts.early}
        sums = [(op, own_name(self.left(node))) for op, (_, node) in
                zip(self.sum_products(parts), self.owned.sums(), strict=True)]  # fmt: skip
        ready = [op for op, name in sums if name in early and name not in parts.place]
        # the rest are factors of what the other map selects
        operands = tuple(t for t in parts.early if any(op.a.name == t.name for op in ready))
        if later and operands:
            kept = tuple(replace(t, value=var(t.name, DType.F32)) for t in operands)
            yield self.map(first.d, kept, masked=True, only=TileClass.MASKED.value)
        yield from (replace(op, zero=op.d.name not in parts.start) for op in others)
        yield from ready
        yield from self.maps(others[-1].d, parts.late)
        yield from self.staged(parts)
        yield from (op for op, _ in sums if op not in ready)

    def staged(self, parts: Halves | None) -> Iterator[StageTile]:
        """Weights that cross the warps; before the products of sums, which hide how long it takes."""
        axes = (self.owned.own.value, self.owned.stream.value)
        for weight in dict.fromkeys(self.left(node) for _, node in self.owned.shed()):
            dst = self.value(tile_name("s", weight), self.config.block_m, self.config.block_n, axes, self.elem)
            yield StageTile(id="", dst=dst, src=Ref(name=self.operand(parts, weight)))

    def part(self, node: Contract) -> Iterator[TileOp]:
        """A tile's part of a sum over the owned axis, added up in memory."""
        cols, stream, width = self.config.block_n, self.owned.stream, node.axes[3]
        d = self.value(tile_name("r", node.id), cols, self.width(width), (stream.value, width.value))
        a, b = Ref(name=tile_name("s", self.left(node)), transposed=True), Ref(name=tile_name("s", self.right(node)))
        yield ContractTile(id="", d=d, a=a, b=b, zero=True)
        row = mul(i32(TILE[stream]), const(cols))
        yield AddTile(id="", dst=node.id, src=d, heads=Heads.Q, row=row)

    @property
    def classes(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(c.value for c in self.visit.ranges))

    def prologue(self) -> tuple[TileOp, ...]:
        ops: list[TileOp] = [self.load(f"o{n}", node, True) for n, (node, own) in enumerate(self.inputs()) if own]
        if self.scopes.rows:
            both = (self.owned.own.value, self.owned.stream.value)
            over = next(v.name for v in self.values.values() if v.axes == both)
            body = tuple(self.scopes.rows.values())
            ops.append(MapOp(id=f"o{len(ops)}", over=Ref(name=over), body=body, note="once an item"))
            for s in body:
                dtype = {DType.I32: "i32", DType.BOOL: "bool"}.get(s.value.dtype, "f32")
                self.value(s.target, self.config.block_m, 0, (self.owned.own.value, ""))
                self.values[s.target] = replace(self.values[s.target], dtype=dtype)
        sums = [tile_name("r", node.id) for _, node in self.owned.sums()] + [out.x for out in row_sums(self.graph)]
        ops += [Fill(id=f"o{len(ops) + n}", dst=Ref(name=name), value=ZERO) for n, name in enumerate(sums)]
        return tuple(ops)

    def epilogue(self) -> tuple[TileOp, ...]:
        ops: list[TileOp] = []
        body: list[Stmt] = []
        stores: list[StoreTile | StoreVector] = []
        row = mul(i32(TILE[self.owned.own]), const(self.config.block_m))
        limit = LENGTH[self.owned.own]
        factors: dict[Expr, str] = {}
        over = ""
        for out, node in self.owned.sums():
            final = self.graph[out.x]
            over = over or tile_name("r", node.id)
            scaled = ""
            if isinstance(final, Map):
                factor = fold_expr(substitute(final.expr, {var(node.id, DType.F32): const(1.0)}))
                scaled = factors.setdefault(factor, f"factor{len(factors) or ''}")
                if self.values.setdefault(scaled, _row(scaled, self.config, self.owned)) and all(
                    s.target != scaled for s in body
                ):
                    body.append(Stmt(scope=Scope.ROW, target=scaled, value=factor))
            stores.append(StoreTile(id="", dst=out.x, src=Ref(name=tile_name("r", node.id)), scaled=scaled, row=row,
                                    limit=limit, heads=out.heads))  # fmt: skip
        for out in row_sums(self.graph):
            src = Ref(name=out.x)
            ops.append(Reduce(id=f"o{len(ops)}", kind=ReduceKind.SUM, dst=src, src=src))
            stores.append(StoreVector(id="", dst=out.x, src=src, limit=limit))
        if body:
            ops.append(MapOp(id=f"o{len(ops)}", over=Ref(name=over), body=tuple(body)))
        return (*ops, *(replace(s, id=f"o{len(ops) + n}") for n, s in enumerate(stores)))


def _row(name: str, config: SumsConfig, owned: Owned) -> TileValue:
    return TileValue(name=name, elem=Elem.F32, rows=config.block_m, cols=0, axes=(owned.own.value, ""))


# ---- the pass --------------------------------------------------------------------------------------------------------


def tile_sums(owned: Owned, name: str, variant: Variant, signature: Signature, config: SumsConfig) -> Program:
    keys = owned.own is Axis.N
    visit = query_tiles(variant.mask, config) if keys else ranges(variant.mask, config.block_n)
    number = name.removeprefix(KEY_KERNEL) if keys else ""
    elem = elem_of(signature)
    names = {simplify_expr(e): n for e, n in variant.names}
    fragments = {tile_name("r", n.id): Scope.ELEM for n in owned.graph.of(Contract)} | {PLAIN: Scope.ELEM}
    taken = {*RESERVED, *fragments, *(c.name for c in variant.captures), *(n.id for n in owned.graph.nodes)}
    axes = {"i": Scope.COL, "j": Scope.ROW} if keys else {"i": Scope.ROW, "j": Scope.COL}
    scopes = Scopes(fragments, names, taken, axes=axes, stepped=frozenset({"h"}) if keys else frozenset())
    t = _Tiler(owned, variant, signature, config, visit, elem, scopes, fragments,
                {c.name for c in variant.captures}, seen_rows(owned, variant.mask))  # fmt: skip
    body = t.body()
    prologue, epilogue = t.prologue(), t.epilogue()
    workspaces: tuple[Workspace, ...] = ()
    if keys:
        least = isinstance(config, HopperSumsConfig)
        lets, loop = group_loop(visit, variant.mask, config, body, bool(owned.shed()), number, least)
        if visit.source is VisitSource.TABLE:
            workspaces = key_workspaces(variant.mask, config, number)
        steps, items = by_step(scopes.lets.values())
        loop = replace(loop, lets=steps)
    else:
        lets, loop, workspaces = visits(visit, config, variant.mask, body)
        loop = replace(loop, place=(_let("n", loop.tile),))
        items = tuple(scopes.lets.values())
    over = f"tiles of {'keys' if keys else 'queries'} own their sums"
    over += "".join(f", parts of {node.id} are added with red.add" for _, node in owned.shed())
    spaces = tuple(row_space(name) for name in t.vectors.values())
    rows = tuple((name, substitute(e, t.row_values())) for e, name in t.vectors.items())
    return Program(
        name=name, head_dim_qk=signature.head_dim_qk, head_dim_v=signature.head_dim_v, config=config,
        tensors=_tensors(t, workspaces), scalars=_SCALARS, lets=(*lets, *t.seen.lets, *items),
        values=tuple(t.values.values()), prologue=prologue, loop=loop, epilogue=epilogue,
        workspaces=(*workspaces, *spaces), rows=rows,
        visit_mask=variant.mask if workspaces else None,
        facts=(Fact(subject=name, text=f"{over}; {visit_fact(visit, keys)}"),),
    )  # fmt: skip


def _tensors(t: _Tiler, workspaces: tuple[Workspace, ...]) -> tuple[TensorArg, ...]:
    """Inputs, outputs, captured tensors that expressions read, workspaces."""
    tensors: list[TensorArg] = []
    tiles = {node.id for node, _ in t.inputs()}
    owned_rows = t.owned.own is Axis.M  # else they come as vectors
    for node in t.graph.of(Input):
        if node.id in tiles:
            given = node.id == "dout"  # as autograd hands it over
            access = Access.CAPTURE if given else Access.IN
            tensors.append(TensorArg(name=node.id, elem=t.elem, rank=4, access=access, strided=given))
        elif owned_rows:
            access = Access.IN if node.id in GIVEN_ROWS else Access.WORK
            tensors.append(TensorArg(name=node.id, elem=Elem.F32, rank=3, access=access))
    tensors += [TensorArg(name=n, elem=Elem.F32, rank=3, access=Access.WORK) for n in t.vectors.values()]
    for out, _ in t.owned.sums():
        tensors.append(TensorArg(name=out.x, elem=t.elem, rank=4, access=Access.OUT))
    rank = 3 if isinstance(t.config, HopperSumsConfig) else 4  # blocks, or rows
    tensors += [TensorArg(name=node.id, elem=Elem.F32, rank=rank, access=Access.WORK) for _, node in t.owned.shed()]
    tensors += [TensorArg(name=out.x, elem=Elem.F32, rank=3, access=Access.OUT) for out in row_sums(t.graph)]
    tensors += [
        TensorArg(name=out.x, elem=Elem.F32, rank=len(out.index), access=Access.WORK) for out in element_sums(t.graph)
    ]
    tensors += [
        TensorArg(name=c.name, elem=_STORAGE[c.storage], rank=c.rank, access=Access.CAPTURE, strided=True)
        for c in t.variant.captures
    ]
    tensors += [
        TensorArg(name=w.name, elem=w.elem, rank=len(w.shape), access=Access.WORK)
        for w in workspaces if w.elem is Elem.I32
    ]  # fmt: skip
    return tuple(tensors)
