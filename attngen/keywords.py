"""Keywords of other attention functions, and what they are here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from attngen.errors import SpecError

_CAUSAL = "mask=attngen.causal(), where the last query sees the last key (align='top_left': the first the first alone)"
_COMPILE = "attngen.compile(spec, config=...), whose kernel is called as attention is; or autotune=True"
HINTS: Mapping[str, str] = {
    "is_causal": _CAUSAL,
    "causal": _CAUSAL,
    "attn_mask": "mask=, a function of (b, h, i, j); for a tensor of numbers score=attngen.bias(tensor)",
    "attn_bias": "score=attngen.bias(tensor)",
    "mask_mod": "mask=",
    "block_mask": "mask=, which needs no list of blocks",
    "score_mod": "score=",
    "alibi_slopes": "score=attngen.alibi(slopes)",
    "softcap": "score=attngen.softcap(cap)",
    "window_size": "mask=attngen.window(left, right)",
    "sinks": "sink=",
    "softmax_scale": "scale=",
    "dropout_p": "nothing: dropout is not supported",
    "enable_gqa": "nothing: k and v may have fewer heads than q",
    "dtype": "nothing: the type is that of q, k and v",
    "deterministic": "torch.use_deterministic_algorithms(True)",
    "config": _COMPILE,
    "head_dim": "nothing: the head dims are those of q and v",
}


def reject(given: Iterable[str], allowed: str) -> None:
    """Raises SpecError for keywords that `attention` does not have."""
    for name in given:
        hint = f" Write {HINTS[name]}." if name in HINTS else ""
        raise SpecError(f"attention has no argument {name!r}.{hint} Allowed: {allowed}")
