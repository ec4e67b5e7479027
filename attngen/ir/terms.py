"""The words that ops are made of: units, scopes, references to buffers and values, statements."""

from __future__ import annotations

from dataclasses import dataclass
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
