"""The text of scalar expressions: `show` prints, `parse` reads it back to the identical node."""

from __future__ import annotations

import re
from collections.abc import Mapping

from attngen.errors import ScheduleError
from attngen.expr import COMPARES, FUNCTIONS, DType, Expr, Op, const, load, make, var

_LEVEL = {Op.OR: 1, Op.AND: 2, **dict.fromkeys(COMPARES, 3), Op.ADD: 4, Op.SUB: 4}
_LEVEL |= {Op.MUL: 5, Op.DIV: 5, Op.FLOORDIV: 5, Op.MOD: 5, Op.NEG: 6, Op.NOT: 6}
_BINARY = {op.value.strip(): op for op in _LEVEL if op not in (Op.NEG, Op.NOT)}
_NAMED = {op.value: op for op in FUNCTIONS}
_ARITY = {Op.MIN: 2, Op.MAX: 2, Op.WHERE: 3, Op.FMA: 3}  # of the others 1


def show(root: Expr) -> str:
    """Infix text of `root`; shared subexpressions are written out at each use."""
    return _show(root, 0)


def _show(e: Expr, outer: int) -> str:
    if e.op is Op.CONST:
        text = str(e.value).lower() if e.dtype is DType.BOOL else repr(e.value)
        return f"({text})" if text.startswith("-") and outer > 4 else text
    if e.op is Op.VAR:
        return e.name
    if e.op is Op.LOAD:
        return f"{e.name}[{', '.join(_show(a, 0) for a in e.args)}]"
    if e.op in FUNCTIONS:
        return f"{e.op.value}({', '.join(_show(a, 0) for a in e.args)})"
    level = _LEVEL[e.op]
    if len(e.args) == 1:
        # -(2) is NEG of a constant; -2 is the constant
        inner = f"({_show(e.args[0], 0)})" if e.args[0].op is Op.CONST else _show(e.args[0], level)
        text = e.op.value + inner
    else:
        # comparisons do not chain, so both sides bind tighter; the others associate to the left
        left = _show(e.args[0], level + 1 if e.op in COMPARES else level)
        text = f"{left} {e.op.value.strip()} {_show(e.args[1], level + 1)}"
    return f"({text})" if level < outer else text


_TOKEN = re.compile(
    r"\s*(?:(?P<num>(?:\d+\.\d*|\.\d+|\d+)(?:[eE][+-]?\d+)?|inf\b|nan\b)|(?P<name>[A-Za-z_][A-Za-z_0-9.]*)|"
    r"(?P<op>//|<=|>=|==|!=|[-+*/%<>&|~(),\[\]]))"
)


class _Parser:
    def __init__(self, text: str, names: Mapping[str, DType], captures: Mapping[str, DType]) -> None:
        self.text, self.names, self.captures = text, names, captures
        self.tokens: list[tuple[str, str]] = []
        at = 0
        while at < len(text.rstrip()):
            m = _TOKEN.match(text, at)
            if not m:
                raise ScheduleError(f"cannot read the expression {text!r} at column {at + 1}: {text[at:at + 12]!r}")
            assert m.lastgroup is not None
            self.tokens.append((m.lastgroup, m.group(m.lastgroup)))
            at = m.end()
        self.at = 0

    def peek(self) -> str:
        return self.tokens[self.at][1] if self.at < len(self.tokens) else ""

    def take(self, want: str | None = None) -> tuple[str, str]:
        if self.at >= len(self.tokens) or (want is not None and self.peek() != want):
            raise ScheduleError(
                f"expected {want or 'an operand'} in the expression {self.text!r}, found {self.peek()!r}"
            )
        self.at += 1
        return self.tokens[self.at - 1]

    def expression(self, level: int) -> Expr:
        left = self.unary()
        while True:
            op = _BINARY.get(self.peek())
            if op is None or _LEVEL[op] < level:
                return left
            self.take()
            left = make(op, left, self.expression(_LEVEL[op] + 1))

    def unary(self) -> Expr:
        if self.peek() == "~":
            self.take()
            return make(Op.NOT, self.expression(6))
        if self.peek() == "-":
            self.take()
            if self.tokens[self.at : self.at + 1] and self.tokens[self.at][0] == "num":
                value = self.number(self.take()[1])
                assert value.value is not None
                return const(-value.value)
            return make(Op.NEG, self.expression(6))
        return self.atom()

    @staticmethod
    def number(text: str) -> Expr:
        return const(int(text)) if text.isdigit() else const(float(text))

    def arguments(self, close: str) -> tuple[Expr, ...]:
        args: list[Expr] = []
        while self.peek() != close:
            if args:
                self.take(",")
            args.append(self.expression(0))
        self.take(close)
        return tuple(args)

    def call(self, op: Op) -> Expr:
        args, want = self.arguments(")"), _ARITY.get(op, 1)
        if len(args) != want:
            raise ScheduleError(f"{op.value} has {len(args)} arguments in {self.text!r}. Allowed: {want}")
        return make(op, *args)

    def atom(self) -> Expr:
        kind, text = self.take()
        if kind == "num":
            return self.number(text)
        if text == "(":
            inner = self.expression(0)
            self.take(")")
            return inner
        if kind == "name":
            if text in ("true", "false"):
                return const(text == "true")
            if self.peek() == "(" and text in _NAMED:
                self.take()
                return self.call(_NAMED[text])
            if self.peek() == "[":
                self.take()
                if text not in self.captures:
                    raise ScheduleError(
                        f"unknown tensor {text!r} in {self.text!r}; known: {', '.join(self.captures) or 'none'}"
                    )
                return load(text, self.arguments("]"), self.captures[text])
            if text in self.names:
                return var(text, self.names[text])
            raise ScheduleError(f"unknown name {text!r} in {self.text!r}; known: {', '.join(sorted(self.names))}")
        raise ScheduleError(f"unexpected {text!r} in the expression {self.text!r}")


def parse(text: str, names: Mapping[str, DType], captures: Mapping[str, DType] | None = None) -> Expr:
    """Inverse of `show`. `names` and `captures` give the types of variables and captured tensors."""
    p = _Parser(text, names, captures or {})
    try:
        result = p.expression(0)
    except (TypeError, ValueError, OverflowError) as error:  # of nodes: types; of integers: digits, size
        raise ScheduleError(f"{error} in the expression {text!r}") from None
    except RecursionError:
        raise ScheduleError(f"an expression of {len(text)} characters is nested too deeply: {text:.40}...") from None
    if p.at != len(p.tokens):
        raise ScheduleError(f"text left over in the expression {text!r}: {p.peek()!r}")
    return result
