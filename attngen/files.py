"""The files that a kernel is written as: its CUDA text, its schedule, and a manifest of what a launcher needs to know.

No date, path or address: equal descriptions give equal bytes."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from attngen import __version__
from attngen.config import written
from attngen.ir.schedule import Kernel as ScheduledKernel
from attngen.kernel import Kernel
from attngen.params import Kind, fields, packer
from attngen.runtime.compile import flags_for
from attngen.spec import Variant

if TYPE_CHECKING:
    from attngen.gradient import BackwardKernel

Json = str | int | bool | None | list["Json"] | dict[str, "Json"]


@dataclass(frozen=True)
class File:
    name: str
    text: str


def default_name(kernel: Kernel) -> str:
    """A file name from the description: `causal_sliding_window_256_d128_bf16_sm80`."""
    s = kernel.signature
    dims = f"d{s.head_dim_qk}" + (f"v{s.head_dim_v}" if s.head_dim_v != s.head_dim_qk else "")
    aligned = "" if s.alignment == 16 else f" align{s.alignment}"
    what = kernel.variant.description.replace("~", " not ").replace("|", " or ")
    text = f"{what} {dims} {s.dtype.value}{aligned} {kernel.target.name}"
    return re.sub(r"\W+", "_", text).strip("_")


def kernel_files(kernel: Kernel | BackwardKernel, name: str) -> tuple[File, ...]:
    """NAME.cu, NAME.schedule and NAME.json."""
    schedule = kernel.schedule.print()
    return (
        File(f"{name}.cu", kernel.source.text),
        File(f"{name}.schedule", schedule),
        File(f"{name}.json", dumps(manifest(kernel, name))),
    )


def dumps(value: Json) -> str:
    return json.dumps(value, indent=1) + "\n"


def sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def manifest(kernel: Kernel | BackwardKernel, name: str) -> Json:
    return {
        "name": name,
        "generator": f"attngen {__version__}",
        "target": kernel.target.name,
        "variant": _variant(kernel.variant),
        "signature": {**asdict(kernel.signature), "dtype": kernel.signature.dtype.value},
        **_shape(kernel),
        "compile": {arch: list(flags_for(arch)) for arch in kernel.target.archs},
        "kernels": [_kernel(k) for k in kernel.schedule.kernels],
        "workspaces": [
            {"name": w.name, "elem": w.elem.value, "shape": [str(e) for e in w.shape]}
            for w in kernel.schedule.workspaces
        ],
        "source_sha256": sha256(kernel.source.text),
        "schedule_sha256": sha256(kernel.schedule.print()),
    }


def _shape(kernel: Kernel | BackwardKernel) -> dict[str, Json]:
    """The tile shape; of a derivative, what is asked for and the tile shapes of its kernels."""
    if isinstance(kernel, Kernel):
        return {"config": written(kernel.config)}
    wanted: list[Json] = [*sorted(kernel.asked.wanted)]
    asked: Json = {"wanted": wanted, "dlse": kernel.asked.dlse, "same_bits": kernel.asked.same_bits}
    return {"asked": asked, "configs": {name: written(config) for name, config in kernel.levels.configs}}


def _variant(variant: Variant) -> Json:
    return {
        "description": variant.description,
        "key": variant.variant_key(),
        "score": str(variant.score),
        "mask": str(variant.mask),
        "normalizer": variant.normalizer.value,
        "sink": variant.sink.value if variant.sink else None,
        "scale_positive": variant.scale_positive,
        "captures": [{"name": c.name, "storage": c.storage.value, "rank": c.rank} for c in variant.captures],
        "constants": dict(variant.constants),
    }


def _kernel(kernel: ScheduledKernel) -> Json:
    params: list[Json] = []
    offset = 0
    for f in fields(kernel):
        size = 8 if f.kind in (Kind.POINTER, Kind.STRIDE) else 4
        params.append({"offset": offset, "bytes": size, "declaration": f.declaration})
        offset += size
    work = kernel.work
    return {
        "symbol": kernel.name,
        "threads": kernel.threads,
        "min_ctas": kernel.min_ctas,
        "dynamic_smem_bytes": kernel.smem_bytes,
        "work": {
            "source": work.source.value,
            "order": work.order.value,
            "rows": work.block_m,
            "per_batch": work.per_batch,
            "per_head": work.per_head,
        },
        "params_bytes": packer(kernel)[0].size,
        "params": params,
    }
