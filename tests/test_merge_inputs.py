"""What `merge` refuses and resolves, and that a used description can be copied."""

import copy
import pickle
from typing import Any

import pytest
import torch

import attngen
from attngen.errors import GradientError, SignatureError


def part(head_dim: int = 8, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.ones(1, 1, 3, head_dim, **options), torch.zeros(1, 1, 3, **options)


def test_merge_rejects_gradients() -> None:
    out, lse = part()
    wants = lse.clone().requires_grad_()
    with pytest.raises(GradientError, match="`lse_2` requires a gradient"):
        attngen.merge(out, lse, out, wants)


def test_merge_resolves_negation() -> None:
    out, lse = part()
    merged, _ = attngen.merge(torch._neg_view(out), lse, torch._neg_view(out), lse)
    torch.testing.assert_close(merged, -out)


def test_merge_of_an_empty_part_ignores_what_it_holds() -> None:
    """An empty part may come from memory that nobody wrote."""
    out, lse = part()
    merged, merged_lse = attngen.merge(torch.full_like(out, torch.nan), torch.full_like(lse, -torch.inf), out, lse)
    torch.testing.assert_close(merged, out)
    torch.testing.assert_close(merged_lse, lse)


def test_merge_head_dim_0() -> None:
    out, lse = part(head_dim=0)
    torch.testing.assert_close(attngen.merge(out, lse, out, lse)[1], torch.full_like(lse, 2.0).log())


def test_merge_refuses_what_it_cannot_read() -> None:
    out, lse = part()
    with pytest.raises(SignatureError, match="lse_1 is a float"):
        attngen.merge(out, 1.0, out, lse)  # type: ignore[arg-type]
    with pytest.raises(SignatureError, match="on meta"):
        attngen.merge(*part(device="meta"), *part(device="meta"))


def test_traced_description_can_be_copied() -> None:
    spec = attngen.Attention(mask=attngen.causal(), score=attngen.softcap(3.0))
    assert spec.variant is not None
    for other in (copy.deepcopy(spec), pickle.loads(pickle.dumps(spec))):
        assert not other.is_traced and other.variant == spec.variant
