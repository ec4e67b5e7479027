"""What is measured on: device, versions, clocks, and the roof of its tensor cores."""

from __future__ import annotations

import platform
import shutil
import subprocess
import time
from importlib import import_module

import torch

from attngen import __version__
from attngen.errors import MissingToolError

TENSOR_FLOPS = {(8, 0): 2048, (9, 0): 4096}  # a cycle and SM, dense, 16-bit operands, by capability
MATMUL = 8192
_ASKED = {
    "sm_mhz": "clocks.sm", "sm_mhz_most": "clocks.max.sm", "memory_mhz": "clocks.mem", "watts": "power.draw",
    "watts_most": "power.limit", "celsius": "temperature.gpu", "driver": "driver_version",
}  # fmt: skip


def device() -> torch.device:
    if not torch.cuda.is_available():
        raise MissingToolError("attngen bench measures on a GPU, and torch finds none; `attngen doctor` says why")
    return torch.device("cuda", torch.cuda.current_device())


def capability(on: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(on)


def environment(on: torch.device) -> dict[str, str]:
    facts = torch.cuda.get_device_properties(on)
    return {
        "device": facts.name, "capability": f"{facts.major}.{facts.minor}", "sms": str(facts.multi_processor_count),
        "torch": torch.__version__, "cuda": str(torch.version.cuda), "cudnn": str(torch.backends.cudnn.version()),
        "triton": _version("triton"), "attngen": __version__, "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
    }  # fmt: skip


def _version(module: str) -> str:
    try:
        return str(import_module(module).__version__)
    except ImportError:
        return "none"


def clocks(on: torch.device) -> dict[str, str]:
    """What nvidia-smi says of the device now; where it is not there or does not answer, that."""
    if shutil.which("nvidia-smi") is None:
        return {"nvidia-smi": "not found"}
    uuid = f"GPU-{torch.cuda.get_device_properties(on).uuid}"
    query = f"--query-gpu={','.join(_ASKED.values())}"
    ask = ["nvidia-smi", "-i", uuid, query, "--format=csv,noheader,nounits"]
    done = subprocess.run(ask, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        return {"nvidia-smi": (done.stdout + done.stderr).strip()}
    return dict(zip(_ASKED, (part.strip() for part in done.stdout.strip().split(",")), strict=True))


def highest_clock(now: dict[str, str]) -> float | None:
    """In MHz; None where nvidia-smi does not say."""
    most = now.get("sm_mhz_most", "")
    return float(most) if most.replace(".", "").isdigit() else None


def sms(on: torch.device) -> int:
    return int(torch.cuda.get_device_properties(on).multi_processor_count)


def roof(on: torch.device, mhz: float | None) -> float | None:
    """TFLOP/s of all tensor cores at the highest clock, which no kernel holds; None for an unknown chip or clock."""
    flops = TENSOR_FLOPS.get(capability(on))
    return None if flops is None or mhz is None else flops * sms(on) * mhz * 1e6 / 1e12


def matmul(on: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Operands of the product that tells what this device reaches today."""
    a, b = (torch.randn(MATMUL, MATMUL, device=on, dtype=torch.bfloat16) for _ in range(2))
    return a, b


