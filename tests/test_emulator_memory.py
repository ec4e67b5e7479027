"""What a launch in the emulator leaves behind."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from cases import CASES, Sizes
from support import poisoned, qkv, run

MAPS = Path("/proc/self/maps")


@pytest.mark.skipif(not MAPS.exists(), reason="this system does not list a process's mappings in /proc/self/maps")
def test_stacks_are_given_back() -> None:
    """A body keeps no mapping for its threads: a test run loads more bodies than the system has mappings for."""
    q, k, v = qkv(sq=33, sk=33)
    run(CASES["full"](Sizes(1, 2, 33, 33))[0], q, k, v)
    before = len(MAPS.read_text().splitlines())
    for name in ("causal", "sink", "bias"):
        run(CASES[name](Sizes(1, 2, 33, 33))[0], q, k, v)
    assert len(MAPS.read_text().splitlines()) - before < 100  # of 3 x 128 stacks, two each


def test_poison() -> None:
    """The tests' claim that unwritten outputs show."""
    with poisoned():
        assert torch.empty(1000).isnan().all()
        assert torch.zeros(2, 2, dtype=torch.bfloat16).new_empty_strided((2, 5, 7), (35, 7, 1)).isnan().all()
