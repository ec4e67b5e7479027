"""Scalar expressions: what a score function, a mask, and every `map` of a kernel computes per element.

An `Expr` is a node of a directed acyclic graph. Nodes are interned: two structurally equal expressions are the
same object, so equality is identity and a shared subexpression is computed once. The printed form is Python-like
infix text, and `parse` is its inverse (see `attngen.exprtext`)."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from functools import cached_property

from attngen.naming import shown


class DType(Enum):
    """Type of a scalar inside a kernel. Tensors' storage types are in `attngen.signature`."""

    F32 = "f32"
    I32 = "i32"
    BOOL = "bool"

    __hash__ = object.__hash__  # members are single objects; Enum hashes their names, in Python


class Op(Enum):
    CONST = "const"
    VAR = "var"
    LOAD = "load"  # element of a captured tensor; no argument: a 0-dim tensor
    NEG = "-"
    ADD = "+"
    SUB = "- "
    MUL = "*"
    DIV = "/"
    FLOORDIV = "//"
    MOD = "%"
    MIN = "min"
    MAX = "max"
    EQ = "=="
    NE = "!="
    LT = "<"
    LE = "<="
    GT = ">"
    GE = ">="
    AND = "&"
    OR = "|"
    NOT = "~"
    WHERE = "where"
    ABS = "abs"
    EXP = "exp"
    LOG = "log"
    TANH = "tanh"
    TANH_APPROX = "tanh_approx"
    SIGMOID = "sigmoid"
    SQRT = "sqrt"
    FLOOR = "floor"
    EXP2 = "exp2"
    LOG2 = "log2"
    RCP = "rcp"  # approximate reciprocal
    FMA = "fma"
    F32 = "f32"  # conversion from int or bool
    I32 = "i32"  # conversion from float (truncates) or bool

    __hash__ = object.__hash__  # as DType


COMPARES = frozenset({Op.EQ, Op.NE, Op.LT, Op.LE, Op.GT, Op.GE})
FUNCTIONS = frozenset(
    {Op.MIN, Op.MAX, Op.WHERE, Op.ABS, Op.EXP, Op.LOG, Op.TANH, Op.SIGMOID, Op.SQRT, Op.FLOOR, Op.EXP2, Op.LOG2}
    | {Op.RCP, Op.FMA, Op.F32, Op.I32, Op.TANH_APPROX}
)
FLOAT_ONLY = frozenset(
    {Op.DIV, Op.EXP, Op.LOG, Op.TANH, Op.SIGMOID, Op.SQRT, Op.FLOOR, Op.EXP2, Op.LOG2, Op.RCP, Op.FMA, Op.TANH_APPROX}
)

Value = float | int | bool

FLOAT_RANGE = 2.0**-126, (2.0 - 2.0**-23) * 2.0**127  # magnitudes that float32 has with all its bits


@dataclass(frozen=True, eq=False)
class Expr:
    """One interned node. `name` is set for VAR and LOAD, `value` for CONST."""

    op: Op
    args: tuple[Expr, ...]
    dtype: DType
    name: str = ""
    value: Value | None = None

    @cached_property
    def below(self) -> tuple[Expr, ...]:
        """The nodes that it is made of, itself apart, in the order of `walk`: passes ask for them again and again."""
        return tuple(_walk(self.args))

    def __repr__(self) -> str:
        from attngen.exprtext import show

        return show(self)


_interned: weakref.WeakValueDictionary[tuple[object, ...], Expr] = weakref.WeakValueDictionary()


def _node(op: Op, args: tuple[Expr, ...], dtype: DType, name: str = "", value: Value | None = None) -> Expr:
    # -0.0 and 0.0 are different constants, and nan is equal to itself here: the key holds the printed value
    key = (op, tuple(id(a) for a in args), dtype, name, type(value), repr(value))
    found = _interned.get(key)
    if found is None:
        found = _interned[key] = Expr(op, args, dtype, name, value)
    return found


# ---- constructors: each checks and settles types, nothing else -------------------------------------------------


def const(value: Value) -> Expr:
    if isinstance(value, bool):
        return _node(Op.CONST, (), DType.BOOL, value=value)
    if isinstance(value, int):
        if not -(2**31) <= value < 2**31:
            raise OverflowError(f"{shown(value)} does not fit 32 bits, which an integer constant has")
        return _node(Op.CONST, (), DType.I32, value=value)
    return _node(Op.CONST, (), DType.F32, value=float(value))


def var(name: str, dtype: DType) -> Expr:
    return _node(Op.VAR, (), dtype, name=name)


def load(name: str, index: tuple[Expr, ...], dtype: DType) -> Expr:
    """Element `index` of the captured tensor `name`, converted to `dtype`."""
    return _node(Op.LOAD, tuple(to_i32(i) for i in index), dtype, name=name)


def to_f32(x: Expr) -> Expr:
    if x.dtype is DType.F32:
        return x
    if x.op is Op.CONST:
        assert x.value is not None
        return const(float(x.value))
    return _node(Op.F32, (x,), DType.F32)


def to_i32(x: Expr) -> Expr:
    if x.dtype is DType.I32:
        return x
    if x.op is Op.CONST and x.dtype is DType.BOOL:
        assert x.value is not None
        return const(int(x.value))
    return _node(Op.I32, (x,), DType.I32)


def to_bool(x: Expr) -> Expr:
    if x.dtype is DType.BOOL:
        return x
    return make(Op.NE, x, const(0) if x.dtype is DType.I32 else const(0.0))


def make(op: Op, *args: Expr) -> Expr:
    """The node `op(args)` with the usual promotions: bool -> int -> float; `/` is always float."""
    if op in (Op.AND, Op.OR, Op.NOT):
        if not all(a.dtype is DType.BOOL for a in args):
            raise TypeError(f"{op.value} needs boolean operands; got {', '.join(a.dtype.value for a in args)}")
        return _node(op, args, DType.BOOL)
    if op is Op.WHERE:
        cond, yes, no = args
        yes, no = _same(yes, no)
        return _node(op, (to_bool(cond), yes, no), yes.dtype)
    if op is Op.F32:
        return to_f32(args[0])
    if op is Op.I32:
        return to_i32(args[0])
    if op in FLOAT_ONLY:
        return _node(op, tuple(to_f32(a) for a in args), DType.F32)
    args = _same(*args)
    if op in COMPARES:
        return _node(op, args, DType.BOOL)
    if args[0].dtype is DType.BOOL:
        args = tuple(to_i32(a) for a in args)
    if op in (Op.FLOORDIV, Op.MOD) and args[0].dtype is DType.F32:
        quotient = make(Op.FLOOR, make(Op.DIV, *args))
        return quotient if op is Op.FLOORDIV else make(Op.SUB, args[0], make(Op.MUL, quotient, args[1]))
    return _node(op, args, args[0].dtype)


def _same(*args: Expr) -> tuple[Expr, ...]:
    kinds = {a.dtype for a in args}
    if len(kinds) == 1:
        return args
    if DType.F32 in kinds:
        return tuple(to_f32(a) for a in args)
    return tuple(to_i32(a) for a in args)


# ---- shorthands the passes are written with --------------------------------------------------------------------


def add(a: Expr, b: Expr) -> Expr:
    return make(Op.ADD, a, b)


def sub(a: Expr, b: Expr) -> Expr:
    return make(Op.SUB, a, b)


def mul(a: Expr, b: Expr) -> Expr:
    return make(Op.MUL, a, b)


def neg(a: Expr) -> Expr:
    return make(Op.NEG, a)


def maximum(a: Expr, b: Expr) -> Expr:
    return make(Op.MAX, a, b)


def minimum(a: Expr, b: Expr) -> Expr:
    return make(Op.MIN, a, b)


def where(cond: Expr, yes: Expr, no: Expr) -> Expr:
    return make(Op.WHERE, cond, yes, no)


def conj(*args: Expr) -> Expr:
    """Conjunction; the constant true is its neutral element."""
    rest = [a for a in args if a is not TRUE]
    if not rest:
        return TRUE
    result = rest[0]
    for a in rest[1:]:
        result = make(Op.AND, result, a)
    return result


TRUE, FALSE = const(True), const(False)
ZERO, ONE, NEG_INF = const(0.0), const(1.0), const(-math.inf)


# ---- walking ---------------------------------------------------------------------------------------------------


def walk(*roots: Expr) -> Iterator[Expr]:
    """Every node below `roots` once, operands before users, in a fixed order."""
    if len(roots) == 1:
        yield from roots[0].below
        yield roots[0]
    else:
        yield from _walk(roots)


def _walk(roots: tuple[Expr, ...]) -> Iterator[Expr]:
    seen: set[int] = set()
    stack: list[tuple[Expr, bool]] = [(r, False) for r in reversed(roots)]
    while stack:
        node, ready = stack.pop()
        if ready:
            yield node
        elif id(node) not in seen:
            seen.add(id(node))
            stack.append((node, True))
            stack.extend((a, False) for a in reversed(node.args))


def rebuild(node: Expr, args: tuple[Expr, ...]) -> Expr:
    """`node` over other operands (types are settled anew)."""
    if node.op is Op.LOAD:
        return load(node.name, args, node.dtype)
    return node if not args else make(node.op, *args)


def rewrite(root: Expr, rule: Callable[[Expr], Expr | None]) -> Expr:
    """Bottom-up rewriting: `rule` sees each node after its operands; None keeps the node."""
    done: dict[int, Expr] = {}
    for node in walk(root):
        args = tuple(done[id(a)] for a in node.args)
        fresh = node if all(x is y for x, y in zip(args, node.args, strict=True)) else rebuild(node, args)
        changed = rule(fresh)
        done[id(node)] = fresh if changed is None else changed
    return done[id(root)]


def substitute(root: Expr, values: dict[Expr, Expr]) -> Expr:
    """Replace whole nodes (usually variables) by expressions."""
    return rewrite(root, lambda e: values.get(e))


def variables(*roots: Expr) -> frozenset[str]:
    """Names of the variables below `roots`."""
    return frozenset(e.name for e in walk(*roots) if e.op is Op.VAR)


def loads(*roots: Expr) -> tuple[Expr, ...]:
    """The LOAD nodes below `roots`, operands first."""
    return tuple(e for e in walk(*roots) if e.op is Op.LOAD)


# ---- the index variables of user functions, and the score ---------------------------------------------------------

SCORE = var("score", DType.F32)
B, H = var("b", DType.I32), var("h", DType.I32)
I, J = var("i", DType.I32), var("j", DType.I32)  # noqa: E741  (the query and the key index, as users write them)
SEQLEN_Q, SEQLEN_K = var("seqlen_q", DType.I32), var("seqlen_k", DType.I32)
SCALE = var("scale", DType.F32)
INDICES = (B, H, I, J, SEQLEN_Q, SEQLEN_K)
