"""Level 2: tiles. What one unit of work (a tile of queries of one head) does: loads, contractions, maps, reductions and
stores over tiles, a loop over the visited key tiles, and values with a space each. No time, no warps, no barriers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from enum import Enum

from attngen.config import TileConfig
from attngen.expr import Expr
from attngen.ir.ops import Heads, Op, Ref, Stmt, Unit
from attngen.ir.schedule import Access, Elem, Fact, Guard, ScalarArg, Step, TensorArg, Workspace
from attngen.ir.terms import read, updated, written
from attngen.layout import Fragment, SmemLayout


class Space(Enum):
    UNPLACED = "unplaced"
    SHARED = "shared"
    REGISTER = "register"


@dataclass(frozen=True, kw_only=True)
class TileValue:
    """A tile or a row vector of the program. `elem` is what it holds; the place pass fills the rest."""

    name: str
    elem: Elem
    rows: int
    cols: int
    axes: tuple[str, str]
    space: Space = Space.UNPLACED
    layout: SmemLayout | None = None
    fragment: Fragment | None = None
    dtype: str = "f32"

    def text(self) -> str:
        shape = f"[{self.axes[0]}={self.rows}" + (f",{self.axes[1]}={self.cols}]" if self.cols else "]")
        where = "" if self.space is Space.UNPLACED else f" {self.space.value}"
        where += f" {self.fragment.value} {self.dtype}" if self.fragment else ""
        where += f" {self.layout.swizzle.value} pitch {self.layout.pitch}" if self.layout else ""
        return f"{self.name} {self.elem.value}{shape}{where}"


@dataclass(frozen=True, kw_only=True)
class LoadTile(Op):
    """Rows [row, row + tile rows) of a tensor; rows outside [first, limit) read as zeros (first None: 0). head: which
    head, where it changes inside an item (None: the item's)."""

    dst: Ref = written()
    src: str
    heads: Heads
    row: Expr
    limit: Expr
    first: Expr | None = None
    head: Expr | None = None
    unit = Unit.COPY


@dataclass(frozen=True, kw_only=True)
class LoadVector(Op):
    """Elements [row, row + tile rows) of a tensor of row values; elements from `limit` on are zeros or anything."""

    dst: Ref = written()
    src: str
    row: Expr
    limit: Expr
    head: Expr | None = None
    unit = Unit.COPY


@dataclass(frozen=True, kw_only=True)
class ContractTile(Op):
    """d (+)= a . b; b transposed when its rows are the columns of d."""

    d: Ref = updated()
    a: Ref = read()
    b: Ref = read()
    zero: bool = False
    unit = Unit.TENSOR


@dataclass(frozen=True, kw_only=True)
class StageTile(Op):
    """A tile of registers to shared memory, for an operand that other warps read."""

    dst: Ref = written()
    src: Ref = read()
    unit = Unit.SHARED


@dataclass(frozen=True, kw_only=True)
class AddTile(Op):
    """A tile added to the rows from `row` on of a tensor of f32 in global memory, in no order among CTAs."""

    dst: str
    src: Ref = read()
    heads: Heads
    row: Expr
    unit = Unit.GLOBAL


@dataclass(frozen=True, kw_only=True)
class StoreTile(Op):
    """A tile to the output, its rows multiplied by the row value `scaled` on the way; rows >= limit are not written."""

    dst: str
    src: Ref = read()
    scaled: str
    row: Expr
    limit: Expr
    heads: Heads = Heads.Q
    unit = Unit.GLOBAL


@dataclass(frozen=True, kw_only=True)
class StoreVector(Op):
    dst: str
    src: Ref = read()
    limit: Expr
    unit = Unit.GLOBAL


@dataclass(frozen=True, kw_only=True)
class TileLoop:
    """The loop over key tiles: `count` tiles, tile t is key tile `tile`; classes[i] up to counter ends[i]. place: where
    a step is other than at a key tile of the item's head (query tiles, heads of a group), as statements of t; lets:
    scalars of a step beside it. visited: how many of the tiles of a head see anything, where one is visited in any
    case."""

    classes: tuple[str, ...]
    ends: tuple[Expr, ...]
    tile: Expr
    body: tuple[Step, ...]
    place: tuple[Stmt, ...] = ()
    lets: tuple[Stmt, ...] = ()
    visited: Expr | None = None

    @property
    def count(self) -> Expr:
        return self.ends[-1]


@dataclass(frozen=True, kw_only=True)
class Program:
    name: str
    head_dim_qk: int
    head_dim_v: int
    config: TileConfig
    tensors: tuple[TensorArg, ...]
    scalars: tuple[ScalarArg, ...]
    lets: tuple[Stmt, ...]
    values: tuple[TileValue, ...]
    prologue: tuple[Op, ...]
    first: tuple[Step, ...] = ()  # the body for tile 0, where that differs: the state is then the tile's alone
    loop: TileLoop
    epilogue: tuple[Op, ...]
    workspaces: tuple[Workspace, ...] = ()
    rows: tuple[tuple[str, Expr], ...] = ()  # workspaces of row values, made of the graph's before any tile is visited
    visit_mask: Expr | None = None  # the mask that the visit table is made from; None: closed forms
    facts: tuple[Fact, ...] = ()

    def value(self, name: str) -> TileValue | None:
        return next((v for v in self.values if v.name == name), None)

    def ops(self) -> Iterator[Op]:
        for step in (*self.prologue, *self.first, *self.loop.body, *self.epilogue):
            yield from step.body if isinstance(step, Guard) else (step,)

    def captures(self) -> tuple[TensorArg, ...]:
        return tuple(t for t in self.tensors if t.access in (Access.CAPTURE, Access.WORK))

    def __str__(self) -> str:
        from attngen.exprtext import show
        from attngen.ir.text import op_lines

        lines = [f"program {self.name}  {self.config}"]
        lines += [f"  rows {name} = {show(e)}" for name, e in self.rows]
        lines += [f"  let {s.target} = {show(s.value)}" for s in self.lets]
        lines += [f"  value {v.text()}" for v in self.values]
        for op in self.prologue:
            lines += op_lines(op, 1)
        classes = ", ".join(f"{c} to {show(e)}" for c, e in zip(self.loop.classes, self.loop.ends, strict=True))
        if self.first:
            lines.append("  first tile")
        for step in self.first:
            lines += op_lines(step, 2)
        place = "; ".join(f"{s.target} = {show(s.value)}" for s in self.loop.place) or f"n = {show(self.loop.tile)}"
        lines.append(f"  for t: {place}   ({classes})")
        lines += [f"    let {s.target} = {show(s.value)}" for s in self.loop.lets]
        for step in self.loop.body:
            lines += op_lines(step, 2)
        for op in self.epilogue:
            lines += op_lines(op, 1)
        return "\n".join(lines) + "\n"


def numbered(ops: Iterable[Step], prefix: str = "o", first: int = 0) -> tuple[Step, ...]:
    """With ids by position, counted from `first`; ops of a guard carry the guard's."""
    result: list[Step] = []
    for k, step in enumerate(ops, first):
        name = f"{prefix}{k}"
        if isinstance(step, Guard):
            body = tuple(replace(op, id=f"{name}_{n}") for n, op in enumerate(step.body, first))
            result.append(replace(step, id=name, body=body))
        else:
            result.append(replace(step, id=name))
    return tuple(result)
