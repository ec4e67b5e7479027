"""The reviewed sample kernels in `generated/`: their descriptions, and the files that belong to them.

python -m attngen.golden DIR      writes the set (tests/test_generated.py compares it with generated/)"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from attngen.backward_pipeline import Asked
from attngen.config import Config
from attngen.files import Json, dumps, kernel_files, sha256
from attngen.functions import sigmoid
from attngen.gradient import BackwardKernel, backward_for
from attngen.kernel import Kernel, kernel_for
from attngen.signature import IoType, Signature
from attngen.spec import Attention
from attngen.target import target
from attngen.variants import alibi, bias, causal, document, sliding_window, softcap

MANIFEST = "MANIFEST.json"

# ---- functions as a user writes them -------------------------------------------------------------------------------

BLOCK = 64
REACH = 256
table = torch.zeros(8, 2 * REACH + 1)


def relative_bias(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    """A learned bias for each head and distance, up to a largest distance."""
    distance = i - j
    near = distance.clamp(-REACH, REACH) + REACH
    return s + table[h, near]


def block_causal(b: Any, h: Any, i: Any, j: Any) -> Any:
    """Whole blocks see each other and the blocks before them."""
    return i // BLOCK >= j // BLOCK


def sigmoid_weight(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    return sigmoid(s)


# ---- the samples ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sample:
    """`why`: what it shows that the others do not. The tensors inside a description only give ranks and types.
    `config`: given where the build gate refuses the rules' first for one of the architectures. `asked`: of a
    derivative."""

    name: str
    why: str
    spec: Callable[[], Attention]
    head_dim: int = 128
    head_dim_v: int | None = None
    dtype: IoType = IoType.BF16
    alignment: int = 16
    config: Config | None = None
    target: str = "sm80"
    asked: Asked | None = None

    def kernel(self) -> Kernel | BackwardKernel:
        signature = Signature(self.dtype, self.head_dim, self.head_dim_v or self.head_dim, self.alignment)
        if self.asked:
            return backward_for(self.spec().variant, signature, target(self.target), self.asked)
        return kernel_for(self.spec().variant, signature, target(self.target), self.config)


def _causal() -> Attention:
    return Attention(mask=causal())


SAMPLES = (
    Sample("causal_d64", "the smallest usual head", _causal, head_dim=64),
    Sample("causal_d128", "the usual head", _causal),
    Sample("causal_d128_fp16", "the other storage type", _causal, dtype=IoType.FP16),
    Sample("full_d128", "no mask but the end of the keys", lambda: Attention()),
    Sample("window_d128", "tiles skipped on both sides", lambda: Attention(mask=causal() & sliding_window(1024)),
           config=Config(64, 128, 4, min_ctas=2)),
    Sample("softcap_d128", "a score function", lambda: Attention(mask=causal(), score=softcap(30.0))),
    Sample("alibi_d128", "a captured tensor read once a row",
           lambda: Attention(mask=causal(), score=alibi(torch.zeros(8)))),
    Sample("bias_d64", "a captured tensor read for each score",
           lambda: Attention(score=bias(torch.zeros(2, 8, 4, 4))), head_dim=64,
           config=Config(128, 32, 4, min_ctas=2)),
    Sample("sink_d64", "one more element of the fold",
           lambda: Attention(mask=causal(), sink=torch.zeros(8)), head_dim=64),
    Sample("document_d64", "a visit table made on the device",
           lambda: Attention(mask=causal() & document(torch.zeros(4, dtype=torch.int32))), head_dim=64),
    Sample("relative_block_causal_d64", "functions of the user: a table lookup, and a mask with an integer division",
           lambda: Attention(mask=block_causal, score=relative_bias), head_dim=64),
    Sample("sigmoid_d64", "no softmax: neither maximum nor sum",
           lambda: Attention(mask=causal(), score=sigmoid_weight, normalizer="none"), head_dim=64),
    Sample("causal_d192_v128", "different head dims", _causal, head_dim=192, head_dim_v=128),
    Sample("causal_d40", "a head dim that is padded inside", _causal, head_dim=40),
    Sample("hopper_window_d128", "masked tiles at both ends, on Hopper",
           lambda: Attention(mask=causal() & sliding_window(1024)), target="sm90"),
    Sample("hopper_alibi_d128", "a score, on Hopper: elements made of the logits",
           lambda: Attention(mask=causal(), score=alibi(torch.zeros(8))), target="sm90"),
    Sample("hopper_causal_d128", "roles, rings, warpgroups that take turns, the redo of a tile",
           _causal, target="sm90"),
    Sample("hopper_full_d64", "four warpgroups, both products in one group", lambda: Attention(),
           head_dim=64, target="sm90"),
    Sample("hopper_causal_d256", "an output that leaves in two halves", _causal, head_dim=256, target="sm90"),
    Sample("hopper_causal_d64_align8", "rows that the copy engine cannot read: threads copy them with cp.async",
           _causal, head_dim=64, alignment=8, target="sm90"),
    Sample("backward_causal_d128", "all gradients by one kernel, parts of dq added in memory", _causal,
           asked=Asked(frozenset("qkv"), dlse=False, same_bits=False)),
    Sample("backward_softcap_sink_d64", "two kernels, no atomics; through lse; gradients of a sink and of slopes",
           lambda: Attention(mask=causal(), score=[softcap(30.0), alibi(torch.zeros(8))], sink=torch.zeros(8)),
           head_dim=64, asked=Asked(frozenset(["q", "k", "v", "sink", "slopes"]), dlse=True)),
    Sample("hopper_backward_causal_d128", "gradients on Hopper: a role for the parts of dq, added in blocks", _causal,
           target="sm90", asked=Asked(frozenset("qkv"), dlse=False, same_bits=False)),
    Sample("hopper_backward_same_bits_d64", "two kernels without atomics, on Hopper: weights made in two maps", _causal,
           head_dim=64, target="sm90", asked=Asked(frozenset("qkv"), dlse=False)),
    Sample("causal_d64_align2", "rows that no 16-byte copy can read", _causal, head_dim=64, alignment=2),
)  # fmt: skip


def render(samples: tuple[Sample, ...] = SAMPLES) -> Mapping[str, str]:
    """Every file of the set by name, the manifest included; the README is written by people."""
    files: dict[str, str] = {}
    for sample in samples:
        files.update({f.name: f.text for f in kernel_files(sample.kernel(), sample.name)})
    entries: list[Json] = []
    for s in samples:
        own: dict[str, Json] = {n: sha256(text) for n, text in files.items() if n.split(".")[0] == s.name}
        entries.append({"name": s.name, "why": s.why, "sha256": own})
    return {**files, MANIFEST: dumps({"samples": entries})}


def write(directory: Path) -> tuple[Path, ...]:
    """Writes the set, and removes kernels that are no longer part of it."""
    directory.mkdir(parents=True, exist_ok=True)
    files = render()
    for path in directory.iterdir():
        if path.suffix in (".cu", ".schedule", ".json") and path.name not in files:
            path.unlink()
    for name, text in files.items():
        (directory / name).write_text(text, encoding="utf-8")
    return tuple(directory / name for name in files)


if __name__ == "__main__":
    for written in write(Path(sys.argv[1] if len(sys.argv) > 1 else "generated")):
        print(written)
