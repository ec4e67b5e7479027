"""Hopper kernels from schedule texts that were written by hand: tests/data/sm90."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

import attngen
from attngen import Attention, alibi, causal, sliding_window, softcap
from attngen.execute import empty_like_rows, launch_module, scalars_of
from attngen.ir.schedule import Schedule
from attngen.ir.verify import verify
from attngen.kernel import Generated
from attngen.reference import reference
from attngen.runtime.nvrtc import find_nvrtc
from attngen.target import target

TEXTS = sorted((Path(__file__).parent / "data" / "sm90").glob("*.schedule"))
Shape = tuple[int, int, int, int, int, int, bool]
# B, Hq, Hkv, Sq, Sk, factor of the queries, whether keys grow towards the first (then tiles are redone)
SHAPES: tuple[Shape, ...] = (
    (1, 2, 2, 256, 256, 1, False),
    (2, 6, 2, 1000, 1000, 1, False),
    (1, 2, 1, 517, 333, 1, False),
    (1, 2, 1, 300, 700, 4, True),
    (3, 2, 2, 1, 129, 1, False),
    (1, 1, 1, 129, 1, 1, False),
    (2, 4, 4, 64, 2100, 8, False),
)

try:
    find_nvrtc()
    HAS_NVRTC = True
except attngen.errors.MissingToolError:
    HAS_NVRTC = False


@cache
def generated(path: Path) -> Generated:
    schedule = Schedule.parse(path.read_text())
    return Generated(verify(schedule), target("sm90"), path.stem)


def spec_of(name: str, tensors: dict[str, Tensor]) -> Attention:
    """What a text computes, by the words of its name."""
    words = name.split("_")
    mask = None if "full" in words else causal()
    if "window1024" in words or "window100" in words:
        mask = causal() & sliding_window(1024 if "window1024" in words else 100)
    score = None
    if "softcap30" in words:
        score = softcap(30.0)
    elif "alibi" in words:
        score = alibi(tensors["slopes"])
    elif "table" in words:
        table = tensors["table"]
        middle = table.size(1) // 2

        def score(s, b, h, i, j):  # type: ignore[no-untyped-def]
            return s + table[h, i - j + middle]

    return Attention(mask=mask, score=score, return_lse=True)


def test_the_texts_are_there() -> None:
    assert len(TEXTS) >= 28


@pytest.mark.parametrize("path", TEXTS, ids=lambda p: p.stem)
def test_text_is_canonical_and_verified(path: Path) -> None:
    text = path.read_text()
    assert Schedule.parse(text).print() == text
    verify(Schedule.parse(text))


@pytest.mark.skipif(not HAS_NVRTC, reason="needs NVRTC: pip install nvidia-cuda-nvrtc")
@pytest.mark.parametrize("path", TEXTS, ids=lambda p: p.stem)
def test_text_compiles_past_the_build_gate(path: Path) -> None:
    assert generated(path).artifact("sm_90a").resources["attn_fwd"].registers <= 168


def test_rounds_of_phases_leave_no_masked_tile_to_the_full_class() -> None:
    """A window has masked tiles at both ends. Ranges end after whole rounds: the full one before its end, then."""
    text = next(p for p in TEXTS if p.stem == "sm90_window1024_d128")
    loops = [line.strip() for line in generated(text).source.text.split("\n") if line.strip().startswith("while (")]
    assert [line for line in loops if "masked" in line or "end_full" in line] == [
        "while (!done && (t < masked || !(t + 1 < end_full))) {",
        "while (!done && (!(t < masked) && t + 1 < end_full)) {",
    ]
    q = torch.randn(1, 64, 1, 128).bfloat16().transpose(1, 2)
    k, v = (torch.randn(1, 2100, 1, 128).bfloat16().transpose(1, 2) for _ in range(2))
    out, lse = empty_like_rows(q, 128), torch.empty(1, 1, 64)
    launch_module(generated(text), {"q": q, "k": k, "v": v, "out": out, "lse": lse}, scalars_of(q, k, 128**-0.5))
    want, want_lse = reference(spec_of(text.stem, {}), q, k, v)
    assert want_lse is not None
    assert torch.allclose(lse.double(), want_lse, atol=1e-5)
    assert torch.allclose(out.double(), want, atol=5e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("path", TEXTS, ids=lambda p: p.stem)
def test_gpu_text_against_float64(path: Path, shape: Shape) -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")
    against_float64(path, shape, "cuda")


@pytest.mark.parametrize("path", TEXTS, ids=lambda p: p.stem)
def test_text_against_float64(path: Path) -> None:
    """In the emulator: rows without a key, tiles done again, one query, lengths off the tiles. Those that come with the
    package are in the tests that hold on every target."""
    for shape in SHAPES[2:5]:
        against_float64(path, shape, "cpu")


def against_float64(path: Path, shape: Shape, device: str) -> None:
    batch, heads, kv_heads, seqlen_q, seqlen_k, factor, growing = shape
    module = generated(path)
    dtype = torch.float16 if "fp16" in path.stem else torch.bfloat16
    d, dv = module.schedule.head_dim_qk, module.schedule.head_dim_v
    torch.manual_seed(hash(shape) % 2**31)
    q = torch.randn(batch, seqlen_q, heads, d, device=device).to(dtype).transpose(1, 2) * factor
    k, v = (torch.randn(batch, seqlen_k, kv_heads, n, device=device).to(dtype).transpose(1, 2) for n in (d, dv))
    if growing:
        k = k * (1 + torch.arange(seqlen_k, 0, -1, device=device)[:, None] / 200).to(dtype)
    captures = {
        "slopes": torch.rand(heads, device=device),
        "table": torch.randn(heads, 2 * max(seqlen_q, seqlen_k) + 1, device=device),
    }
    spec = spec_of(path.stem, captures)
    out = empty_like_rows(q, dv).fill_(float("nan"))
    lse = torch.full((batch, heads, seqlen_q), float("nan"), device=device)
    used = {t.name for t in module.schedule.kernels[0].tensors}
    tensors = {"q": q, "k": k, "v": v, "out": out, "lse": lse, **{n: t for n, t in captures.items() if n in used}}
    launch_module(module, tensors, scalars_of(q, k, d**-0.5))
    want, want_lse = reference(spec, q, k, v)
    assert want_lse is not None
    eager = same_dtype_error(spec, q, k, v, want)
    assert (out.double() - want).abs().max().item() <= 2 * eager + 1e-5
    seen = torch.isfinite(want_lse)
    assert torch.equal(lse[~seen], want_lse[~seen].float())
    assert torch.allclose(lse[seen].double(), want_lse[seen], atol=1e-3, rtol=1e-6)


def same_dtype_error(spec: Attention, q: Tensor, k: Tensor, v: Tensor, want: Tensor) -> float:
    """Error of eager attention in the type of the inputs: rounded scores and weights."""
    group = q.size(1) // k.size(1)
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    _, lse = reference(spec, q, k, v)
    assert lse is not None
    scores = (q @ k.transpose(-1, -2) * q.size(-1) ** -0.5).double()
    # the score and the mask in float64 on rounded logits, weights rounded once more: what eager code loses is both
    identity = torch.eye(k.size(2), device=q.device, dtype=torch.float64).expand(q.size(0), q.size(1), -1, -1)
    weights, _ = reference(spec, q, k, identity.to(q.dtype))
    rounded = weights.to(q.dtype) @ v
    return max((rounded.double() - want).abs().max().item(), (scores - scores.to(q.dtype).double()).abs().max().item())
