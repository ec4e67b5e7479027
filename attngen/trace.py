"""From a user's score or mask function to an `Expr`: call it once with proxies and record what it does.

Recorded beside the expression: the tensors it reads, the names of its local variables, the line each node
was written on, and the Python numbers that became constants of the kernel."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from types import FrameType
from typing import Any

import torch

from attngen import expr as ex
from attngen.errors import Location, TraceError
from attngen.expr import DType, Expr, Op
from attngen.naming import c_name, defined_at, location, members, unique
from attngen.once import OnceOnly
from attngen.proxy import Proxy, Scalar, Slice


class Storage(Enum):
    """How the elements of a captured tensor lie in memory."""

    F32 = "f32"
    F16 = "f16"
    BF16 = "bf16"
    I32 = "i32"
    I64 = "i64"
    U8 = "u8"  # a torch.bool

    @property
    def torch_dtype(self) -> torch.dtype:
        return _STORED_AS[self]

    @property
    def element(self) -> DType:
        """Type of an element inside an expression; a 64-bit integer is clamped to 32 bits."""
        if self is Storage.U8:
            return DType.BOOL
        return DType.I32 if self in (Storage.I32, Storage.I64) else DType.F32


_STORED_AS = {
    Storage.F32: torch.float32,
    Storage.F16: torch.float16,
    Storage.BF16: torch.bfloat16,
    Storage.I32: torch.int32,
    Storage.I64: torch.int64,
    Storage.U8: torch.bool,
}
_STORAGE_OF = {dtype: storage for storage, dtype in _STORED_AS.items()}


@dataclass(frozen=True)
class Capture:
    """A tensor the expressions read; the tensor itself is bound when the operator is called."""

    name: str
    storage: Storage
    rank: int


class Axis(Enum):
    """What a dimension of a captured tensor has to match; the values are fields of `Shapes`."""

    B = "B"
    HQ = "Hq"
    SQ = "Sq"
    SK = "Sk"


@dataclass(frozen=True)
class ShapeRule:
    """What the shape of a captured tensor has to be, where a library mask or score knows it."""

    capture: str
    axes: tuple[Axis, ...]
    broadcast: bool  # a dimension may also be 1
    hint: str  # what to do when it does not fit


_INTERNAL = (os.path.dirname(__file__) + os.sep, os.path.dirname(torch.__file__) + os.sep)
_SAMPLES = os.path.join(os.path.dirname(__file__), "golden.py")  # its functions stand for a user's
_is_internal: dict[str, bool] = {}


def _internal(file: str) -> bool:
    known = _is_internal.get(file)
    if known is None:
        known = _is_internal[file] = file.startswith(_INTERNAL) and file != _SAMPLES
    return known


class Tracer:
    """Records one variant: any number of callables, with the captured tensors named across all of them."""

    def __init__(self) -> None:
        self.rules: list[ShapeRule] = []
        self._tensors: dict[int, tuple[Capture, torch.Tensor]] = {}
        self._taken = {"sink"}
        self._lines: dict[Expr, tuple[str, int]] = {}
        self._frames: dict[int, FrameType] = {}
        self._names: dict[Expr, str] = {}
        self._constants: dict[tuple[str, str], None] = {}
        self._defined_at: Location | None = None

    # ---- what the proxies call -----------------------------------------------------------------------------

    def emit(self, op: Op, *args: Expr) -> Scalar:
        if op in (Op.FLOORDIV, Op.MOD) and args[1].op is Op.CONST and args[1].value == 0:
            raise self.error("an integer is divided by 0")
        try:
            return self.wrap(ex.make(op, *args))
        except TypeError as e:
            raise self.error(str(e)) from None

    def wrap(self, e: Expr) -> Scalar:
        """A proxy of `e`, noting the user's line that made it."""
        frame = self._user_frame()
        if frame is not None:
            self._frames.setdefault(id(frame), frame)
            if e.args or e.op is Op.LOAD:
                self._lines.setdefault(e, (frame.f_code.co_filename, frame.f_lineno))
        return Scalar(self, e)

    def lift(self, value: object) -> Expr:
        """The expression of an operand: a traced value, a number, or a 0-dim tensor."""
        if isinstance(value, Proxy):
            return value._value()
        if isinstance(value, torch.Tensor):
            if value.dim():
                raise self.error(
                    f"a tensor of shape {tuple(value.shape)} is used without an index. A score or mask "
                    "function computes one element: index the tensor, as in `table[h, i]`"
                )
            return self.wrap(self.load(value, ()))._value()
        try:
            if isinstance(value, (bool, int, float)):
                return ex.const(value)
            if hasattr(value, "__index__"):  # numpy integers
                return ex.const(int(value))
            if hasattr(value, "__float__"):
                return ex.const(float(value))
        except OverflowError as e:
            raise self.error(f"{e}. Write it as a float, as in `s * 4e9`") from None
        except TypeError:  # an array of several numbers has none
            raise self.error(
                f"{type(value).__name__} of several numbers is used as an operand of a traced value. A score or mask "
                "function computes one element: make a tensor of it, `table = torch.tensor(values)`, and index that"
            ) from None
        raise self.error(
            f"{type(value).__name__} value {value!r:.60} is used as an operand of a traced value. Allowed: "
            "traced values, Python numbers, tensors"
        )

    def index(self, tensor: torch.Tensor, done: tuple[Expr, ...], index: object) -> Proxy:
        """`tensor[index]` where the first dimensions already have the indices `done`."""
        at = list(done)
        for item in index if isinstance(index, tuple) else (index,):
            if item is None or item is Ellipsis or isinstance(item, (slice, list, tuple)):
                what = "None" if item is None else "..." if item is Ellipsis else f"a {type(item).__name__}"
                raise self.error(
                    f"{what} in the index of a captured tensor is not supported. Give one index a dimension, "
                    "as in `table[h, i]`"
                )
            if len(at) == tensor.dim():
                raise self.error(f"too many indices for a captured tensor of rank {tensor.dim()}")
            at.append(self._index_item(item, tensor.size(len(at))))
        if len(at) < tensor.dim():
            return Slice(self, tensor, tuple(at))
        return self.wrap(self.load(tensor, tuple(at)))

    def _index_item(self, item: object, size: int) -> Expr:
        e = self.lift(item)
        if e.dtype is not DType.I32:
            raise self.error(
                f"an index of a captured tensor must be an integer; `{e!r}` is {e.dtype.value}. Write "
                "`.int()`"
            )
        if e.op is Op.CONST and isinstance(e.value, int):
            if not -size <= e.value < size:
                raise self.error(f"index {e.value} is out of range for a dimension of size {size}")
            return ex.const(e.value % size)
        return e

    def load(self, tensor: torch.Tensor, index: tuple[Expr, ...], name: str = "") -> Expr:
        """Element of a captured tensor, which is taken in under `name` or the name the user gave it."""
        capture = self.capture(tensor, name)
        return ex.load(capture.name, index, capture.storage.element)

    def capture(self, tensor: torch.Tensor, name: str = "") -> Capture:
        found = self._tensors.get(id(tensor))
        if found is None:
            name = name or self._name_of(tensor)
            storage = _STORAGE_OF.get(tensor.dtype)
            if storage is None or tensor.layout is not torch.strided:
                allowed = ", ".join(str(d).removeprefix("torch.") for d in _STORAGE_OF)
                say = (
                    f"{name}.int()"
                    if not (tensor.is_floating_point() or tensor.is_complex())
                    else f"{name}.float()"
                )
                what = tensor.dtype if storage is None else tensor.layout
                raise self.error(
                    f"the captured tensor `{name}` is {what}. Allowed: dense {allowed}. Write `{say}` outside"
                )
            if tensor.dim() > 4:
                raise self.error(
                    f"the captured tensor `{name}` has rank {tensor.dim()}. Allowed: 0 to 4. Flatten or "
                    "slice it"
                )
            capture = Capture(unique(c_name(name, "_t") or "tensor", self._taken), storage, tensor.dim())
            found = self._tensors[id(tensor)] = (capture, tensor)
        return found[0]

    def error(self, message: str) -> TraceError:
        frame = self._user_frame()
        where = self._defined_at if frame is None else location(frame.f_code.co_filename, frame.f_lineno)
        return TraceError(message, where)

    def _user_frame(self) -> FrameType | None:
        """The innermost frame of user code, or None when a library mask is being traced."""
        frame: FrameType | None = sys._getframe(2)
        while frame is not None and frame.f_code is not Tracer.call.__code__:
            if not _internal(frame.f_code.co_filename):
                return frame
            frame = frame.f_back
        return None

    def _name_of(self, tensor: torch.Tensor) -> str:
        """What the user calls the tensor: a variable, or an attribute or item of one."""
        frame = self._user_frame()
        if frame is None:
            return "tensor"
        code = frame.f_code
        scope = [
            (n, frame.f_locals[n]) for n in (*code.co_freevars, *code.co_varnames) if n in frame.f_locals
        ]
        scope += [(n, frame.f_globals[n]) for n in code.co_names if n in frame.f_globals]
        for name, value in members(scope, 3):
            if value is tensor:
                return name
        base = tensor._base
        if base is not None:  # `table[0]` is a fresh view of `table`, or of what `table` is a view of
            for name, value in members(scope, 3):
                if value is base or (isinstance(value, torch.Tensor) and value._base is base):
                    return name
        return "tensor"

    # ---- what the spec calls -------------------------------------------------------------------------------

    def call(self, fn: Callable[..., Any], args: tuple[Expr, ...], kind: str) -> Expr:
        """The expression of `fn(*args)`; parameters named `seqlen_q` and `seqlen_k` get the lengths."""
        outer, self._defined_at = self._defined_at, defined_at(fn)
        try:
            lengths = self._check_parameters(fn, args, kind)
            with OnceOnly(self.error):
                result = fn(*(Scalar(self, a) for a in args), **{n: Scalar(self, e) for n, e in lengths.items()})
            if isinstance(result, Proxy):
                return result._value()
            if result is None or isinstance(result, (tuple, list, str)):
                got = "nothing (is a `return` missing?)" if result is None else f"a {type(result).__name__}"
                raise TraceError(
                    f"the {kind} function returned {got}. It must return one value", self._defined_at
                )
            return self.lift(result)
        finally:
            self._harvest(args)
            self._defined_at = outer

    def fail(self, message: str, fn: Callable[..., Any]) -> TraceError:
        """An error about the function as a whole."""
        return TraceError(message, defined_at(fn))

    def _check_parameters(self, fn: Callable[..., Any], args: tuple[Expr, ...], kind: str) -> dict[str, Expr]:
        try:
            signature = inspect.signature(fn)
        except (TypeError, ValueError):  # a builtin that does not tell
            return {}
        lengths = {
            n: e
            for n, e in (("seqlen_q", ex.SEQLEN_Q), ("seqlen_k", ex.SEQLEN_K))
            if n in signature.parameters
        }
        try:
            signature.bind(*args, **lengths)
        except TypeError as e:
            want = "(s, b, h, i, j)" if len(args) == 5 else "(b, h, i, j)"
            raise self.fail(
                f"the {kind} function has the parameters {signature}, but is called with {want}: {e}. Only "
                "`seqlen_q` and `seqlen_k` may be added",
                fn,
            ) from None
        return lengths

    def _harvest(self, args: tuple[Expr, ...]) -> None:
        """Read the names of local variables and captured numbers from the frames that have run.

        A frame that is referred to keeps its locals after it has returned. This drops the references."""
        frames, self._frames = list(self._frames.values()), {}
        for frame in frames:
            code, values = frame.f_code, frame.f_locals
            for name, value in values.items():
                if (
                    isinstance(value, Scalar)
                    and value.expr.args
                    and value.expr not in args
                    and (c := c_name(name, "_"))
                ):
                    self._names.setdefault(value.expr, c)
            outer = ((n, values.get(n)) for n in (*code.co_freevars, *code.co_varnames[: code.co_argcount]))
            for name, value in (*outer, *((n, frame.f_globals.get(n)) for n in code.co_names)):
                if isinstance(value, (int, float)):
                    self._constants[name, repr(value)] = None

    # ---- results -------------------------------------------------------------------------------------------

    @property
    def captures(self) -> tuple[Capture, ...]:
        return tuple(c for c, _ in self._tensors.values())

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        return {c.name: t for c, t in self._tensors.values()}

    @property
    def constants(self) -> tuple[tuple[str, str], ...]:
        return tuple(self._constants)

    def notes(self, *roots: Expr) -> tuple[tuple[tuple[Expr, str], ...], tuple[tuple[Expr, Location], ...]]:
        """The user's names and the source locations of the nodes below `roots`."""
        taken, names, places = set(self._taken), [], []
        for e in ex.walk(*roots):
            if e in self._names:
                names.append((e, unique(self._names[e], taken)))
            if e in self._lines:
                places.append((e, location(*self._lines[e])))
        return tuple(names), tuple(places)
