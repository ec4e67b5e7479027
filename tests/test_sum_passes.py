"""What the passes of gradients for Hopper are made of: weights in two maps, row values, blocks, registers of roles."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attngen import causal
from attngen.backward_pipeline import Asked, backward_graph, following, parts_of
from attngen.config import HopperSumsConfig
from attngen.errors import CompileError
from attngen.expr import DType, const, load, make, mul, sub, var
from attngen.expr import Op as ExprOp
from attngen.ir.graph import Axis, Output
from attngen.layout import accumulator, block_offset, blocks
from attngen.passes.hopper.sum_room import role_registers
from attngen.passes.scopes import Target
from attngen.passes.split_weights import halves, lift_rows
from attngen.signature import IoType, Signature
from attngen.spec import Attention
from attngen.target import SM90

S, DP, DELTA = (var(n, DType.F32) for n in ("rS", "rdP", "sDelta"))
P = make(ExprOp.EXP2, S)


def test_weights_split_at_the_second_product() -> None:
    found = halves([Target("rP", P), Target("rdS", mul(P, sub(DP, DELTA)))], "rS", frozenset({"rdP"}))
    assert found is not None
    assert found.early == (Target("rP", P),)
    assert found.late == (Target("rP", mul(DP, var("rP", DType.F32))),)
    assert (found.place, found.start) == ({"rdS": "rP"}, {"rdP": DELTA})


def test_what_the_second_map_needs_is_kept() -> None:
    """A slope of the score lies where ds will."""
    slope = sub(const(1.0), mul(S, S))
    found = halves([Target("rP", P), Target("rdS", mul(mul(P, sub(DP, DELTA)), slope))], "rS", frozenset({"rdP"}))
    assert found is not None
    assert {t.name: t.value for t in found.early} == {"rP": P, "rdS": mul(P, slope)}
    assert found.place == {"rdS": "rdS"}


def test_what_does_not_split() -> None:
    """Weights that are no products, and sums over many elements, whose error would be that of 16 bits."""
    assert halves([Target("rdS", make(ExprOp.EXP2, mul(S, DP)))], "rS", frozenset({"rdP"})) is None
    table = Target("table", mul(P, sub(DP, DELTA)), accumulate=True, index=(const(0),))
    assert halves([table], "rS", frozenset({"rdP"})) is None


def test_row_values_leave_elements() -> None:
    lse = load("lse", (var("i", DType.I32),), DType.F32)
    seen: dict[object, str] = {}

    def name(e: Any) -> Any:
        seen.setdefault(e, f"row{len(seen)}")
        return var(seen[e], DType.F32)

    whole = mul(lse, const(2.0))
    assert lift_rows(sub(S, whole), frozenset({"lse"}), name) is sub(S, var("row0", DType.F32))
    assert list(seen) == [whole]


def test_blocks_hold_each_element_once() -> None:
    """In the order of a warpgroup's accumulator: four registers of a thread side by side."""
    for cols in (16, 48, 64, 80, 112, 128, 192, 256):
        found = list(blocks(cols))
        assert [c for c, _ in found] == [sum(w for _, w in found[:k]) for k in range(len(found))]
        assert sum(w for _, w in found) == cols
        assert all(c % w == 0 for c, w in found)
    for width in (16, 32, 64):
        offsets = {block_offset(r, c) for r in range(64) for c in range(width)}
        assert offsets == set(range(64 * width))
    for rows in (16, 32, 48):  # of a tile with fewer rows: those of its first warps
        assert {block_offset(r, c, rows) for r in range(rows) for c in range(64)} == set(range(64 * rows))
    for lane in range(32):
        for register in range(32):
            row, column = accumulator(lane, register, 64)
            assert block_offset(32 + row, column) == register // 4 * 512 + (64 + lane) * 4 + register % 4


@pytest.mark.parametrize("warpgroups", [1, 2, 3])
@pytest.mark.parametrize("held", [None, 32, 56])
def test_roles_share_what_the_launch_has(warpgroups: int, held: int | None) -> None:
    load_regs, shed, math_regs = role_registers(warpgroups, held, SM90)
    groups = warpgroups + (1 if held is None else 2)
    assert load_regs + shed + warpgroups * math_regs <= 65536 // (128 * groups) // 8 * 8 * groups
    assert all(r % 8 == 0 for r in (load_regs, shed, math_regs))
    assert load_regs >= 32
    assert held is None or shed > 24 + held
    if held is not None:  # the role of parts takes what the loading role had, too
        none, parts, more = role_registers(warpgroups, held, SM90, merged=True)
        assert none == 0 and parts + warpgroups * more <= 65536 // (128 * (warpgroups + 1)) // 8 * 8 * (warpgroups + 1)
        assert parts % 8 == more % 8 == 0 and parts >= shed and more >= math_regs


def test_keys_are_owned_where_dq_is_added_up() -> None:
    variant = Attention(mask=causal()).variant
    asked = Asked(frozenset("qkv"), dlse=False, same_bits=False)
    parts = parts_of(backward_graph(variant, asked)[1], variant, Signature(IoType.BF16, 128, 128), SM90, False)
    assert [o.own for o in parts.owned] == [Axis.N]


@pytest.mark.parametrize(
    ("dims", "read", "kernels"),
    [((128, 128), False, 1), ((192, 128), False, 2), ((192, 192), False, 2), ((256, 256), False, 2),
     ((64, 64), True, 1), ((128, 128), True, 2)],
)  # fmt: skip
def test_parts_of_dq_come_from_the_kernel_of_dk(dims: tuple[int, int], read: bool, kernels: int) -> None:
    """Where two accumulators do not fit; the gradient of a bias comes from there, too."""
    table = torch.zeros(4, 64, 64)
    variant = Attention(score=lambda s, b, h, i, j: s + table[h, i, j]).variant
    wanted = {"q", "k", "v", "table"} if read else {"q", "k", "v"}
    asked = Asked(frozenset(wanted), dlse=False, same_bits=False)
    parts = parts_of(backward_graph(variant, asked)[1], variant, Signature(IoType.BF16, *dims), SM90, False)
    assert [o.own for o in parts.owned] == [Axis.N] * kernels
    made = [{out.x for out in o.graph.of(Output) if isinstance(out, Output)} for o in parts.owned]
    assert made[:-1] == [{"dv"}] * (kernels - 1)
    assert {"dq", "dk"} <= made[-1] and len(made[-1]) == len(wanted) - len(made[:-1])


def test_only_kernels_that_an_error_names_get_the_next_configuration() -> None:
    a, b, c = (HopperSumsConfig(2, n, 2) for n in (64, 128, 192))
    ranked = (("attn_bwd_keys", (a, b)), ("attn_bwd_queries", (a, b, c)))
    assert following(ranked, (a, b), CompileError("attn_bwd_queries: spills")) == (a, c)
    assert following(ranked, (a, b), CompileError("attn_bwd_keys, attn_bwd_queries")) == (b, c)
    assert following(ranked, (b, a), CompileError("attn_bwd_keys: spills")) is None
    with pytest.raises(CompileError, match="attn_bwd_rows"):
        following(ranked, (a, a), CompileError("attn_bwd_rows: spills"))
