"""Signatures, and the checks of the tensors of a call."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from attngen.errors import SignatureError
from attngen.signature import IoType, Shapes, Signature, check_tensors, signature_for, signature_of
from attngen.spec import Attention
from attngen.variants import alibi, bias, document, prefix_lm


def make(
    b: int = 2,
    hq: int = 4,
    hkv: int = 2,
    sq: int = 5,
    sk: int = 7,
    d: int = 64,
    dv: int = 64,
    dtype: torch.dtype = torch.bfloat16,
) -> tuple[Tensor, Tensor, Tensor]:
    shapes = (b, hq, sq, d), (b, hkv, sk, d), (b, hkv, sk, dv)
    q, k, v = (torch.zeros(s, dtype=dtype) for s in shapes)
    return q, k, v


def test_signature_of_a_call() -> None:
    assert signature_of(*make()) == Signature(IoType.BF16, 64, 64, 16)
    assert signature_of(*make(d=192, dv=128, dtype=torch.float16)) == Signature(IoType.FP16, 192, 128, 16)
    assert IoType.FP16.torch_dtype is torch.float16
    assert IoType.BF16.c_name == "bf16"


def test_alignment_looks_at_addresses_and_used_strides() -> None:
    q, k, v = make()
    odd = torch.zeros(q.numel() + 1, dtype=q.dtype)[1:].view(q.shape)
    assert signature_of(odd, k, v).alignment == 2
    wide = torch.zeros(2, 2, 7, 65, dtype=q.dtype)[..., :64]
    assert signature_of(q, wide, v).alignment == 2
    for elements, alignment in ((2, 4), (4, 8), (6, 4), (8, 16)):
        wide = torch.zeros(2, 2, 7, 64 + elements, dtype=q.dtype)[..., :64]
        assert signature_of(q, wide, v).alignment == alignment
        late = torch.zeros(q.numel() + elements, dtype=q.dtype)[elements:].view(q.shape)
        assert signature_of(late, k, v).alignment == alignment
    wide = torch.zeros(2, 2, 7, 65, dtype=q.dtype)[..., :64]
    assert signature_of(q, wide[:, :, :1], v).alignment == 2  # the strides of batch and head are odd too
    assert signature_of(q, wide[:1, :1, :1], v).alignment == 16
    assert signature_of(q, k[:, :, :1].expand(k.shape), v).alignment == 16


@pytest.mark.parametrize(
    ("dims", "words"),
    [
        ((13, 64), r"head_dim_qk=13.*multiples of 2 from 2 to 256.*to 14 and give scale=1/sqrt\(13\)"),
        ((264, 64), "head_dim_qk=264.*Split"),
        ((64, 0), "head_dim_v=0"),
        ((64, 21), "Pad v with zeros to 22"),
    ],
)
def test_head_dims(dims: tuple[int, int], words: str) -> None:
    with pytest.raises(SignatureError, match=words):
        Signature(IoType.BF16, *dims)


def test_alignment_values() -> None:
    with pytest.raises(SignatureError, match=r"alignment=32 is not supported\. Allowed: 2, 4, 8, 16"):
        Signature(IoType.BF16, 64, 64, 32)


@pytest.mark.parametrize(("dims", "most"), [((64, 64), 16), ((36, 64), 8), ((64, 20), 8), ((34, 64), 4), ((8, 8), 16)])
def test_rows_are_whole_units_of_their_alignment(dims: tuple[int, int], most: int) -> None:
    """A row of 36 elements may start on 16 bytes and is copied 8 at once."""
    assert signature_for(IoType.BF16, *dims) == Signature(IoType.BF16, *dims, most)
    if most < 16:
        with pytest.raises(SignatureError, match=rf"alignment={2 * most} .*rows of {dims[0]} and {dims[1]} elements"):
            Signature(IoType.BF16, *dims, 2 * most)
    q, k, v = torch.zeros(1, 2, 5, dims[0]), torch.zeros(1, 2, 5, dims[0]), torch.zeros(1, 2, 5, dims[1])
    assert signature_of(*(t.bfloat16() for t in (q, k, v))).alignment == most


def test_shapes() -> None:
    assert check_tensors(*make(), Attention()) == Shapes(2, 4, 2, 5, 7)
    assert check_tensors(*make(hq=7, hkv=1), Attention()) == Shapes(2, 7, 1, 5, 7)
    for empty in (make(b=0), make(sq=0), make(sk=0), make(hq=0, hkv=0)):
        check_tensors(*empty, Attention())
    q, k, v = make()
    check_tensors(
        q[:1, :1, :1].expand(q.shape), k.transpose(1, 2).contiguous().transpose(1, 2), v, Attention()
    )


def wrong(**changes: Any) -> tuple[Tensor, Tensor, Tensor]:
    tensors = dict(zip("qkv", make(), strict=True))
    for name, change in changes.items():
        tensors[name] = change(tensors[name])
    return tensors["q"], tensors["k"], tensors["v"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"q": lambda t: t[0]}, "4 dimensions"),
        ({"q": lambda t: t.float()}, "float16, bfloat16"),
        ({"k": lambda t: t.half()}, "k has dtype torch.float16, q has torch.bfloat16"),
        ({"v": lambda t: t.to("meta")}, "v has device meta"),
        ({"v": lambda t: t[:1]}, "v has batch 1"),
        ({"k": lambda t: t[..., :32]}, "k has head_dim 32"),
        ({"v": lambda t: t[:, :1]}, "v has 1 heads"),
        ({"v": lambda t: t[:, :, :3]}, "v has 3 keys"),
        ({"q": lambda t: t[:, :3]}, "divides"),
        ({"q": lambda t: torch.cat([t, t], 3)[..., ::2]}, r"q has stride 2.*q.contiguous\(\)"),
    ],
)
def test_wrong_tensors(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(SignatureError, match=words):
        check_tensors(*wrong(**changes), Attention())


def test_captured_tensors_are_checked() -> None:
    q, k, v = make()

    def check(**spec: Any) -> None:
        check_tensors(q, k, v, Attention(**spec))

    ids = torch.zeros(2, 7, dtype=torch.int32)
    check(score=bias(torch.zeros(1, 4, 5, 1)))
    check(mask=document(ids[:, :5], ids), sink=torch.zeros(4))
    with pytest.raises(
        SignatureError, match=r"`bias` has the shape \[2, 4, 5, 5\].*B=2, Hq=4, Sq=5, Sk=7.*broadcast"
    ):
        check(score=bias(torch.zeros(2, 4, 5, 5)))
    with pytest.raises(SignatureError, match=r"`slopes`.*Hq=4"):
        check(score=alibi(torch.zeros(2)))
    with pytest.raises(SignatureError, match=r"`doc_ids`.*document\(q_ids, k_ids\)"):
        check(mask=document(ids))
    with pytest.raises(SignatureError, match=r"`prefix`.*B=2"):
        check(mask=prefix_lm(torch.zeros(3, dtype=torch.int64)))
    with pytest.raises(SignatureError, match=r"sink has the shape \[3\]"):
        check(sink=torch.zeros(3))


def test_a_captured_tensor_on_another_device_is_named_with_the_line() -> None:
    table = torch.zeros(4, device="meta")
    with pytest.raises(SignatureError, match=r"`table` is on meta, q is on cpu(.|\n)*test_signature.py"):
        check_tensors(*make(), Attention(score=lambda s, b, h, i, j: s + table[h]))
