"""The values a user's score or mask function sees while it is traced, and the functions it may call on them.

A `Scalar` stands for one element; a `Slice` for a captured tensor that has got some of its indices.
Operators and torch functions on them build `Expr` nodes. What cannot be traced raises `TraceError` with the
user's line and what to write instead."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from attngen.expr import DType, Expr, Op, const, make, to_bool, to_f32, to_i32

if TYPE_CHECKING:
    from attngen.trace import Tracer

_TRUTH = (
    "Python asks for the truth value of a traced value (`if`, `and`, `or`, `not`, `in`, `min()`, `max()` or "
    "a chained comparison). Write `&`, `|`, `~` with parentheses, `where(cond, x, y)`, `minimum(x, y)`; for "
    "`0 <= x < 5` write `(0 <= x) & (x < 5)`"
)
_NUMBER = (
    "a traced value has no number while it is traced, so `{what}` cannot be used on it. Write "
    "`attngen.exp`, `log`, `sqrt`, ... instead of the `math` module, `x.float()` or `x.int()` instead of "
    "`float(x)` or `int(x)`"
)
_NUMPY = (
    "`numpy.{name}` is called on a traced value, which has no number yet. Write the function of torch or attngen: "
    "`torch.tanh(x)`, `torch.where(cond, x, y)`, `attngen.exp(x)`; a numpy array that is read has to be a tensor"
)
_NUMPY_OPERATORS = {
    "add": "add", "subtract": "sub", "multiply": "mul", "divide": "truediv", "true_divide": "truediv",
    "floor_divide": "floordiv", "remainder": "mod", "less": "lt", "less_equal": "le", "greater": "gt",
    "greater_equal": "ge", "equal": "eq", "not_equal": "ne", "bitwise_and": "and", "bitwise_or": "or", "power": "pow",
}  # fmt: skip
_SWAPPED = {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le", "eq": "eq", "ne": "ne"}
_TORCH_DTYPES = {DType.F32: torch.float32, DType.I32: torch.int64, DType.BOOL: torch.bool}


def _operator(op: Op, swapped: bool = False) -> Callable[[Proxy, object], Scalar]:
    def method(self: Proxy, other: object) -> Scalar:
        a, b = self._value(), self._tracer.lift(other)
        return self._tracer.emit(op, b, a) if swapped else self._tracer.emit(op, a, b)

    return method


def _forward(name: str, swapped: bool = False) -> Callable[..., Scalar]:
    def method(self: Proxy, *other: object) -> Scalar:
        return apply(self._tracer, name, (*other, self) if swapped else (self, *other), {})

    return method


class Proxy:
    """Base of the traced values: the operators, and clear errors for what has no meaning on them."""

    __slots__ = ("_tracer",)
    _tracer: Tracer

    def _value(self) -> Expr:
        raise NotImplementedError

    __add__, __radd__ = _operator(Op.ADD), _operator(Op.ADD, True)
    __sub__, __rsub__ = _operator(Op.SUB), _operator(Op.SUB, True)
    __mul__, __rmul__ = _operator(Op.MUL), _operator(Op.MUL, True)
    __truediv__, __rtruediv__ = _operator(Op.DIV), _operator(Op.DIV, True)
    __floordiv__, __rfloordiv__ = _operator(Op.FLOORDIV), _operator(Op.FLOORDIV, True)
    __mod__, __rmod__ = _operator(Op.MOD), _operator(Op.MOD, True)
    __lt__, __le__ = _operator(Op.LT), _operator(Op.LE)
    __gt__, __ge__ = _operator(Op.GT), _operator(Op.GE)
    __eq__ = _operator(Op.EQ)  # type: ignore[assignment]
    __ne__ = _operator(Op.NE)  # type: ignore[assignment]
    __and__, __rand__ = _forward("bitwise_and"), _forward("bitwise_and", True)
    __or__, __ror__ = _forward("bitwise_or"), _forward("bitwise_or", True)
    __xor__, __rxor__ = _forward("bitwise_xor"), _forward("bitwise_xor", True)
    __pow__, __rpow__ = _forward("pow"), _forward("pow", True)
    __neg__, __abs__, __invert__ = _forward("neg"), _forward("abs"), _forward("bitwise_not")

    def __pos__(self) -> Proxy:
        return self

    def __bool__(self) -> bool:
        raise self._tracer.error(_TRUTH)

    def __float__(self) -> float:
        raise self._tracer.error(_NUMBER.format(what="float()"))

    def __int__(self) -> int:
        raise self._tracer.error(_NUMBER.format(what="int()"))

    def __index__(self) -> int:
        raise self._tracer.error(
            "a traced value is used as the index of a Python list, tuple or range, or as a slice bound. Put "
            "the values into a tensor and index that: `table = torch.tensor(values)`, then `table[i]`"
        )

    def __hash__(self) -> int:
        raise self._tracer.error(
            "a traced value is used as a dictionary key or set member. Index a tensor instead"
        )

    def __len__(self) -> int:
        raise self._tracer.error(
            "a traced value stands for one element and has no length. Use `seqlen_q` or `seqlen_k`"
        )

    def __iter__(self) -> Iterator[Proxy]:
        raise self._tracer.error(
            "a traced value stands for one element and cannot be iterated over or unpacked"
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # protocols that Python or a library probes for
            raise AttributeError(name)
        if name not in SUPPORTED:
            raise self._tracer.error(
                f"`.{name}` is not supported on a traced value. Supported: {_supported()}"
            )
        return lambda *args, **kwargs: apply(self._tracer, name, (self, *args), kwargs)

    def __array_ufunc__(self, function: Any, method: str, *given: Any, **how: object) -> Scalar:
        """numpy's operators are those of this class; its functions compute numbers, which there are none of yet."""
        name = _NUMPY_OPERATORS.get(function.__name__)
        if name is None or method != "__call__" or how or len(given) != 2:
            raise self._tracer.error(_NUMPY.format(name=function.__name__))
        one, two = given
        if isinstance(one, Proxy):
            return getattr(one, f"__{name}__")(two)  # type: ignore[no-any-return]
        return getattr(two, f"__{_SWAPPED.get(name, 'r' + name)}__")(one)  # type: ignore[no-any-return]

    def __array_function__(self, function: Any, *_: object) -> NoReturn:
        raise self._tracer.error(_NUMPY.format(name=function.__name__))

    def __array__(self, *_: object, **how: object) -> NoReturn:
        raise self._tracer.error(_NUMPY.format(name="array"))

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> Proxy:
        kwargs = kwargs or {}
        tracer = find_tracer((*args, *kwargs.values()))
        assert tracer is not None  # torch calls this only when one of the arguments is a proxy
        name = getattr(func, "__name__", str(func)).split(".")[0]
        if name == "__getitem__":
            tensor, index = args
            if isinstance(tensor, torch.Tensor):
                return tracer.index(tensor, (), index)
        return apply(tracer, name, args, kwargs)


class Scalar(Proxy):
    """One traced element."""

    __slots__ = ("expr",)

    def __init__(self, tracer: Tracer, expr: Expr) -> None:
        self._tracer, self.expr = tracer, expr

    def _value(self) -> Expr:
        return self.expr

    @property
    def dtype(self) -> torch.dtype:
        """The torch type users convert to, as in `x.to(score.dtype)`."""
        return _TORCH_DTYPES[self.expr.dtype]

    def __getitem__(self, index: object) -> NoReturn:
        raise self._tracer.error(
            f"`{self.expr!r}` stands for one element and cannot be indexed (too many indices?)"
        )

    def __repr__(self) -> str:
        return f"<traced {self.expr!r}>"


class Slice(Proxy):
    """A captured tensor with fewer indices than its rank, as in `table[h]` of `table[h][i]`."""

    __slots__ = ("index", "tensor")

    def __init__(self, tracer: Tracer, tensor: torch.Tensor, index: tuple[Expr, ...]) -> None:
        self._tracer, self.tensor, self.index = tracer, tensor, index

    def __getitem__(self, index: object) -> Proxy:
        return self._tracer.index(self.tensor, self.index, index)

    def _value(self) -> NoReturn:
        raise self._tracer.error(
            f"a captured tensor of rank {self.tensor.dim()} has only {len(self.index)} of its indices here. "
            f"A score or mask function computes one element: give all {self.tensor.dim()} indices"
        )

    def __repr__(self) -> str:
        return f"<traced tensor of rank {self.tensor.dim()} with {len(self.index)} indices>"


def find_tracer(values: tuple[object, ...] | list[object]) -> Tracer | None:
    """The tracer of the first proxy among `values` or in a tuple or list of them."""
    for v in values:
        if isinstance(v, Proxy):
            return v._tracer
        if isinstance(v, (tuple, list)) and (found := find_tracer(v)):
            return found
    return None


# ---- torch functions and methods, by name ------------------------------------------------------------------

_UNARY = {
    **{"neg": Op.NEG, "negative": Op.NEG, "abs": Op.ABS, "absolute": Op.ABS, "exp": Op.EXP, "exp2": Op.EXP2},
    **{"special_exp2": Op.EXP2, "log": Op.LOG, "log2": Op.LOG2, "tanh": Op.TANH, "sigmoid": Op.SIGMOID},
    **{"special_expit": Op.SIGMOID, "sqrt": Op.SQRT},
}
_BINARY = {
    **{"add": Op.ADD, "sub": Op.SUB, "subtract": Op.SUB, "mul": Op.MUL, "multiply": Op.MUL, "div": Op.DIV},
    **{"divide": Op.DIV, "true_divide": Op.DIV, "floor_divide": Op.FLOORDIV, "__floordiv__": Op.FLOORDIV},
    **{"remainder": Op.MOD, "minimum": Op.MIN, "maximum": Op.MAX, "min": Op.MIN, "max": Op.MAX},
    **{"eq": Op.EQ, "ne": Op.NE, "lt": Op.LT, "le": Op.LE, "gt": Op.GT, "ge": Op.GE, "not_equal": Op.NE},
    **{"less": Op.LT, "less_equal": Op.LE, "greater": Op.GT, "greater_equal": Op.GE},
}
_LOGICAL = {"and": Op.AND, "or": Op.OR, "xor": Op.NE}
_CASTS: dict[str, Callable[[Expr], Expr]] = {"float": to_f32, "int": to_i32, "long": to_i32, "bool": to_bool}


def _clamp(t: Tracer, x: Expr, low: object = None, high: object = None, **named: object) -> Expr:
    low, high = named.pop("min", low), named.pop("max", high)
    _no_more(t, "clamp", named)
    if low is not None:
        x = make(Op.MAX, x, t.lift(low))
    return x if high is None else make(Op.MIN, x, t.lift(high))


def _pow(t: Tracer, base: object, exponent: object) -> Expr:
    power = t.lift(exponent)
    if power.op is not Op.CONST:
        if isinstance(base, (int, float)) and base == 2:
            return make(Op.EXP2, power)
        raise t.error("a power needs a constant exponent. Write `exp(y * log(x))`, or `2 ** y` for base 2")
    x, n = t.lift(base), power.value
    if n == 0.5:
        return make(Op.SQRT, x)
    if n is None or not -8 <= n <= 8 or n != int(n):
        raise t.error(
            f"the exponent {n} is not supported. Allowed: integers from -8 to 8, 0.5; else `exp(y * log(x))`"
        )
    if not n:  # 1 also of an infinity or a NaN, as in torch
        return _ones_like(x)
    result = x
    for _ in range(abs(int(n)) - 1):
        result = make(Op.MUL, result, x)
    return make(Op.DIV, const(1.0), result) if n < 0 else result


def _where(t: Tracer, cond: object, yes: object, no: object) -> Expr:
    test = t.lift(cond)
    if test.dtype is not DType.BOOL:
        raise t.error(
            f"the condition of `where` must be a bool; `{test!r}` is {test.dtype.value}. Compare it: `x != 0`"
        )
    return make(Op.WHERE, test, t.lift(yes), t.lift(no))


def _to(t: Tracer, x: Expr, dtype: object, **named: object) -> Expr:
    _no_more(t, "to", named)
    if not isinstance(dtype, torch.dtype) or dtype.is_complex:
        raise t.error(
            f"`.to({dtype})` is not supported on a traced value. Allowed: a float, integer or bool "
            "torch.dtype"
        )
    # inside a kernel there is one float and one integer type; a narrower one is a wish about storage
    return to_f32(x) if dtype.is_floating_point else to_bool(x) if dtype is torch.bool else to_i32(x)


def _div(t: Tracer, a: object, b: object, rounding_mode: str | None = None) -> Expr:
    if rounding_mode not in (None, "floor"):
        raise t.error(f"rounding_mode={rounding_mode!r} is not supported. Allowed: None, 'floor'")
    return make(Op.FLOORDIV if rounding_mode else Op.DIV, t.lift(a), t.lift(b))


def _relu(t: Tracer, x: Expr, inplace: bool = False) -> Expr:
    return make(Op.MAX, x, const(0))


def _no_more(t: Tracer, name: str, named: Mapping[str, object]) -> None:
    if named:
        raise t.error(f"the argument {next(iter(named))!r} of `{name}` is not supported on a traced value")


def _ones_like(x: Expr) -> Expr:
    return _ONE if x.dtype is DType.F32 else const(1)


_ONE = const(1.0)
# those whose first argument is always a traced or captured value
_SPECIAL: dict[str, Callable[..., Expr]] = {
    "clamp": _clamp,
    "clip": _clamp,
    "clamp_min": lambda t, x, low: make(Op.MAX, x, t.lift(low)),
    "clamp_max": lambda t, x, high: make(Op.MIN, x, t.lift(high)),
    "to": _to,
    "type": _to,
    "relu": _relu,
    "floor": lambda t, x: x if x.dtype is DType.I32 else make(Op.FLOOR, x),
    "ceil": lambda t, x: x if x.dtype is DType.I32 else make(Op.NEG, make(Op.FLOOR, make(Op.NEG, x))),
    "square": lambda t, x: make(Op.MUL, x, x),
    "reciprocal": lambda t, x: make(Op.DIV, _ONE, x),
    "rsqrt": lambda t, x: make(Op.DIV, _ONE, make(Op.SQRT, x)),
    "log1p": lambda t, x: make(Op.LOG, make(Op.ADD, _ONE, x)),
    "logical_not": lambda t, x: make(Op.NOT, to_bool(x)),
    "zeros_like": lambda t, x: const(0.0) if x.dtype is DType.F32 else const(0),
    "ones_like": lambda t, x: _ones_like(x),
}
_FREE: dict[str, Callable[..., Expr]] = {
    "where": _where,
    "pow": _pow,
    "__pow__": _pow,
    "__rpow__": lambda t, exponent, base: _pow(t, base, exponent),
    "rsub": lambda t, a, b: make(Op.SUB, t.lift(b), t.lift(a)),
    "full_like": lambda t, like, value: t.lift(value),
    **dict.fromkeys(("div", "divide", "true_divide"), _div),
}
SUPPORTED = frozenset(
    {
        *_UNARY,
        *_BINARY,
        *_CASTS,
        *_SPECIAL,
        *_FREE,
        *(f"logical_{n}" for n in _LOGICAL),
        "bitwise_not",
        "__invert__",
    }
    | {form.format(n) for n in _LOGICAL for form in ("bitwise_{}", "__{}__", "__r{}__")}
)


def _supported() -> str:
    return ", ".join(sorted(n for n in SUPPORTED if not n.startswith(("_", "special_"))))


def apply(t: Tracer, name: str, args: tuple[Any, ...], named: Mapping[str, Any]) -> Scalar:
    """The torch function or method `name` on traced values."""
    if name not in SUPPORTED:
        raise t.error(
            f"the torch function `{name}` is not supported on a traced value. Supported: {_supported()}"
        )
    try:
        return t.wrap(_apply(t, name, args, named))
    except TypeError as e:  # a wrong number of arguments, or boolean operators on numbers
        hint = (
            ". `&`, `|`, `^`, `~` take bools; compare first, or use `%` and `//`"
            if "boolean" in str(e)
            else ""
        )
        raise t.error(f"`{name.strip('_')}`: {e}{hint}") from None


def _apply(t: Tracer, name: str, args: tuple[Any, ...], named: Mapping[str, Any]) -> Expr:
    if name in _FREE:
        return _FREE[name](t, *args, **named)
    if name in _SPECIAL:
        return _SPECIAL[name](t, t.lift(args[0]), *args[1:], **named)
    _no_more(t, name, named)
    values = [t.lift(a) for a in args]
    if name in _CASTS:
        (x,) = values
        return _CASTS[name](x)
    if name in _UNARY:
        (x,) = values
        return make(_UNARY[name], x)
    if name in _BINARY:
        a, b = values
        return make(_BINARY[name], a, b)
    if name in ("bitwise_not", "__invert__"):
        (x,) = values
        return make(Op.NOT, x)
    a, b = (to_bool(v) for v in values) if name.startswith("logical_") else values
    op = _LOGICAL[name.replace("logical_", "").replace("bitwise_", "").strip("_").removeprefix("r")]
    if op is Op.NE:
        make(Op.AND, a, b)  # `^` is for bools only, and refuses numbers as `&` does
    return make(op, a, b)
