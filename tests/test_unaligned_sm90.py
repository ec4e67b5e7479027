"""Rows that the copy engine cannot read, on Hopper: the alignment of a call's rows decides who copies, and the passes
derive the load role, which is verified, compiled, emulated, and run on a GPU."""

from __future__ import annotations

import random
from functools import cache

import pytest
import torch
from hopper_levels import CAUSAL, CONFIG, FULL, SM90, derived, role
from support import DEVICES, MODES, Truth, causal_grid, check, kernels_of, qkv, run, run_mode, same_bits
from test_copies_sm90 import strided
from torch import Tensor

import attngen
from attngen.config import FoldPolicy, HopperConfig
from attngen.emulator import Mode
from attngen.errors import GradientError
from attngen.faults import Judge
from attngen.ir.mutate import Mutant, mutants
from attngen.ir.ops import CopyTile, CpAsync, StTile, TmaLoad, TmaStore
from attngen.ir.schedule import Kernel, ops_of
from attngen.kernel import kernel_for, settled
from attngen.passes.hopper.copies import Copier, copier
from attngen.passes.hopper.stage import registers
from attngen.pipelines import derive
from attngen.signature import IoType, Signature, row_alignment, signature_of
from attngen.spec import Attention
from attngen.variants import causal, sliding_window

ALIGNMENTS = (2, 4, 8)
SMALL = HopperConfig(1, 32, 2, FoldPolicy.REFERENCE, turns=False)
POSITIONS = Attention(mask=causal(), score=lambda s, b, h, i, j: (i - j).float() * -0.25)


# ---- who copies ------------------------------------------------------------------------------------------------------


def kinds(kernel: Kernel, name: str) -> list[str]:
    return [type(op).__name__ for r, op in ops_of(kernel) if r is role(kernel, name)]


@pytest.mark.parametrize("alignment", [*ALIGNMENTS, 16])
def test_alignment_decides_who_copies(alignment: int) -> None:
    """And nothing else does: the rest of the kernel is that of aligned rows, but for registers."""
    kernel, aligned = derived(CAUSAL, CONFIG, 64, 64, alignment), derived(CAUSAL, CONFIG, 64, 64)
    copies = [op for _, op in ops_of(kernel) if isinstance(op, TmaLoad | CpAsync | CopyTile)]
    assert {type(op) for op in copies} == {{2: CopyTile, 16: TmaLoad}.get(alignment, CpAsync)}
    assert all(op.bytes == alignment for op in copies if isinstance(op, CpAsync))
    assert [op.src for op in copies] == ["k", "q", "v"]
    assert role(kernel, "load").single == (alignment == 16)
    assert role(kernel, "math").item == role(aligned, "math").item
    assert kernel.buffers == aligned.buffers
    assert any(isinstance(op, TmaStore) for _, op in ops_of(kernel))  # the output's rows are ours


@pytest.mark.parametrize(("warpgroups", "alignment", "expected"), [
    (2, 16, (24, 240)), (2, 8, (40, 232)), (2, 4, (40, 232)), (2, 2, (56, 224)), (4, 16, (32, 112)), (4, 2, (56, 104)),
])  # fmt: skip
def test_threads_that_copy_take_registers(warpgroups: int, alignment: int, expected: tuple[int, int]) -> None:
    by = copier(Signature(IoType.BF16, 64, 64, alignment))
    assert by.by_threads == (by is not Copier.ENGINE) == (alignment < 16)
    found = registers(HopperConfig(warpgroups, 64), SM90.regs_per_sm, by)
    assert found == expected
    assert 128 * found[0] + 128 * warpgroups * found[1] <= SM90.regs_per_sm


@pytest.mark.parametrize("alignment", ALIGNMENTS)
def test_it_is_said(alignment: int) -> None:
    facts = {f.subject: f.text for f in derive(CAUSAL.variant, signature(64, alignment), SM90, CONFIG).schedule.facts}
    how = "through registers, element by element" if alignment == 2 else f"with cp.async, {alignment} bytes each time"
    assert facts["copies"].startswith(f"rows start on {alignment} bytes, and the copy engine needs 16: ")
    assert facts["copies"].endswith(how)
    aligned = derive(CAUSAL.variant, signature(64, 16), SM90, CONFIG).schedule.facts
    assert "copies" not in {f.subject for f in aligned}


@pytest.mark.parametrize("alignment", ALIGNMENTS)
def test_one_tile_a_step_and_one_slot(alignment: int) -> None:
    """Scores of positions alone have no keys to copy; with one slot there is no slot to name. Both verify."""
    one_slot = HopperConfig(2, 64, 1, FoldPolicy.REFERENCE)
    alone = derive(POSITIONS.variant, signature(64, alignment), SM90, CONFIG).schedule.kernels[-1]
    assert [r.name for r in alone.rings] == ["V"]
    assert "CpAsync" in kinds(alone, "load") or alignment == 2
    kernel = derive(CAUSAL.variant, signature(64, alignment), SM90, one_slot).schedule.kernels[-1]
    assert {r.slots for r in kernel.rings} == {1}


def signature(d: int, alignment: int, dv: int = 0, dtype: IoType = IoType.BF16) -> Signature:
    return Signature(dtype, d, dv or d, alignment)


@pytest.mark.parametrize(("d", "dv", "alignment"), [(64, 64, 2), (128, 128, 4), (256, 256, 8), (192, 128, 2)])
def test_the_best_configuration_passes_the_build_gate(d: int, dv: int, alignment: int) -> None:
    kernel = settled(kernel_for(CAUSAL.variant, signature(d, alignment, dv), SM90), "sm_90a")
    assert kernel.resources["attn_fwd"].registers <= 168
    assert kernel.signature.alignment == alignment


# ---- what is computed ------------------------------------------------------------------------------------------------

Sizes = tuple[int, int, int, int, int]
SIZES: tuple[Sizes, ...] = ((1, 4, 2, 150, 203), (2, 2, 1, 100, 37), (1, 1, 1, 1, 65), (1, 3, 3, 129, 1))
SPECS = {
    "causal": (CAUSAL, lambda sq, sk: Truth(causal_grid(sq, sk))),
    "full": (FULL, lambda sq, sk: Truth()),
    "window": (
        Attention(mask=causal() & sliding_window(40)),
        lambda sq, sk: Truth(lambda b, h, i, j: (j <= i + sk - sq) & (j > i + sk - sq - 40)),
    ),
}


def tensors(
    sizes: Sizes, d: int, dv: int, alignments: tuple[int, int, int], dtype: torch.dtype, device: str
) -> tuple[Tensor, Tensor, Tensor]:
    b, h, hkv, sq, sk = sizes
    shapes = ((b, h, sq, d), (b, hkv, sk, d), (b, hkv, sk, dv))
    q, k, v = (strided(*s, a, n, device, dtype) for n, (s, a) in enumerate(zip(shapes, alignments, strict=True)))
    return q, k, v


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("d", "dv", "alignments"),
    [(64, 64, (2, 2, 2)), (128, 128, (4, 4, 4)), (40, 24, (8, 8, 8)), (256, 256, (16, 2, 16)), (80, 80, (8, 16, 4)),
     (36, 36, (8, 8, 8)), (20, 100, (8, 4, 8)), (64, 34, (16, 2, 4)), (250, 250, (4, 4, 4))],
)  # fmt: skip
def test_against_float64(
    device: str, name: str, dtype: torch.dtype, d: int, dv: int, alignments: tuple[int, int, int]
) -> None:
    """Odd strides, late starts, one tensor of three; heads that share keys, more queries than keys, one of either."""
    spec, truth = SPECS[name]
    with kernels_of("sm90"):
        for sizes in SIZES:
            q, k, v = tensors(sizes, d, dv, alignments, dtype, device)
            assert signature_of(q, k, v).alignment == min(alignments)
            out, lse = run(spec, q, k, v)
            check(out, lse, truth(sizes[3], sizes[4]), q, k, v)


@pytest.mark.parametrize("alignment", ALIGNMENTS)
def test_the_bits_of_aligned_rows(alignment: int) -> None:
    """At one configuration who copies changes nothing, and neither does when copies arrive."""
    q, k, v = tensors((1, 4, 2, 150, 203), 64, 64, (alignment,) * 3, torch.bfloat16, "cpu")
    with kernels_of("sm90"):
        want, want_lse = run(CAUSAL, *(t.contiguous() for t in (q, k, v)), SMALL)
        for mode, seed in MODES:
            out, lse = run_mode(CAUSAL, q, k, v, mode, seed, SMALL)
            assert same_bits(out, want)
            assert same_bits(lse, want_lse)


@pytest.mark.parametrize("alignment", ALIGNMENTS)
def test_what_lies_around_rows_is_not_read_into_the_result(alignment: int) -> None:
    """NaN between the rows, in front of the first and behind the last."""
    rows = tensors((1, 2, 1, 70, 90), 64, 64, (alignment,) * 3, torch.bfloat16, "cpu")
    around = []
    for t in rows:
        whole = torch.full((t.untyped_storage().size() // 2,), float("nan"), dtype=t.dtype)
        around.append(whole.as_strided(t.shape, t.stride(), t.storage_offset()).copy_(t))
    with kernels_of("sm90"):
        for spec in (CAUSAL, POSITIONS):
            want, got = (run_mode(spec, *x, Mode.LATE, 0, SMALL) for x in (rows, around))
            assert same_bits(want[0], got[0])
            assert same_bits(want[1], got[1])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("target_name", ["sm80", "sm90"])
def test_head_dims_of_every_even_size(device: str, target_name: str) -> None:
    """Contiguous tensors: rows that are no multiples of 16 bytes, on either target, stored by threads."""
    with kernels_of(target_name):
        for d, dv in ((36, 36), (20, 20), (100, 100), (6, 2), (18, 64), (64, 90)):
            q, k, v = qkv(device, h=4, hkv=2, sq=70, sk=97, d=d, dv=dv)
            assert signature_of(q, k, v).alignment == row_alignment(d, dv) < 16
            out, lse = run(CAUSAL, q, k, v)
            assert out.shape == (1, 4, 70, dv)
            check(out, lse, Truth(causal_grid(70, 97)), q, k, v)


def test_output_rows_off_16_bytes_are_stored_by_threads() -> None:
    kernel = derived(CAUSAL, HopperConfig(2, 64, 2), 252, 252, 8)
    stores = [op for _, op in ops_of(kernel) if isinstance(op, TmaStore | StTile)]
    assert [(type(op), op.column) for op in stores] == [(StTile, 0), (StTile, 128)]
    assert role(kernel, "math").exit == ()
    facts = {f.subject: f.text for f in derive(CAUSAL.variant, signature(36, 8), SM90, CONFIG).schedule.facts}
    assert "its threads store it" in facts["output"]


@pytest.mark.parametrize(("d", "dv", "words"), [
    (36, 64, r"gradients with head_dim 36 of q and k. Allowed: multiples of 8.*to 40 and give scale=1/sqrt\(36\)"),
    (64, 20, "gradients with head_dim 20 of v.*to 24; results are 0 there"),
])  # fmt: skip
def test_gradients_of_such_head_dims_are_a_clear_error(d: int, dv: int, words: str) -> None:
    q, k, v = (t.requires_grad_() for t in qkv(sq=5, sk=5, d=d, dv=dv))
    out = attngen.attention(q, k, v)
    with pytest.raises(GradientError, match=words):
        out.sum().backward()


# ---- what is wrong is noticed ----------------------------------------------------------------------------------------


@cache
def judge(alignment: int) -> Judge:
    return Judge.of(kernel_for(CAUSAL.variant, signature(64, alignment), SM90, SMALL), lambda shapes: CAUSAL)


@cache
def load_mutants(alignment: int) -> tuple[Mutant, ...]:
    found = mutants(judge(alignment).kernel.schedule)
    return tuple(m for m in found if str(m).startswith(("delete L", "swap L")))


@pytest.mark.parametrize("alignment", [2, 8])
def test_faults_of_the_load_role_are_noticed(alignment: int) -> None:
    """A sample; the whole table is in docs/fault_injection.md."""
    assert len(load_mutants(alignment)) > 20
    for mutant in random.Random(alignment).sample(load_mutants(alignment), 5):
        assert not judge(alignment).judge(mutant).missed, str(mutant)
