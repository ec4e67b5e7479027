"""Names that a kernel can use, the user's names of values, and places in the user's source."""

from __future__ import annotations

import inspect
import linecache
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch

from attngen.errors import Location

_WORDS = (
    "b h i j n m t p q k v r l s x o d out lse sink scale score seqlen_q seqlen_k stride grid tid warp lane "
    "tile exp exp2 log log2 tanh sigmoid sqrt floor abs min max where rcp fma f32 i32 inf nan true false "
    "alignas alignof and asm auto bool break case catch char class const constexpr continue default delete "
    "do double else enum explicit export extern float for friend goto if inline int long mutable namespace "
    "new not operator or private protected public register return short signed sizeof static struct switch "
    "template this throw try typedef typeid typename union unsigned using virtual void volatile while xor "
    "half blockIdx threadIdx blockDim gridDim "
    "and_eq bitand bitor char8_t char16_t char32_t compl concept consteval constinit const_cast co_await co_return "
    "co_yield decltype dynamic_cast noexcept not_eq nullptr or_eq reinterpret_cast requires static_assert static_cast "
    "thread_local typename wchar_t xor_eq "
    "u8 u16 u32 u64 i64 DI INF "
    "batch heads group work rounds ctas elements visit classes by_length rank masked count "
    "dout dlse dot delta dq dk dv hkv kv_heads n_tiles row own_lo own_hi g u c before full "
    "visit_keys classes_keys factor factor1 m_lo m_hi j_lo j_hi seen_lo end2 "
    "i_f j_f i_lo i_hi n_lo n_hi m_tiles end0 end1 seen_hi first some top full_lo full_hi "
    "a e y w key item items own mine need hot inv prev last middle front above below begin end run rows section "
    "visible blocks bytes cls done from to other now low upper odd own_row packed pair pairs pass phase round step "
    "swap slab smem slot any at br ci cj ei ri kk mi nj fa fb it jt uniform hold popc trap cta_id cta_sync "
    "thread_id is_masked grid_size smem_base visit_table deal_items sort_items padded tc l_t bh quad LINE"
)
RESERVED = frozenset(_WORDS.split())  # names that the text of a kernel gives a meaning to
_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# rS, sQ, rdP, dS, K, ... are the kernel's own values; the others are names that C++ reserves
_KERNEL_NAME = re.compile(r"[rs]d?[A-Z]|d?(?:Q|K|V|S|P|O|Out)$|__|_[A-Z]")
# strides, sizes and tensor maps among a kernel's parameters; its numbered values; gradients of captured tensors
_NUMBERED = re.compile(
    r"\w+_(?:[sn]\d+|map)|[uvij]\d+(?:_f)?|[ugcmnh]_(?:next|\d+)|d_\w+|(?:slot|last|next|[ij]t|row|packed|[srx])\d+(?:_f)?"
)
# values that passes name after others, and the functions of a kernel
_DERIVED = re.compile(
    r"\w+_(?:rows|sum|at|of|bh|hi|lo|log2|approx|[fsu](?:8|16|32))|[a-z]{1,2}_(?:f|old|ref|new|now|end|lane)"
    r"|(?:attn|bulk|cp_async|fence|ld|ldmatrix|mbarrier|mma|named|pack|red|shfl|st|stmatrix|tma|unpack|warp|wgmma)_\w+"
)


def c_name(name: str, suffix: str) -> str | None:
    """`name`, made different by `suffix` where a kernel could not use it; None when it is no C identifier."""
    if not _IDENTIFIER.fullmatch(name):
        return None
    if name in RESERVED or _KERNEL_NAME.match(name) or any(p.fullmatch(name) for p in (_NUMBERED, _DERIVED)):
        bare = name.lstrip("_")
        name = f"n{bare}{suffix}" if bare[:1].isdigit() else bare + suffix
        return name + suffix if name in RESERVED else name
    return name


def unique(name: str, taken: set[str]) -> str:
    """`name`, or `name_1`, `name_2`, ...; the result is added to `taken`."""
    found, n = name, 0
    while found in taken:
        n += 1
        found = f"{name.rstrip('_')}_{n}"
    taken.add(found)
    return found


def location(file: str, line: int) -> Location:
    return Location(file, line, linecache.getline(file, line).strip())


def defined_at(fn: object) -> Location | None:
    """Where a callable was written, when it has Python code."""
    fn = getattr(fn, "func", fn)  # functools.partial
    method = inspect.getattr_static(type(fn), "__call__", None)
    code = getattr(fn, "__code__", None) or getattr(method, "__code__", None)
    return location(code.co_filename, code.co_firstlineno) if code else None


def members(scope: list[tuple[str, object]], depth: int) -> Iterator[tuple[str, object]]:
    """The named values, then their attributes and items, nearest first."""
    yield from scope
    if depth and scope:
        inner: list[tuple[str, object]] = []
        for name, value in scope:
            if isinstance(value, (list, tuple)):
                inner += [(name, v) for v in value]
            elif isinstance(value, dict):
                inner += [(k if isinstance(k, str) else name, v) for k, v in list(value.items())[:256]]
            elif not isinstance(value, (type, torch.Tensor)) and not inspect.ismodule(value):
                inner += getattr(value, "__dict__", {}).items()
        yield from members(inner, depth - 1)


def callable_name(fn: Callable[..., Any]) -> str:
    """What a callable is called in descriptions."""
    fn = getattr(fn, "func", fn)  # functools.partial
    name: str = getattr(fn, "__name__", type(fn).__name__)
    return "lambda" if name == "<lambda>" else name


LONGEST_INT = 128  # bits; more digits say nothing, and Python refuses to print some thousand


def shown(value: object) -> str:
    """A value in an error message."""
    if isinstance(value, torch.Tensor):
        return f"a {value.dtype} tensor of shape {list(value.shape)}"
    if isinstance(value, int) and value.bit_length() > LONGEST_INT:
        return f"an int of {value.bit_length()} bits"
    return f"{value!r:.60} ({type(value).__name__})"
