"""Tensor maps: the driver's rules, and the two encodings."""

from __future__ import annotations

import struct
from dataclasses import replace

import pytest
import torch

from attngen.errors import SignatureError
from attngen.ir.schedule import Elem
from attngen.layout import Swizzle
from attngen.tensormap import BYTES, TensorMap, encode_driver, encode_emulator, map_of

RIGHT = TensorMap(Elem.BF16, (128, 1000, 8, 2), (2048, 256, 2048000), (64, 128, 1, 1), Swizzle.B128, 0x7F0000000000)
WRONG = {
    "no dimension": ({"dims": (), "strides_bytes": (), "box": ()}, "rank 0. Allowed: 1 to 5 dimensions"),
    "six dimensions": ({"dims": (8,) * 6, "strides_bytes": (16,) * 5, "box": (8,) * 6}, "rank 6"),
    "a box size too few": ({"box": (64, 128, 1)}, "3 box sizes. Allowed: 4"),
    "a stride too many": ({"strides_bytes": (2048, 256, 2048000, 16)}, "4 strides. Allowed: 3"),
    "pointer": ({"pointer": 0x7F0000000008}, "pointer 0x7f0000000008. Allowed: a multiple of 16"),
    "stride": ({"strides_bytes": (2048, 264, 2048000)}, r"strides .* multiples of 16 bytes below 2\^40"),
    "long stride": ({"strides_bytes": (2048, 2**40, 2048000)}, r"strides .* multiples of 16 bytes below 2\^40"),
    "negative stride": ({"strides_bytes": (-2048, 256, 2048000)}, "strides"),
    "empty dimension": ({"dims": (128, 0, 8, 2)}, r"dims .* Allowed: 1 to 2\^32 each"),
    "long dimension": ({"dims": (128, 2**32 + 1, 8, 2)}, "dims"),
    "empty box": ({"box": (64, 0, 1, 1)}, "box .* Allowed: 1 to 256 each"),
    "long box": ({"box": (64, 257, 1, 1)}, "box"),
    "box wider than the swizzle": (
        {"box": (72, 128, 1, 1)},
        "an inner box of 144 bytes. Allowed: at most the swizzle's 128",
    ),
    "box of 64 bytes' swizzle": (
        {"swizzle": Swizzle.B64},
        "an inner box of 128 bytes. Allowed: at most the swizzle's 64",
    ),
    "box of 12 bytes": ({"box": (6, 128, 1, 1)}, "an inner box of 12 bytes. Allowed: a multiple of 16"),
    "generic swizzle": ({"swizzle": Swizzle.XOR}, "swizzle xor. Allowed: b128, b64, b32, linear"),
}


@pytest.mark.parametrize("case", WRONG)
def test_rules(case: str) -> None:
    changes, message = WRONG[case]
    with pytest.raises(SignatureError, match=f"tensor map: .*{message}"):
        replace(RIGHT, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "changes",
    [
        {"dims": (2**32, 1000, 8, 2)},
        {"strides_bytes": (0, 16, 2**40 - 16)},
        {"box": (64, 256, 1, 1)},
        {"swizzle": Swizzle.LINEAR, "box": (256, 128, 1, 1)},
        {"elem": Elem.F32, "box": (32, 8, 1, 1)},
        {"dims": (8,), "strides_bytes": (), "box": (8,)},
    ],
)
def test_limits_are_allowed(changes: dict[str, object]) -> None:
    replace(RIGHT, **changes)  # type: ignore[arg-type]


def test_map_of_a_tensor() -> None:
    """[batch, heads, seq, head_dim] of any strides, innermost first; where a size is 1 the stride may be odd."""
    made = map_of(Elem.F16, 4096, (2, 8, 1000, 128), (1024000, 128, 1024, 1), 128, 64, Swizzle.B128)
    assert made == replace(RIGHT, elem=Elem.F16, pointer=4096)
    one = map_of(Elem.BF16, 4096, (1, 1, 1, 64), (3, 5, 7, 1), 128, 64, Swizzle.B128)
    assert one.dims == (64, 1, 1, 1) and one.strides_bytes == (16, 16, 16)


def test_emulator_encoding() -> None:
    encoded = encode_emulator(RIGHT)
    assert len(encoded) == BYTES
    head = struct.unpack_from("<Qiii4s", encoded)
    assert head == (0x7F0000000000, 4, 2, 128, b"TMAP")
    rest = struct.unpack_from("<5Q4Q5I", encoded, 24)
    assert rest == (128, 1000, 8, 2, 1, 2048, 256, 2048000, 0, 64, 128, 1, 1, 1)
    assert struct.unpack_from("<i", encode_emulator(replace(RIGHT, swizzle=Swizzle.LINEAR)), 16) == (0,)


@pytest.mark.gpu
@pytest.mark.parametrize("elem", [Elem.BF16, Elem.F16, Elem.F32])
@pytest.mark.parametrize("swizzle", [Swizzle.B128, Swizzle.B64, Swizzle.B32, Swizzle.LINEAR])
def test_gpu_driver_encoding(swizzle: Swizzle, elem: Elem) -> None:
    """The driver takes what the rules take, and tells maps apart."""
    data = torch.zeros(2, 8, 1000, 128, dtype=torch.float32, device="cuda")
    described = replace(RIGHT, elem=elem, swizzle=swizzle, box=(8, 128, 1, 1), pointer=data.data_ptr())
    encoded = encode_driver(described, 0)
    assert len(encoded) == BYTES
    assert encoded != encode_driver(replace(described, box=(8, 64, 1, 1)), 0)
