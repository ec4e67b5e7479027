"""Every stage of the pipeline means the same: the interpreters of Graph and Program against attention in plain
torch."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from cases import CASES, Case, Sizes
from support import qkv
from torch import Tensor

from attngen.config import Config
from attngen.ir.graph import Graph
from attngen.ir.interpret import ProgramRun, Visited, run_graph, run_program
from attngen.ir.program import Program
from attngen.layout import Swizzle
from attngen.passes.place import place
from attngen.passes.ranges import VisitSource, ranges
from attngen.passes.simplify import simplify
from attngen.passes.stream import stream
from attngen.passes.textbook import textbook
from attngen.passes.tile import tile
from attngen.passes.units import units
from attngen.signature import signature_of
from attngen.spec import Attention

CONFIG = Config(32, 16, 2)
SHAPES = [(41, 70), (70, 41), (64, 64)]
GRAPHS = ["textbook", "simplify", "stream", "units"]
PROGRAMS = ["tile", "place"]


def graph_at(stage: str, spec: Attention) -> Graph:
    graph = textbook(spec.variant)
    if stage == "textbook":
        return graph
    graph = simplify(graph)
    if stage == "simplify":
        return graph
    graph = stream(graph)
    return graph if stage == "stream" else units(graph, spec.variant.scale_positive)


def program_at(stage: str, spec: Attention, tensors: tuple[Tensor, Tensor, Tensor]) -> Program:
    visit = ranges(spec.variant.mask, CONFIG.block_n)
    program = tile(graph_at("units", spec), spec.variant, signature_of(*tensors), CONFIG, visit)
    return program if stage == "tile" else place(program, Swizzle.XOR)


def made(name: str, sq: int, sk: int) -> tuple[Case, tuple[Tensor, Tensor, Tensor]]:
    return CASES[name](Sizes(2, 2, sq, sk)), qkv(b=2, sq=sq, sk=sk, d=24, dv=16)


def interpreted(spec: Attention, tensors: tuple[Tensor, Tensor, Tensor]) -> ProgramRun:
    return run_program(program_at("place", spec, tensors), *tensors, spec.tensors, spec.scale_for(24))


def close(outputs: dict[str, Tensor], case: Case, tensors: tuple[Tensor, Tensor, Tensor], valued: bool = False) -> None:
    """`valued`: an empty row has no value (0 / 0), as in the textbook; the fold makes it the neutral element."""
    _, truth = case
    out, lse = truth(*tensors, torch.float64)
    assert (lse is None) == ("lse" not in outputs)
    got = dict(outputs)
    if lse is not None:
        if valued:
            empty = lse == float("-inf")
            assert got["out"][empty].isnan().all()
            assert got["lse"][empty].isnan().all()
            got = {"out": got["out"].where(~empty[..., None], 0), "lse": got["lse"].where(~empty, float("-inf"))}
        torch.testing.assert_close(got["lse"], lse, rtol=0, atol=1e-10)
    torch.testing.assert_close(got["out"], out, rtol=0, atol=1e-10)


@pytest.mark.parametrize("stage", GRAPHS)
@pytest.mark.parametrize("name", CASES)
def test_graphs_mean_the_formula(name: str, stage: str) -> None:
    for sq, sk in SHAPES:
        case, tensors = made(name, sq, sk)
        spec = case[0]
        for block_n in (16, 200):
            outputs = run_graph(graph_at(stage, spec), *tensors, spec.tensors, spec.scale_for(24), block_n=block_n)
            close(outputs, case, tensors, valued=stage in ("textbook", "simplify"))


@pytest.mark.parametrize("stage", PROGRAMS)
@pytest.mark.parametrize("name", CASES)
def test_programs_mean_the_formula(name: str, stage: str) -> None:
    for sq, sk in SHAPES:
        case, tensors = made(name, sq, sk)
        spec = case[0]
        run = run_program(program_at(stage, spec, tensors), *tensors, spec.tensors, spec.scale_for(24))
        close(run.outputs, case, tensors)


@pytest.mark.parametrize("name", CASES)
def test_visited_tiles_are_those_that_the_mask_needs(name: str) -> None:
    """Empty tiles are not visited, and a tile is full exactly where every row sees every key of it."""
    for sq, sk in SHAPES:
        (spec, truth), tensors = made(name, sq, sk)
        run = interpreted(spec, tensors)
        b, h, i, j = (
            torch.arange(2).view(2, 1, 1, 1),
            torch.arange(2).view(2, 1, 1),
            torch.arange(sq)[:, None],
            torch.arange(sk),
        )
        mask = truth.mask(b, h, i, j) if truth.mask else torch.ones(())
        visible = mask.expand(2, 2, sq, sk).bool()
        assert len(run.visited) == 2 * 2 * -(-sq // CONFIG.block_m)
        for (bb, hh, m), visited in run.visited.items():
            rows = visible[bb, hh, m * CONFIG.block_m : (m + 1) * CONFIG.block_m]
            want = set()
            for n in range(-(-sk // CONFIG.block_n)):
                part = rows[:, n * CONFIG.block_n : (n + 1) * CONFIG.block_n]
                if part.any():
                    want.add(Visited(n, "full" if part.all() and part.size(1) == CONFIG.block_n else "masked"))
            assert set(visited) == want
            assert len(visited) == len(want)


def test_order_is_from_the_last_key_down() -> None:
    (spec, _), tensors = made("causal", 64, 64)
    visited = interpreted(spec, tensors).visited[0, 0, 1]
    assert visited == [Visited(3, "masked"), Visited(2, "masked"), Visited(1, "full"), Visited(0, "full")]


def test_full_tiles_run_no_op_of_the_mask() -> None:
    """The only ops that differ between the classes are those that apply the mask."""
    (spec, _), tensors = made("causal", 64, 64)
    program = program_at("place", spec, tensors)
    assert [op.only for op in program.loop.body if op.only] == ["masked"]
    without = dataclasses.replace(
        program, loop=dataclasses.replace(program.loop, body=tuple(op for op in program.loop.body if not op.only))
    )
    q, k, v = tensors
    # the last row sees every key: its tiles, masked or not, give the right numbers without a mask only there
    got = run_program(without, q, k, v, spec.tensors, spec.scale_for(24)).outputs["out"]
    want = run_program(program, q, k, v, spec.tensors, spec.scale_for(24)).outputs["out"]
    assert torch.equal(got[:, :, -1], want[:, :, -1])
    assert not torch.allclose(got[:, :, 0], want[:, :, 0])


def test_masks_of_captured_tensors_are_listed() -> None:
    """A mask without closed form goes through the table, which leaves out what its tiles do not need."""
    (spec, _), tensors = made("document", 70, 70)
    assert ranges(spec.variant.mask, CONFIG.block_n).source is VisitSource.TABLE
    visited = interpreted(spec, tensors).visited
    assert {v.tile for v in visited[0, 0, 2]} == {2, 3, 4}  # rows 64..69: documents 2 (keys 46..68) and 3 (key 69)


def test_program_may_not_hide_an_index_in_a_row_statement() -> None:
    """A statement in a scope that its value does not fit is an error of the interpreter, not a wrong number."""
    (spec, _), tensors = made("softcap_alibi", 41, 70)
    program = program_at("place", spec, tensors)
    broken = []
    for op in program.loop.body:
        body = getattr(op, "body", ())
        wrong = tuple(dataclasses.replace(s, scope=type(s.scope).ROW) if s.scope.value == "col" else s for s in body)
        broken.append(dataclasses.replace(op, body=wrong) if body else op)
    program = dataclasses.replace(program, loop=dataclasses.replace(program.loop, body=tuple(broken)))
    with pytest.raises(RuntimeError, match="expand"):
        run_program(program, *tensors, spec.tensors, spec.scale_for(24))
