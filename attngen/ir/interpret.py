"""What a Graph and a Program mean: interpreters in torch, slow and plain.

`run_graph` evaluates any graph between `textbook` and `units`. A fold is evaluated as the monoid it is: each block of
keys is lifted to a state, and states are merged. `run_program` walks tiles as a kernel would, and reports which tiles
it visited. Neither rounds to the storage types, so that every stage can be held against the same float64 result."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from attngen.evaluate import Operand, evaluate
from attngen.expr import DType, Expr, Op, var, walk
from attngen.ir.graph import Axis, Contract, Fold, Graph, Input, Map, Mask, Node, Output, RowReduce
from attngen.ir.ops import Assign, Fill, Heads, Reduce, ReduceKind, Scope, Stmt, Vote
from attngen.ir.ops import Map as MapOp
from attngen.ir.ops import Op as TileOp
from attngen.ir.program import ContractTile, LoadTile, Program, StoreTile, StoreVector
from attngen.ir.schedule import Access, Guard, Step
from attngen.layout import Fragment
from attngen.passes.stream import Component, lift_extra, merge, neutral, reference
from attngen.passes.visits import BY_LENGTH, LISTED_FROM, VISIT

LETTER = {Axis.B: "b", Axis.H: "h", Axis.M: "m", Axis.N: "n", Axis.D: "d", Axis.DV: "e"}

# ---- Graph -------------------------------------------------------------------------------------------------------


def run_graph(
    graph: Graph,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    captures: Mapping[str, Tensor],
    scale: float,
    dtype: torch.dtype = torch.float64,
    block_n: int = 32,
    given: Mapping[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """The outputs of a graph by name: `out` [B, Hq, Sq, Dv], and `lse` [B, Hq, Sq] where the graph has one.

    A fold takes the keys in blocks of `block_n`. `given`: what else a derivative reads, all of it of the query heads:
    `out`, `lse`, and the gradients `dout` and `dlse`."""
    return _GraphRun(graph, q, k, v, captures, scale, dtype, block_n, given or {}).outputs()


class _GraphRun:
    """Values by node id. Row values are kept as [B, H, M, 1], so that they broadcast against everything else."""

    def __init__(
        self, graph: Graph, q: Tensor, k: Tensor, v: Tensor, captures: Mapping[str, Tensor], scale: float,
        dtype: torch.dtype, block_n: int, given: Mapping[str, Tensor]
    ) -> None:  # fmt: skip
        self.graph, self.captures, self.dtype, self.block_n = graph, captures, dtype, block_n
        self.group = group = q.size(1) // max(k.size(1), 1)
        wide = {"q": q, "k": k.repeat_interleave(group, 1), "v": v.repeat_interleave(group, 1)}
        wide |= {name: t if t.dim() == 4 else t[..., None] for name, t in given.items()}
        self.inputs = {name: t.to(dtype) for name, t in wide.items()}
        self.seqlen_k = k.size(2)
        sizes = (q.size(0), q.size(1), q.size(2), k.size(2))
        self.env: dict[str, Operand] = {"scale": scale, "seqlen_q": q.size(2), "seqlen_k": k.size(2)}
        for at, name in enumerate("bhij"):
            self.env[name] = torch.arange(sizes[at]).view([-1 if d == at else 1 for d in range(4)])
        self.rows = torch.zeros((*sizes[:3], 1), dtype=dtype)
        self.values: dict[str, Tensor] = {}

    def outputs(self) -> dict[str, Tensor]:
        result: dict[str, Tensor] = {}
        for node in self.graph.nodes:
            match node:
                case Output():
                    self.output(node, result)
                case Fold():
                    self.values.update(self.fold(node))
                case Component():
                    pass  # set by its fold
                case _:
                    self.values[node.id] = self.node(node)
        return result

    def output(self, node: Output, result: dict[str, Tensor]) -> None:
        value = self.values[node.x]
        if node.mode is Assign.REDUCE_ADD:
            whole = self.captures[node.into]
            sums = result.setdefault(f"d{node.into}", torch.zeros(whole.shape, dtype=self.dtype))
            at = [
                self.expr(e, {}).clamp(0, n - 1).expand(value.shape).flatten()
                for e, n in zip(node.index, whole.shape, strict=True)
            ]
            if at:
                sums.index_put_(tuple(at), value.flatten(), accumulate=True)
            else:
                sums += value.sum()
            return
        if node.heads is Heads.KV:
            value = value.unflatten(1, (-1, self.group)).sum(2)
        result[node.x] = value if len(node.axes) == 4 else value.squeeze(3)

    def expr(self, e: Expr, values: Mapping[str, Tensor]) -> Tensor:
        return evaluate(e, {**self.env, **values}, self.captures, self.dtype)

    def contracted(self, node: Contract) -> Tensor:
        a, b, result = (tuple(LETTER[x] for x in n.axes) for n in (self.graph[node.a], self.graph[node.b], node))
        formula = f"{''.join(a)},{''.join(b)}->{''.join(result)}"
        return torch.einsum(formula, self.values[node.a], self.values[node.b])

    def node(self, node: Node) -> Tensor:
        match node:
            case Input():
                return self.inputs[node.id]
            case Contract():
                return self.contracted(node)
            case Map():
                scores = (*self.rows.shape[:3], self.seqlen_k)
                whole = scores if Axis.N in node.axes and Axis.M in node.axes else self.rows.shape
                inputs = [self.values[i].shape for i in node.inputs]
                shape = torch.broadcast_shapes(*inputs, *([whole] if Axis.M in node.axes else []))
                return self.expr(node.expr, self.values).expand(shape)
            case Mask():
                x = self.values[node.x]
                return torch.where(self.expr(node.visible, self.values), x, self.expr(node.hidden, self.values))
            case RowReduce():
                return self.reduced(node)
            case _:
                raise TypeError(f"no meaning is known for a graph node of type {type(node).__name__}")

    def reduced(self, node: RowReduce) -> Tensor:
        x = self.values[node.x]
        if node.extra is not None:
            x = torch.cat([x, self.expr(node.extra, self.values).expand(self.rows.shape).to(self.dtype)], dim=3)
        return _reduce(node.kind, x)

    # ---- the monoid ----------------------------------------------------------------------------------------------

    def fold(self, fold: Fold) -> dict[str, Tensor]:
        """The final state of a fold, from blocks of keys."""
        state = self.empty(fold)
        for first in range(0, self.seqlen_k, self.block_n):
            state = self.merged(fold, state, self.lift(fold, slice(first, first + self.block_n)))
        if any(s.extra is not None for s in fold.states):
            more: dict[str, Tensor] = {}
            for name, e in lift_extra(fold):
                more[name] = self.expr(e, more).to(self.dtype).expand(state[name].shape)
            state = self.merged(fold, state, more)
        return state

    def empty(self, fold: Fold) -> dict[str, Tensor]:
        width = {s.name: self.values[s.operand].size(3) if s.operand else 1 for s in fold.states}
        return {s.name: self.expr(neutral(s), {}).expand(*self.rows.shape[:3], width[s.name]) for s in fold.states}

    def lift(self, fold: Fold, keys: slice) -> dict[str, Tensor]:
        """The state of one block of keys."""
        state: dict[str, Tensor] = {}
        used = {fold.x: self.values[fold.x][..., keys]}  # what elements are made from: scores, references
        for s in fold.states:
            element = self.expr(s.element, used).expand(used[fold.x].shape)
            if s.operand:
                state[s.name] = element @ self.values[s.operand][:, :, keys]
                continue
            state[s.name] = _reduce(s.kind, element)
            if s.units is not None:
                state[s.name] = state[s.name] * self.expr(s.units, {})
            if s.kind is ReduceKind.MAX:
                used[s.name] = self.expr(reference(var(s.name, DType.F32)), state)
        return state

    def merged(self, fold: Fold, first: dict[str, Tensor], second: dict[str, Tensor]) -> dict[str, Tensor]:
        both = {f"{n}_1": t for n, t in first.items()} | {f"{n}_2": t for n, t in second.items()}
        for name, e in merge(fold):
            both[name] = self.expr(e, both)
        return {s.name: both[s.name] for s in fold.states}


def _reduce(kind: ReduceKind, x: Tensor) -> Tensor:
    """Over the keys; the maximum of none is -inf."""
    if kind is ReduceKind.SUM:
        return x.sum(dim=3, keepdim=True)
    return x.amax(dim=3, keepdim=True) if x.size(3) else x.new_full((*x.shape[:3], 1), float("-inf"))


# ---- Program -----------------------------------------------------------------------------------------------------


GROUP_ROWS = 64  # of a warpgroup


@dataclass(frozen=True)
class Visited:
    """One step of a program's loop."""

    tile: int
    cls: str


@dataclass
class ProgramRun:
    """The outputs of a program, and the key tiles that each tile of rows (b, h, m) visited, in order."""

    outputs: dict[str, Tensor] = field(default_factory=dict)
    visited: dict[tuple[int, int, int], list[Visited]] = field(default_factory=dict)


def run_program(
    program: Program,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    captures: Mapping[str, Tensor],
    scale: float,
    dtype: torch.dtype = torch.float64,
) -> ProgramRun:
    """Runs every item of a program: tiles of `block_m` rows of each head. Outputs start as NaN."""
    batch, heads, seqlen_q = q.shape[:3]
    sizes: dict[str, Operand] = {
        "batch": batch, "heads": heads, "group": heads // max(k.size(1), 1), "seqlen_q": seqlen_q,
        "seqlen_k": k.size(2),
        "scale": scale,
    }  # fmt: skip
    run = ProgramRun()
    tensors = {"q": q, "k": k, "v": v, **captures}
    for t in program.tensors:
        if t.access is Access.OUT:
            shape = (batch, heads, seqlen_q, program.head_dim_v)[: t.rank]
            run.outputs[t.name] = tensors[t.name] = torch.full(shape, float("nan"), dtype=dtype)
    if program.visit_mask is not None:
        lists = tensors[VISIT] = visit_table(program, sizes, captures)
        # any order of the row tiles will do
        tensors[BY_LENGTH] = torch.arange(lists.size(2)).expand(lists.shape[:3])
    for name, tensor in tensors.items():
        sizes.update({f"{name}_n{d}": n for d, n in enumerate(tensor.shape)})
    for b in range(batch):
        for h in range(heads):
            for m in range(-(-seqlen_q // program.config.block_m)):
                item = _Item(program, tensors, {**sizes, "b": b, "h": h, "m": m, "rank": m}, dtype)
                run.visited[b, h, m] = item.run()
    return run


def visit_table(program: Program, sizes: Mapping[str, Operand], captures: Mapping[str, Tensor]) -> Tensor:
    """The list of visited tiles of every tile of rows: counts of masked and of all tiles, the masked ones, the full
    ones, both from the last key down."""
    assert program.visit_mask is not None
    (table,) = (w for w in program.workspaces if w.name == VISIT)
    shape = [int(evaluate(e, sizes)) for e in table.shape]
    result = torch.full(shape, -1, dtype=torch.int32)
    block_m, block_n = program.config.block_m, program.config.block_n
    env: dict[str, Operand] = dict(sizes)
    seen_shape = (shape[0], shape[1], int(sizes["seqlen_q"]), int(sizes["seqlen_k"]))
    for d, name in enumerate("bhij"):
        env[name] = torch.arange(seen_shape[d]).view([-1 if e == d else 1 for e in range(4)])
    visible = evaluate(program.visit_mask, env, captures).expand(seen_shape)
    for b in range(shape[0]):
        for h in range(shape[1]):
            for m in range(shape[2]):
                rows = visible[b, h, m * block_m : (m + 1) * block_m]
                blocks = [rows[:, n * block_n : (n + 1) * block_n] for n in range(shape[3] - LISTED_FROM)]
                full = [n for n, x in reversed(list(enumerate(blocks))) if x.size(1) == block_n and x.all()]
                masked = [n for n, x in reversed(list(enumerate(blocks))) if x.any() and n not in full]
                line = result[b, h, m]
                listed = [len(masked), len(masked) + len(full), *masked, *full]
                line[: len(listed)] = torch.tensor(listed, dtype=torch.int32)
                if len(listed) == LISTED_FROM:
                    line[LISTED_FROM] = 0
    return result


class _Item:
    """One tile of rows of one head. Tiles are [rows, cols], row values [rows, 1]."""

    def __init__(
        self, program: Program, tensors: Mapping[str, Tensor], env: dict[str, Operand], dtype: torch.dtype
    ) -> None:
        self.program, self.tensors, self.env, self.dtype = program, tensors, env, dtype
        flags = [v.name for v in program.values if v.fragment is Fragment.UNI]
        self.values: dict[str, Tensor] = dict.fromkeys(flags, torch.zeros(1, 1, dtype=torch.bool))
        self.b, self.h, self.group = int(env["b"]), int(env["h"]), int(env["group"])
        self.row0 = int(env["m"]) * program.config.block_m

    def run(self) -> list[Visited]:
        self.lets(0)
        self.steps(self.program.prologue)
        visited = list(self.loop())
        self.steps(self.program.epilogue)
        return visited

    def loop(self) -> Iterator[Visited]:
        loop, groups = self.program.loop, []
        for w in range(self.program.config.block_m // GROUP_ROWS or 1):
            self.lets(w)
            groups.append([self.number(e) for e in loop.ends])
        for t in range(groups[0][-1]):
            self.env["t"] = t
            self.env["n"] = n = self.number(loop.tile)
            classes = {next(c for c, end in zip(loop.classes, ends, strict=True) if t < end) for ends in groups}
            # what one warpgroup masks is masked for all here: a mask on a full tile changes nothing
            visited = Visited(n, next(c for c in ("masked", *loop.classes) if c in classes))
            self.steps(self.program.first if t == 0 and self.program.first else loop.body, visited.cls)
            yield visited

    def lets(self, group: int) -> None:
        self.env["w"] = group
        for s in self.program.lets:
            self.env[s.target] = self.expr(s.value, {})

    def expr(self, e: Expr, values: Mapping[str, Operand]) -> Tensor:
        return evaluate(e, {**self.env, **values}, self.tensors, self.dtype)

    def number(self, e: Expr) -> int:
        return int(self.expr(e, {}))

    def steps(self, ops: tuple[Step, ...], cls: str = "") -> None:
        """A guard is entered by all rows of the tile or none: it may be entered for nothing, which changes nothing."""
        for op in ops:
            if op.only and op.only != cls:
                continue
            if not isinstance(op, Guard):
                self.step(op)
            elif bool(self.expr(op.pred, self.values).any()):
                self.steps(op.body, cls)

    def step(self, op: TileOp) -> None:
        match op:
            case LoadTile():
                self.values[op.dst.name] = self.load(op)
            case ContractTile():
                b = self.values[op.b.name]
                product = self.values[op.a.name] @ (b.T if op.b.transposed else b)
                self.values[op.d.name] = product if op.zero else self.values[op.d.name] + product
            case Fill():
                rows, cols = self.shape(op.dst.name)
                self.values[op.dst.name] = self.expr(op.value, {}).to(self.dtype).repeat(rows, cols)
            case Reduce():
                self.values[op.dst.name] = self.reduced(op)
            case MapOp():
                self.map(op)
            case Vote():
                self.values[op.dst.name] = self.expr(op.pred, _read(op.pred, self.values)).any().reshape(1, 1)
            case StoreTile():
                tile = self.values[op.src.name] * (self.values[op.scaled] if op.scaled else 1.0)
                self.store(op.dst, tile[:, : self.program.head_dim_v], self.number(op.limit))
            case StoreVector():
                self.store(op.dst, self.values[op.src.name][:, 0], self.number(op.limit))
            case _:
                raise TypeError(f"no meaning is known for a tile op of type {type(op).__name__}")

    def shape(self, name: str) -> tuple[int, int]:
        """Rows and columns; a row value has one column."""
        value = self.program.value(name)
        assert value is not None, f"{name} is no value of the program"
        return value.rows, value.cols or 1

    def load(self, op: LoadTile) -> Tensor:
        rows, cols = self.shape(op.dst.name)
        source = self.tensors[op.src][self.b, self.h if op.heads is Heads.Q else self.h // self.group]
        first = self.number(op.row)
        part = source[first : max(first, min(first + rows, self.number(op.limit)))]
        tile = torch.zeros((rows, cols), dtype=self.dtype)
        tile[: part.size(0), : part.size(1)] = part
        return tile

    def reduced(self, op: Reduce) -> Tensor:
        """Over the columns. A row value is whole here (a kernel keeps it in four parts): nothing is left to do."""
        x = self.values[op.src.name]
        return x.amax(dim=1, keepdim=True) if op.kind is ReduceKind.MAX else x.sum(dim=1, keepdim=True)

    def map(self, op: MapOp) -> None:
        """Statements in order. What is said to be the same along a row or column has to be."""
        over = self.program.value(op.over.name)
        assert over is not None, f"{op.over.name} is no value of the program"
        first = int(self.env.get("n", 0)) * over.cols if over.axes[1] == "N" else 0
        indices: dict[str, Operand] = {
            "i": torch.arange(self.row0, self.row0 + over.rows)[:, None],
            "j": torch.arange(first, first + over.cols)[None],
            "it": torch.arange(over.rows)[:, None],
            "jt": torch.arange(over.cols)[None],
        }
        local: dict[str, Tensor] = {}
        for s in op.body:
            value = self.statement(s, (over.rows, over.cols), {**indices, **self.values, **local})
            if self.program.value(s.target) is None:
                local[s.target] = value
            elif s.accumulate:
                self.values[s.target] = self.values[s.target] + value.sum(dim=1, keepdim=True)
            else:
                self.values[s.target] = value

    def statement(self, s: Stmt, shape: tuple[int, int], values: Mapping[str, Operand]) -> Tensor:
        rows, cols = {Scope.ROW: (shape[0], 1), Scope.COL: (1, shape[1]), Scope.ELEM: shape, Scope.ITEM: (1, 1)}[
            s.scope
        ]
        return self.expr(s.value, _read(s.value, values)).expand(rows, cols)

    def store(self, name: str, tile: Tensor, limit: int) -> None:
        rows = max(0, min(tile.size(0), limit - self.row0))
        self.tensors[name][self.b, self.h, self.row0 : self.row0 + rows] = tile[:rows]


def _read(e: Expr, values: Mapping[str, Operand]) -> dict[str, Operand]:
    names = {x.name for x in walk(e) if x.op is Op.VAR}
    return {n: v for n, v in values.items() if n in names}
