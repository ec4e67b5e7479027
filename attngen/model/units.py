"""The units that streams share on a sub-partition of an SM: how fast each goes, and how busy each unit is.

A stream that computes goes as fast as its own instructions allow, unless a unit is asked for more than it has: then all
who use it slow down alike. Issue slots and operand ports are shared with the products by weight."""

from __future__ import annotations

from dataclasses import dataclass

from attngen.model.actions import Burst
from attngen.model.rates import Rates

UNITS = ("tensor", "mufu", "alu", "fma", "shared", "ports", "copy")


@dataclass
class Running:
    """A burst in execution: the part of it that is left, and how much of it a cycle does. `fill`: see Stream."""

    burst: Burst
    fill: float
    began: float
    left: float = 1.0
    speed: float = 0.0


class Units:
    def __init__(self, rates: Rates) -> None:
        self.product_ports, self.product_weight = rates.product_ports, rates.product_weight
        self.busy = dict.fromkeys(UNITS, 0.0)

    def share(self, running: list[Running], products: bool) -> float:
        """Sets the speed of each burst; returns that of the products on the tensor cores, at most 1."""
        slow = alu = fma = shared = tensor = 0.0
        for r in running:
            b = r.burst
            r.speed = 1 / (b.beside if products else b.alone)
            use = r.speed * r.fill
            slow += use * (b.slow_beside if products else b.slow)
            alu += use * b.alu
            fma += use * b.fma
            shared += use * b.shared
            tensor += use * b.tensor
        ports = 0.0
        crowded = max(slow, alu, fma, shared, tensor) > 1
        for r in running:
            b = r.burst
            if crowded:
                r.speed /= max(
                    1.0, slow if b.slow else 0.0, alu if b.alu else 0.0, fma if b.fma else 0.0,
                    shared if b.shared else 0.0, tensor if b.tensor else 0.0,
                )  # fmt: skip
            ports += r.speed * r.fill * b.ports
        if ports + (self.product_ports if products else 0.0) <= 1:
            return 1.0
        return self._divide(running, products)

    def _divide(self, running: list[Running], products: bool) -> float:
        """The ports by weight: who wants less than its share gets what it wants, the rest is divided again."""
        wanted, weight = (self.product_ports, self.product_weight) if products else (0.0, 0.0)
        capacity, hungry = 1.0, list(running)
        while True:
            unit = capacity / (sum(r.fill for r in hungry) + weight)
            content = [r for r in hungry if r.speed * r.burst.ports <= unit]
            if weight and wanted <= unit * weight:
                capacity, weight = capacity - wanted, 0.0
            elif not content:
                break
            for r in content:
                capacity -= r.speed * r.burst.ports * r.fill
                hungry.remove(r)
            if not hungry and not weight:
                return 1.0
        for r in hungry:
            r.speed = unit / r.burst.ports
        return unit * weight / wanted if weight else 1.0

    def account(self, running: list[Running], cycles: float, products: bool, speed: float) -> None:
        """What the units did in so many cycles at the speeds of now."""
        busy = self.busy
        if products:
            busy["tensor"] += cycles * speed
            busy["ports"] += cycles * speed * self.product_ports
        for r in running:
            b, use = r.burst, r.speed * r.fill * cycles
            busy["mufu"] += use * (b.slow_beside if products else b.slow)
            busy["alu"] += use * b.alu
            busy["fma"] += use * b.fma
            busy["shared"] += use * b.shared
            busy["tensor"] += use * b.tensor
            busy["ports"] += use * b.ports
