"""No pass of Hopper names a value: a program whose values have other names gives the same schedule with other names."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hopper_levels import BEHIND, CAUSAL, OVERLAPPED, OWN, SM90, level, ordered

from attngen.config import FoldPolicy, HopperConfig
from attngen.expr import Expr, Op, rewrite, var
from attngen.ir.program import ContractTile, Program
from attngen.ir.schedule import Schedule
from attngen.ir.verify import verify
from attngen.passes import hopper
from attngen.passes.hopper.stage import ring_of
from attngen.signature import IoType, Signature
from attngen.spec import Attention
from attngen.variants import sliding_window, softcap


class Renaming:
    """A program or schedule with its values renamed, wherever they are named."""

    def __init__(self, program: Program) -> None:
        self.names = {v.name: f"z_{v.name}" for v in program.values}
        self.rings = {ring_of(n): ring_of(z) for n, z in self.names.items()}

    def reference(self, name: str) -> str:
        first, dot, rest = name.partition(".")
        return self.rings[first] + dot + rest if dot else self.names.get(name, name)

    def expression(self, e: Expr) -> Expr:
        def one(x: Expr) -> Expr | None:
            return var(self.names[x.name], x.dtype) if x.op is Op.VAR and x.name in self.names else None

        return rewrite(e, one)

    def __call__(self, value: Any) -> Any:
        if isinstance(value, Expr):
            return self.expression(value)
        if isinstance(value, tuple):
            return tuple(self(v) for v in value)
        if not dataclasses.is_dataclass(value) or isinstance(value, type):
            return value
        changed = {f.name: self(getattr(value, f.name)) for f in dataclasses.fields(value) if f.init}
        kind = type(value).__name__
        if kind == "Ref":
            changed["name"] = self.reference(value.name)
        elif kind in ("TileValue", "Value", "Buffer"):
            changed["name"] = self.names.get(value.name, value.name)
        elif kind == "Ring":
            changed["name"] = self.rings[value.name]
            changed["buffers"] = tuple(self.names[b] for b in value.buffers)
        elif kind in ("CpCommit", "CpWait"):
            changed["group"] = self.rings[value.group]
        elif kind == "Stmt":
            changed["target"] = self.names.get(value.target, value.target)
        if "scaled" in changed:
            changed["scaled"] = self.names.get(value.scaled, value.scaled)
        return dataclasses.replace(value, **changed)


def scheduled(program: Program, signature: Signature, config: HopperConfig) -> Schedule:
    plan = hopper.stage(program, signature, SM90, hopper.output_pieces(config, signature, SM90))
    return hopper.allocate(hopper.synchronize(hopper.expand(plan, config.slots), config.turns))


@pytest.mark.parametrize("policy", FoldPolicy, ids=lambda p: p.value)
@pytest.mark.parametrize("order", [OVERLAPPED, BEHIND, OWN], ids=["overlapped", "behind", "own"])
@pytest.mark.parametrize("variant", ["causal", "capped window"])
def test_passes_name_no_value(variant: str, order: Any, policy: FoldPolicy) -> None:
    """The schedule of a program with other names is the schedule with other names."""
    specs = {"causal": CAUSAL, "capped window": Attention(mask=sliding_window(300), score=softcap(5.0))}
    same_by_other_names(specs[variant], ordered(order, policy), 16)


@pytest.mark.parametrize("alignment", [2, 8])
def test_nor_where_threads_copy(alignment: int) -> None:
    same_by_other_names(CAUSAL, ordered(OVERLAPPED, FoldPolicy.REFERENCE), alignment)


def same_by_other_names(spec: Attention, config: HopperConfig, alignment: int) -> None:
    signature = Signature(IoType.BF16, 64, 64, alignment)
    program = level("place", spec, config, 64)
    assert isinstance(program, Program)
    rename = Renaming(program)
    renamed = rename(program)
    assert not {v.name for v in renamed.values} & {v.name for v in program.values}
    assert any(isinstance(op, ContractTile) and op.d.name == "z_rO" for op in renamed.ops())
    plain = scheduled(program, signature, config)
    want, got = rename(plain), scheduled(renamed, signature, config)
    assert str(want) != str(plain)
    assert str(got) == str(want)


def test_renaming_reaches_all() -> None:
    """The renaming itself: targets, operands and barriers; what it gives is a legal schedule."""
    rename = Renaming(level("place"))
    renamed = rename(level("allocate"))
    text = str(renamed)
    for word in ("rS", "sK", "need", "K.full", "l_t"):
        assert f"={word}" not in text
        assert f" {word} " not in text
    verify(renamed)
