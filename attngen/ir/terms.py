"""The words that ops are made of: units, scopes, references to buffers and values, statements, and their base."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from enum import Enum

from attngen.expr import Expr


class Unit(Enum):
    """What executes an op."""

    COPY = "copy"  # asynchronous copies (cp.async, TMA)
    TENSOR = "tensor"
    ALU = "alu"
    SHARED = "shared"  # loads and stores between registers and shared memory
    GLOBAL = "global"
    SYNC = "sync"


class Scope(Enum):
    """How often a statement of a `map` runs: by the indices that its value depends on."""

    ITEM = "item"  # b, h, scalars
    ROW = "row"
    COL = "col"
    ELEM = "elem"


class Heads(Enum):
    """Which head index a tensor is addressed with."""

    Q = "q"
    KV = "kv"


class ReduceKind(Enum):
    MAX = "max"
    SUM = "sum"


class Completion(Enum):
    READ = "read"  # the source may be overwritten
    ALL = "all"  # the result is visible in global memory


class Assign(Enum):
    """How an output is combined with what is there: dQ, GQA's dK and dV and table gradients are sums."""

    ASSIGN = "assign"
    REDUCE_ADD = "reduce_add"
    ORDERED_ADD = "ordered_add"


@dataclass(frozen=True)
class Ref:
    """A use of a buffer, value, barrier or ring: `sK[k]`, `rP[v]`, `sV[v].T`. index: slot or copy (where there are
    several), then the block of rows of a warpgroup; cols: a block of columns, `sK[:w]`."""

    name: str
    index: tuple[Expr, ...] = ()
    transposed: bool = False
    cols: Expr | None = None


@dataclass(frozen=True)
class Stmt:
    """`target = value` in a scope; `accumulate`: target += value (a row value summed over the elements of the row).

    The target is a value of the role (an element of it, in scope ELEM) or, where no value has the name, a local. With
    an `index` it is an element of a tensor of f32 in global memory, and value is added to it."""

    scope: Scope
    target: str
    value: Expr
    accumulate: bool = False
    index: tuple[Expr, ...] = ()

    @property
    def exprs(self) -> tuple[Expr, ...]:
        return (self.value, *self.index)


@dataclass(frozen=True, kw_only=True)
class Op:
    """Base of all ops. `only`: the tile class in whose ranges the op exists; `when`: a warp-uniform predicate;
    `note`: for a reader, printed at the end of the line (user code carries its file and line here)."""

    id: str
    only: str = ""
    when: Expr | None = None
    note: str = ""

    unit = Unit.ALU

    def reads(self) -> tuple[Ref, ...]:
        return tuple(self._refs("reads"))

    def writes(self) -> tuple[Ref, ...]:
        return tuple(self._refs("writes"))

    def _refs(self, role: str) -> Iterator[Ref]:
        for name in _accesses(type(self), role):
            value = getattr(self, name)
            yield from (value if isinstance(value, tuple) else (value,))


_accessed: dict[tuple[type[Op], str], tuple[str, ...]] = {}


def _accesses(cls: type[Op], role: str) -> tuple[str, ...]:
    """Names of the fields that an op reads or writes; asked for at every walk."""
    if (cls, role) not in _accessed:
        _accessed[cls, role] = tuple(f.name for f in fields(cls) if role in f.metadata.get("access", ()))
    return _accessed[cls, role]


def read() -> Ref:
    """A field for a reference that an op reads."""
    return field(metadata={"access": ("reads",)})  # type: ignore[no-any-return]


def written() -> Ref:
    """One that it writes."""
    return field(metadata={"access": ("writes",)})  # type: ignore[no-any-return]


def updated() -> Ref:
    """One that it reads and writes."""
    return field(metadata={"access": ("reads", "writes")})  # type: ignore[no-any-return]
