"""What the machine model says of a case: TFLOP/s at the highest clock, if all SMs had equal work."""

from __future__ import annotations

import torch

from attngen.bench.cases import Inputs
from attngen.evaluate import evaluate
from attngen.execute import target_for
from attngen.kernel import Kernel, kernel_for
from attngen.model import estimate
from attngen.passes.ranges import VisitSource, ranges
from attngen.signature import signature_of
from attngen.target import SM80, SM90, Target

MEASURED = {SM80.name: (8, 0), SM90.name: (9, 0)}  # the chip whose rates the model has for a target


def predicted(
    inputs: Inputs, target: Target | None, capability: tuple[int, int], sms: int, mhz: float
) -> float | None:
    """None where the model has no rates for this chip, or only the device knows which tiles are visited."""
    signature = signature_of(inputs.q, inputs.k, inputs.v, inputs.spec.tensors)
    target = target or target_for(inputs.spec.variant, signature, inputs.q.device)
    if MEASURED[target.name] != capability:
        return None
    kernel = kernel_for(inputs.spec.variant, signature, target)
    tiles = visited(kernel, inputs)
    if tiles is None:
        return None
    found = estimate(kernel.schedule.kernels[-1], target)
    heads = inputs.case.batch * inputs.case.heads
    cycles = heads * (len(tiles) * found.item + float(tiles.sum()) * found.step) / sms
    return inputs.operations / (cycles / mhz) / 1e6


def visited(kernel: Kernel, inputs: Inputs) -> torch.Tensor | None:
    """Tiles of keys of each tile of queries of a head, by the closed forms."""
    case, config = inputs.case, kernel.config
    visit = ranges(inputs.spec.variant.mask, config.block_n)
    if visit.source is not VisitSource.CLOSED:
        return None
    first = torch.arange(0, case.seqlen_q, config.block_m, device=inputs.q.device)
    last = (first + config.block_m).clamp(max=case.seqlen_q) - 1
    env: dict[str, torch.Tensor | int] = {
        "i_lo": first, "i_hi": last, "seqlen_q": case.seqlen_q, "seqlen_k": case.seqlen_k, "b": 0, "h": 0,
    }  # fmt: skip
    hi, lo = (evaluate(e, env, inputs.spec.tensors) for e in (visit.hi, visit.lo))
    return (hi - lo).expand(first.shape)
