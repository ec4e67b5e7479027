"""Sums of products of powers, in a normal form: what a derivation cancels, collects and factors.

Atoms are expressions that are neither sums nor products; exponentials in a product are one exponential of the sum of
their exponents, so that exp(z - r) / exp(lse - r) is exp(z - lse)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from attngen.expr import ONE, ZERO, Expr, Op, add, const, make, mul, neg, sub
from attngen.exprtext import show

Powers = frozenset[tuple[Expr, int]]


@dataclass(frozen=True)
class Polynomial:
    """Coefficients by product of powers."""

    terms: Mapping[Powers, float]

    @staticmethod
    def of(e: Expr, atoms: Mapping[Expr, Polynomial] | None = None) -> Polynomial:
        """`atoms`: what stands for whole nodes."""
        known = atoms or {}
        if e in known:
            return known[e]
        if e.op is Op.CONST and isinstance(e.value, float):
            return Polynomial({frozenset(): e.value} if e.value else {})
        parts = [Polynomial.of(a, known) for a in e.args] if e.op in (Op.ADD, Op.SUB, Op.NEG, Op.MUL, Op.DIV) else []
        match e.op:
            case Op.ADD:
                return parts[0] + parts[1]
            case Op.SUB:
                return parts[0] + parts[1].times(-1.0)
            case Op.NEG:
                return parts[0].times(-1.0)
            case Op.MUL:
                return parts[0] * parts[1]
            case Op.DIV if len(parts[1].terms) == 1:
                return parts[0] * parts[1].inverse()
            case Op.EXP:
                exponent = Polynomial.of(e.args[0], known).expr()
                return Polynomial({_powers([(make(Op.EXP, exponent), 1)]): 1.0})
        return Polynomial({frozenset({(e, 1)}): 1.0})

    def __add__(self, other: Polynomial) -> Polynomial:
        terms = dict(self.terms)
        for powers, c in other.terms.items():
            terms[powers] = terms.get(powers, 0.0) + c
        return Polynomial({p: c for p, c in terms.items() if c})

    def __mul__(self, other: Polynomial) -> Polynomial:
        result = Polynomial({})
        for p, a in self.terms.items():
            result += Polynomial({_powers([*p, *q]): a * b for q, b in other.terms.items()})
        return result

    def times(self, factor: float) -> Polynomial:
        return Polynomial({p: factor * c for p, c in self.terms.items()})

    def inverse(self) -> Polynomial:
        """Of a single product."""
        ((powers, c),) = self.terms.items()
        return Polynomial({_powers([(e, -n) for e, n in powers]): 1.0 / c})

    def split(self, inside: Callable[[Expr], bool]) -> list[tuple[Polynomial, Polynomial]]:
        """(factor of atoms that are not `inside`, product of those that are) for each term; both have the value 1 where
        there are none. The factor has the coefficient."""
        result = []
        for powers, c in self.terms.items():
            inner = frozenset((e, n) for e, n in powers if inside(e))
            result.append((Polynomial({powers - inner: c}), Polynomial({inner: 1.0})))
        return result

    def common(self) -> Polynomial:
        """The largest product that divides every term."""
        everything = list(self.terms)
        shared = frozenset.intersection(*everything) if everything else frozenset()
        return Polynomial({shared: 1.0})

    @property
    def atoms(self) -> set[Expr]:
        return {e for powers in self.terms for e, _ in powers}

    def expr(self) -> Expr:
        """Positive terms first, else by text."""
        positive = sorted((show(_product(p, c)), p, c) for p, c in self.terms.items() if c > 0)
        negative = sorted((show(_product(p, -c)), p, -c) for p, c in self.terms.items() if c < 0)
        result: Expr | None = None
        for _, p, c in positive:
            result = _product(p, c) if result is None else add(result, _product(p, c))
        for _, p, c in negative:
            result = neg(_product(p, c)) if result is None else sub(result, _product(p, c))
        return ZERO if result is None else result


def _powers(parts: Iterable[tuple[Expr, int]]) -> Powers:
    """Equal atoms multiplied; exponentials as one."""
    found: dict[Expr, int] = {}
    exponent = Polynomial({})
    for e, n in parts:
        if e.op is Op.EXP:
            exponent += Polynomial.of(e.args[0]).times(float(n))
        else:
            found[e] = found.get(e, 0) + n
    if exponent.terms:
        found[make(Op.EXP, exponent.expr())] = 1
    return frozenset((e, n) for e, n in found.items() if n)


def _product(powers: Powers, coefficient: float) -> Expr:
    factors = sorted(powers, key=lambda f: (-f[1], show(f[0])))
    above = [e for e, n in factors for _ in range(n)]
    below = [e for e, n in factors for _ in range(-n)]
    if coefficient != 1.0 or not above:
        above.insert(0, const(coefficient))
    result = above[0]
    for e in above[1:]:
        result = mul(result, e)
    for e in below:
        result = make(Op.DIV, result, e)
    return ONE if result.op is Op.CONST and result.value == 1.0 else result
