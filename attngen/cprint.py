"""Scalar expressions as C: one statement for each shared or named subexpression, the user's names kept."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType

from attngen.expr import DType, Expr, Op, walk
from attngen.ir.columns import COLUMN, ROW, tile_steps
from attngen.ir.schedule import Elem

C_DTYPE = {DType.F32: "float", DType.I32: "int", DType.BOOL: "bool"}
_INFIX = {
    Op.ADD: "+",
    Op.SUB: "-",
    Op.MUL: "*",
    Op.EQ: "==",
    Op.NE: "!=",
    Op.LT: "<",
    Op.LE: "<=",
    Op.GT: ">",
    Op.GE: ">=",
}
_INFIX |= {Op.AND: "&&", Op.OR: "||"}
_CALL = {
    Op.EXP2: "exp2_approx", Op.LOG2: "log2_approx", Op.RCP: "rcp_approx", Op.TANH_APPROX: "tanh_approx",
    Op.SQRT: "sqrt_f32", Op.DIV: "div_f32",
}  # fmt: skip
_CALL |= {Op.FMA: "fma_f32", Op.FLOOR: "floor_f32"}
_TYPED = {Op.MIN: "min", Op.MAX: "max", Op.ABS: "abs"}
_POINTERS = {
    Elem.F32: "const float*", Elem.BF16: "const u16*", Elem.F16: "const u16*", Elem.I32: "const int*",
    Elem.I64: "const i64*", Elem.U8: "const u8*",
}  # fmt: skip
_LOADS = {
    Elem.F32: "ld_f32",
    Elem.BF16: "ld_bf16",
    Elem.F16: "ld_f16",
    Elem.I32: "ld_s32",
    Elem.I64: "ld_s64",
    Elem.U8: "ld_u8",
}


def constant(e: Expr) -> str:
    if e.dtype is DType.BOOL:
        return "true" if e.value else "false"
    if e.dtype is DType.I32:
        # C has no negative literals: the digits of the smallest int alone are those of a long
        return str(e.value) if e.value != -(2**31) else "(-2147483647 - 1)"
    assert isinstance(e.value, float)
    if math.isnan(e.value):
        return "(INF - INF)"
    if math.isinf(e.value):
        return "INF" if e.value > 0 else "-INF"
    return f"{e.value!r}f"


class Printer:
    """Prints expressions whose variables are spelled by `spell`; `elems` gives the storage of captured tensors. dense:
    tensors whose last dimension is contiguous. numbers: what an index adds to the thread's first one, by name; it is
    known when the loop is unrolled."""

    def __init__(
        self, spell: Callable[[Expr], str], elems: Mapping[str, Elem], dense: frozenset[str] = frozenset(),
        numbers: Mapping[str, str] = MappingProxyType({}),
    ) -> None:  # fmt: skip
        self.spell, self.elems, self.dense, self.numbers = spell, elems, dense, numbers
        self.named: dict[Expr, str] = {}
        self.counter = 0

    def temporaries(self, *roots: Expr) -> list[str]:
        """Declarations of the subexpressions that `roots` use more than once, in order."""
        uses: dict[Expr, int] = {}
        for e in walk(*roots):
            for a in e.args:
                uses[a] = uses.get(a, 0) + 1
        for r in roots:
            uses[r] = uses.get(r, 0) + 1
        lines = []
        for e in walk(*roots):
            if e.args and uses[e] > 1 and e not in self.named:
                text = self(e)
                self.named[e] = f"v{self.counter}"
                self.counter += 1
                lines.append(f"const {C_DTYPE[e.dtype]} {self.named[e]} = {text};")
        return lines

    def __call__(self, e: Expr) -> str:
        """C text of e, in parentheses where it has an operator."""
        if e in self.named:
            return self.named[e]
        if e.op is Op.CONST:
            return constant(e)
        if e.op is Op.VAR:
            return self.spell(e)
        if e.op is Op.LOAD:
            return self._load(e)
        if e.op is Op.F32 and e.args[0].op is Op.VAR and e.args[0].name in ("i", "j", COLUMN):
            return f"{e.args[0].name}_f"  # the map has both indices as floats, converted once a row or tile
        a = [self(x) for x in e.args]
        if e.op in _INFIX:
            return f"({a[0]} {_INFIX[e.op]} {a[1]})"
        if e.op in (Op.FLOORDIV, Op.MOD):
            return self._divide(e, a)
        if e.op in _TYPED:
            return f"{_TYPED[e.op]}_{'f32' if e.dtype is DType.F32 else 's32'}({', '.join(a)})"
        if e.op in _CALL:
            return f"{_CALL[e.op]}({', '.join(a)})"
        match e.op:
            case Op.NEG:
                return f"(-({a[0]}))" if a[0].startswith("-") else f"(-{a[0]})"  # `--` is another operator
            case Op.NOT:
                return f"(!{a[0]})"
            case Op.WHERE if self._guarded(e):
                return self._load(e.args[1], a[0])
            case Op.WHERE:
                return f"({a[0]} ? {a[1]} : {a[2]})"
            case Op.F32:
                return f"({a[0]} ? 1.0f : 0.0f)" if e.args[0].dtype is DType.BOOL else f"f32_of_s32({a[0]})"
            case Op.I32:
                return f"({a[0]} ? 1 : 0)" if e.args[0].dtype is DType.BOOL else f"s32_of_f32({a[0]})"
            case _:
                raise AssertionError(f"{e.op} has to be rewritten by simplify before it is printed")

    @staticmethod
    def _divide(e: Expr, a: list[str]) -> str:
        by = e.args[1].value if e.args[1].op is Op.CONST else None
        if isinstance(by, int) and by > 0 and by & (by - 1) == 0:  # floor semantics of both hold for negative numbers
            return f"({a[0]} >> {by.bit_length() - 1})" if e.op is Op.FLOORDIV else f"({a[0]} & {by - 1})"
        return f"{'floordiv' if e.op is Op.FLOORDIV else 'mod'}_s32({a[0]}, {a[1]})"

    def _guarded(self, e: Expr) -> bool:
        """A load under a condition, else 0: what is outside of a tensor is not read."""
        _, read, nothing = e.args
        return read.op is Op.LOAD and read not in self.named and nothing.op is Op.CONST and not nothing.value

    def _load(self, e: Expr, guard: str = "") -> str:
        strided = len(e.args) - (1 if e.name in self.dense else 0)
        steps, bytes_, size = "", "", self.elems[e.name].bytes
        for k, index in enumerate(e.args):
            stride = f" * p.{e.name}_s{k}" if k < strided else ""
            parts = tile_steps(index)
            if parts is not None:
                factors = {name: n for name, n in ((ROW, parts.rows), (COLUMN, parts.columns)) if n}
                first = "".join(f" + {name}0 * {n}" for name, n in factors.items())
                number = " + ".join(f"({self.numbers[name]}) * {n * size}" for name, n in factors.items())
                steps += f" + (i64)({self(parts.base)}{first}){stride}"
                bytes_ += f" + (i64)({number})" + (f" * (int)p.{e.name}_s{k}" if stride else "")
            elif index.op is Op.VAR and index.name in self.numbers and not stride:
                steps += f" + (i64){index.name}0"
                bytes_ += f" + (i64)({self.numbers[index.name]}) * {size}"
            else:
                steps += f" + (i64){self(index)}{stride}"
        address = f"p.{e.name}{steps}"
        if bytes_:
            address = f"({_POINTERS[self.elems[e.name]]})((const u8*)({address}){bytes_})"
        function = _LOADS[self.elems[e.name]]
        text = f"{function}_if({address}, {guard})" if guard else f"{function}({address})"
        return f"({text} != 0)" if e.dtype is DType.BOOL else text
