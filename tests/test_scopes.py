"""What is hoisted out of the elements of a tile: conversions, index arithmetic, loads of one index."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from attngen.config import Config
from attngen.expr import DType, Expr, I, J, Op, add, const, make, var, walk
from attngen.functions import exp
from attngen.ir.ops import Map, Scope, Stmt
from attngen.ir.ops import Op as TileOp
from attngen.ir.program import Program
from attngen.passes.ranges import ranges
from attngen.passes.scopes import Scopes, Target, join
from attngen.passes.simplify import simplify
from attngen.passes.stream import stream
from attngen.passes.textbook import textbook
from attngen.passes.tile import tile
from attngen.passes.units import units
from attngen.signature import IoType, Signature
from attngen.spec import Attention
from attngen.variants import alibi, bias, causal, document

INTEGER = frozenset({Op.FLOORDIV, Op.MOD, Op.MUL, Op.ADD, Op.SUB, Op.MIN, Op.MAX, Op.ABS})


def program_of(spec: Attention) -> Program:
    graph = units(stream(simplify(textbook(spec.variant))), spec.variant.scale_positive)
    config = Config(32, 16, 2)
    return tile(graph, spec.variant, Signature(IoType.BF16, 64, 64), config, ranges(spec.variant.mask, config.block_n))


def statements(ops: tuple[TileOp, ...], *scopes: Scope) -> Iterator[Stmt]:
    """Statements of these scopes (none named: of all) in the maps of a program's part."""
    for op in ops:
        if isinstance(op, Map):
            yield from (s for s in op.body if not scopes or s.scope in scopes)


def operations(values: Iterator[Stmt]) -> list[Expr]:
    return [e for s in values for e in walk(s.value)]


def test_alibi_converts_no_element() -> None:
    """Per element: two subtractions, a magnitude, a product. Rows and columns are converted once each."""
    program = program_of(Attention(mask=causal(), score=alibi(torch.ones(2))))
    body = program.loop.body
    per_element = operations(statements(body, Scope.ELEM))
    assert not [e for e in per_element if e.op in (Op.F32, Op.LOAD)]
    assert not [e for e in per_element if e.dtype is DType.I32 and e.op in INTEGER]
    columns = operations(statements(body, Scope.COL))
    assert [e.args[0] for e in columns if e.op is Op.F32] == [J]
    everywhere = operations(statements((*program.prologue, *body), Scope.ROW))
    assert any(e.op is Op.F32 and e.args[0] is I for e in everywhere)
    loads = [e for s in program.lets for e in walk(s.value) if e.op is Op.LOAD]
    assert [e.name for e in loads] == ["slopes"]  # of the head: once an item


def test_bias_clamps_indices_outside_the_elements() -> None:
    """The element's load takes a row index and a column index that were clamped once a row and once a column."""
    program = program_of(Attention(score=bias(torch.zeros(1, 2, 5, 7))))
    body = program.loop.body
    (load,) = {e for e in operations(statements(body, Scope.ELEM)) if e.op is Op.LOAD}
    assert load.name == "bias"
    assert all(a.op in (Op.VAR, Op.CONST) for a in load.args)
    per_element = operations(statements(body, Scope.ELEM))
    assert not [e for e in per_element if e.dtype is DType.I32 and e.op in INTEGER]
    row, column = (next(s for s in statements(body) if s.target == a.name) for a in load.args[2:])
    assert row.scope is Scope.ROW
    assert column.scope is Scope.COL
    lets = {s.target: str(s.value) for s in program.lets}
    last = {"row": "bias_n2 - 1", "col": "bias_n3 - 1"}  # the clamp's end is computed once an item
    for statement, index in ((row, "i"), (column, "j")):
        assert statement.value.op is Op.MIN
        assert statement.value.args[0].name == index
        assert lets[statement.value.args[1].name] == last[statement.scope.value]


def test_document_ids_are_loaded_once_a_row_and_once_a_column() -> None:
    program = program_of(Attention(mask=document(torch.zeros(9, dtype=torch.int32))))
    hoisted = [e for e in operations(statements(program.prologue, Scope.ROW)) if e.op is Op.LOAD]
    assert len(set(hoisted)) == 1  # before the loop, into a row value that it keeps
    body = program.loop.body
    assert not [e for e in operations(statements(body, Scope.ELEM, Scope.ROW)) if e.op is Op.LOAD]
    assert len({e for e in operations(statements(body, Scope.COL)) if e.op is Op.LOAD}) == 1
    (row,) = (s for s in statements(program.prologue, Scope.ROW) if any(e.op is Op.LOAD for e in walk(s.value)))
    value = program.value(row.target)
    assert value is not None
    assert value.dtype == "i32"


def test_user_functions_of_one_index_are_hoisted() -> None:
    """exp of a column index costs a column, of a row index a row of the whole item, of a head an item."""
    spec = Attention(score=lambda s, b, h, i, j: s + exp(-i) + exp(-j) + exp(-h))
    program = program_of(spec)

    def transcendental(values: Iterator[Stmt]) -> list[Expr]:
        return [e for e in operations(values) if e.op is Op.EXP2 and "z" not in str(e) and "rS" not in str(e)]

    assert len(set(transcendental(statements(program.prologue, Scope.ROW)))) == 1
    assert len(set(transcendental(statements(program.loop.body, Scope.COL)))) == 1
    assert [e for s in program.lets for e in walk(s.value) if e.op is Op.EXP2]
    score = program.loop.body[2]
    assert isinstance(score, Map)
    assert not transcendental(statements((score,), Scope.ELEM, Scope.ROW))


def test_join() -> None:
    assert join([]) is Scope.ITEM
    assert join([Scope.ROW, Scope.ITEM, Scope.ROW]) is Scope.ROW
    assert join([Scope.ROW, Scope.COL]) is Scope.ELEM
    assert join([Scope.ELEM, Scope.ITEM]) is Scope.ELEM


def test_split_names_what_it_hoists() -> None:
    h = var("h", DType.I32)
    scopes = Scopes({"rS": Scope.ELEM}, {make(Op.MUL, h, const(3)): "three_h"}, {"u0"})
    value = add(var("rS", DType.F32), make(Op.F32, add(make(Op.MUL, h, const(3)), J)))
    body = scopes.split(Target("rS", value))
    assert [str(s.value) for s in scopes.lets.values()] == ["h * 3"]
    assert [s.target for s in scopes.lets.values()] == ["three_h"]
    assert [(s.scope, s.target, str(s.value)) for s in body] == [
        (Scope.COL, "u1", "f32(three_h + j)"),
        (Scope.ELEM, "rS", "rS + u1"),
    ]


def test_numbered_values_are_no_types_of_the_kernel_text() -> None:
    """u8 and u16 are types there: a value of that name would hide them."""
    slopes = torch.ones(2, 32)
    program = program_of(
        Attention(score=lambda s, b, h, i, j: s + sum(slopes[h, n] * abs(i - j * n) for n in range(20)))
    )
    names = {s.target for s in program.lets} | {s.target for s in statements((*program.prologue, *program.loop.body))}
    assert "u17" in names
    assert not names & {"u8", "u16", "u32", "u64"}
