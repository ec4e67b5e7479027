"""Hopper kernels whose loading role copies tiles by its threads, where the copy engine cannot: cp.async for rows that
start on 4 or 8 bytes, through registers for rows that start at any element. Texts by hand; what the passes derive is in
tests/test_unaligned_sm90.py."""

from __future__ import annotations

import math
import random
import re
from functools import cache
from pathlib import Path

import pytest
import torch
from support import MODES
from test_sm90 import SHAPES, generated, same_dtype_error, spec_of

from attngen.cli.lower import signature
from attngen.emulator import Mode
from attngen.errors import AttngenError, EmulatorError, VerifyError
from attngen.execute import launch_module, scalars_of
from attngen.ir.mutate import Mutant, mutants
from attngen.ir.schedule import Schedule, VerifiedSchedule
from attngen.ir.verify import verify
from attngen.kernel import Generated
from attngen.reference import reference
from attngen.signature import alignment_of
from attngen.target import target

FOLDER = Path(__file__).parent / "data" / "sm90"
CPASYNC = sorted(FOLDER.glob("*_cpasync.schedule"))
UNALIGNED = sorted(FOLDER.glob("*_unaligned.schedule"))
Tensors = dict[str, torch.Tensor]
SEED = 4


def strided(
    b: int, h: int, s: int, d: int, alignment: int, seed: int, device: str = "cpu", dtype: torch.dtype = torch.bfloat16
) -> torch.Tensor:
    """[B, H, S, D] inside a larger tensor, in an order of dimensions of its own: rows start on multiples of `alignment`
    bytes, and no more."""
    odd = alignment // 2
    pitch = -(-d // 8) * 8 + 8 + (odd if odd < 8 else 0)
    generator = torch.Generator().manual_seed(seed)
    whole = torch.randn(b * s * h * pitch + 8, generator=generator).to(device, dtype)
    result = whole[odd : odd + b * s * h * pitch].view(b, s, h, pitch)[..., :d].transpose(1, 2)
    assert alignment_of(result) == alignment
    return result


def alignment_for(path: Path) -> int:
    """Of the rows that a text can copy."""
    return signature(Schedule.parse(path.read_text())).alignment


def inputs(
    module: Generated, sizes: tuple[int, int, int, int, int], alignment: int, factor: int = 1, device: str = "cpu"
) -> Tensors:
    """q, k, v, and outputs that hold NaN."""
    batch, heads, kv_heads, seqlen_q, seqlen_k = sizes
    d, dv = module.schedule.head_dim_qk, module.schedule.head_dim_v
    shapes = ((batch, heads, seqlen_q, d), (batch, kv_heads, seqlen_k, d), (batch, kv_heads, seqlen_k, dv))
    tensors = {n: strided(*shape, alignment, ord(n), device) for n, shape in zip("qkv", shapes, strict=True)}
    tensors["q"] *= factor
    out = torch.full((batch, heads, seqlen_q, dv), math.nan, dtype=torch.bfloat16, device=device)
    return {**tensors, "out": out, "lse": torch.full((batch, heads, seqlen_q), math.nan, device=device)}


def run(module: Generated, t: Tensors, mode: Mode = Mode.LATE, seed: int = 0) -> None:
    launch_module(module, t, scalars_of(t["q"], t["k"], t["q"].size(3) ** -0.5), mode, seed)


def errors(name: str, t: Tensors) -> tuple[float, float, float]:
    """(error of out, what is allowed, error of lse)."""
    spec = spec_of(name, {})
    want, want_lse = reference(spec, t["q"], t["k"], t["v"])
    assert want_lse is not None
    seen = torch.isfinite(want_lse)
    assert torch.equal(t["lse"][~seen], want_lse[~seen].float())
    out = (t["out"].double() - want).abs().nan_to_num(nan=math.inf).max().item()
    allowed = 2 * same_dtype_error(spec, t["q"], t["k"], t["v"], want) + 1e-5
    return out, allowed, (t["lse"][seen].double() - want_lse[seen]).abs().nan_to_num(nan=math.inf).max().item()


def test_the_texts_are_there() -> None:
    assert len(CPASYNC) == 3
    assert len(UNALIGNED) == 2


@pytest.mark.parametrize("path", CPASYNC + UNALIGNED, ids=lambda p: p.stem)
def test_emulator_against_float64(path: Path) -> None:
    """Several items a CTA, heads that share keys, rows and keys that end inside a tile, rows without a key."""
    module = generated(path)
    for sizes, modes in (((1, 4, 2, 300, 300), MODES), ((2, 2, 1, 200, 70), MODES[:1])):
        for mode, seed in modes:
            t = inputs(module, sizes, alignment_for(path))
            run(module, t, mode, seed)
            out, allowed, lse = errors(path.stem, t)
            assert out <= allowed, f"{sizes} {mode.name} {seed}"
            assert lse <= 1e-3


@pytest.mark.parametrize("path", UNALIGNED, ids=lambda p: p.stem)
def test_aligned_rows_may_be_copied_through_registers_too(path: Path) -> None:
    module = generated(path)
    one, other = (inputs(module, (1, 2, 1, 130, 200), alignment) for alignment in (2, 16))
    for name in ("q", "k", "v"):
        other[name].copy_(one[name])
    for t in (one, other):
        run(module, t)
    assert torch.equal(one["out"], other["out"])
    assert torch.equal(one["lse"], other["lse"])


@pytest.mark.parametrize("path", CPASYNC, ids=lambda p: p.stem)
def test_cp_async_refuses_rows_off_its_unit(path: Path) -> None:
    module, unit = generated(path), alignment_for(path)
    with pytest.raises(EmulatorError, match=rf"cp_async .*global read of {unit} bytes at k\+.* is misaligned"):
        run(module, inputs(module, (1, 1, 1, 64, 64), unit // 2))


# ---- what is wrong is noticed --------------------------------------------------------------------------------


@cache
def deletions(path: Path) -> tuple[Mutant, ...]:
    """The loading role with each of its ops left out in turn."""
    return tuple(m for m in mutants(Schedule.parse(path.read_text())) if str(m).startswith("delete L"))


@pytest.mark.parametrize("path", [CPASYNC[2], UNALIGNED[0]], ids=lambda p: p.stem)
def test_verifier_notices_deletions(path: Path) -> None:
    """A sample of four: each takes a few seconds."""
    assert len(deletions(path)) == (16 if path in CPASYNC else 11)
    sample = random.Random(SEED).sample(deletions(path), 4)
    assert [str(m) for m in sample if not rule_of(m.schedule)] == []


def rule_of(schedule: Schedule) -> str:
    """The first rule that a schedule breaks; empty: none."""
    try:
        verify(schedule)
    except VerifyError as error:
        return error.rule
    return ""


def emulated(schedule: Schedule, name: str, alignment: int) -> str:
    """What the emulator alone says of a schedule; empty: nothing."""
    module = Generated(VerifiedSchedule(schedule), target("sm90"), "mutant")
    for sizes in ((1, 2, 1, 256, 600), (2, 2, 1, 200, 70)):
        for mode in (Mode.LATE, Mode.EAGER):
            t = inputs(module, sizes, alignment)
            try:
                run(module, t, mode)
            except EmulatorError as error:
                return str(error)
            out, allowed, lse = errors(name, t)
            if out > allowed or lse > 1e-3:
                return f"out off by {out:.1e}"
    return ""


PROXY, WAIT, BEHIND = "missing fence_proxy_async", "in flight|not ordered", "phases behind|race|in flight"
CPASYNC_SAYS = {
    "L1 mbar_wait": BEHIND,
    "L6 cp_wait": WAIT,
    "L7 proxy": PROXY,
    "L8 mbar_arrive": "deadlock",
    "L13 cp_commit": WAIT + "|never",
    "L14 cp_wait": WAIT,
    "L15 proxy": PROXY,
}
UNALIGNED_SAYS = {"L2 copy_tile": "never written", "L5 proxy": PROXY, "L8 mbar_wait": BEHIND, "L10 proxy": PROXY}


@pytest.mark.parametrize(
    ("path", "op", "says"),
    [
        *((CPASYNC[2], op, says) for op, says in CPASYNC_SAYS.items()),
        *((UNALIGNED[0], op, says) for op, says in UNALIGNED_SAYS.items()),
    ],
    ids=lambda x: x.stem if isinstance(x, Path) else x,
)
def test_emulator_alone_notices_a_deletion(path: Path, op: str, says: str) -> None:
    (mutant,) = (m for m in deletions(path) if str(m).startswith(f"delete {op} ") or str(m) == f"delete {op}")
    said = emulated(mutant.schedule, path.stem, alignment_for(path))
    assert re.search(says, said), said


@pytest.mark.parametrize(
    ("old", "new", "rule"),
    [
        ("L8 mbar_arrive bar=K.full[slot] each_thread", "L8 mbar_arrive bar=K.full[slot]", "fill"),
        ("ring K slots=2 full_arrivals=128", "ring K slots=2 full_arrivals=4", "arrivals"),
        ("L6 cp_wait group=K pending=0", "L6 cp_wait group=K pending=1", "copy-groups"),
        ("            L6 cp_wait group=K pending=0\n            L7 proxy\n",
         "            L6 proxy\n            L7 cp_wait group=K pending=0\n", "proxy"),
        ("bar=V.full[prev] each_thread", "bar=V.full[slot] each_thread", "fill"),
        ("=v heads=kv row={n * 128} limit={seqlen_k} bytes=4", "=v heads=kv row={n * 128} limit={seqlen_k} bytes=2",
         "copy-units"),
        ("head_dim_v=128", "head_dim_v=127", "copy-units"),
    ],
)  # fmt: skip
def test_verifier_names_the_rule(old: str, new: str, rule: str) -> None:
    text = CPASYNC[0].read_text()
    assert text.count(old) == 1
    assert rule_of(Schedule.parse(text.replace(old, new))) == rule


def test_stores_are_parts_of_a_row() -> None:
    text = next(p for p in CPASYNC if "d36" in p.stem).read_text()
    assert rule_of(Schedule.parse(text)) == ""
    assert rule_of(Schedule.parse(text.replace(" limit={seqlen_q} bytes=4", " limit={seqlen_q}"))) == "copy-units"


def test_a_warp_may_not_speak_for_its_threads() -> None:
    """One arrival a warp, counted right: what the other lanes copied is not handed over by it."""
    text = CPASYNC[0].read_text().replace(" each_thread", "").replace("full_arrivals=128", "full_arrivals=4")
    with pytest.raises(VerifyError, match="hands over what each thread copied") as caught:
        verify(Schedule.parse(text))
    assert caught.value.rule == "fill"


def test_a_copy_without_the_swizzle_of_slabs_is_refused() -> None:
    text = UNALIGNED[0].read_text()
    text = text.replace("sV elem=bf16 layout=[128,48]x2:b128", "sV elem=bf16 layout=[128,64]x2:xor")
    with pytest.raises(AttngenError, match="L9 copies to a tile without the 128-byte swizzle"):
        Generated(VerifiedSchedule(Schedule.parse(text)), target("sm90"), "wrong")


# ---- on a GPU ------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("path", CPASYNC + UNALIGNED, ids=lambda p: p.stem)
def test_gpu_against_float64(path: Path, shape: tuple[int, int, int, int, int, int, bool]) -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")
    module = generated(path)
    t = inputs(module, shape[:5], alignment_for(path), shape[5], "cuda")
    run(module, t)
    out, allowed, lse = errors(path.stem, t)
    assert out <= allowed
    assert lse <= 1e-3
