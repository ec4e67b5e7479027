"""The machine model: what a schedule costs on a chip, as a bound (`bounds`) and as a simulation (`estimate`)."""

from attngen.model.estimate import Estimate, estimate
from attngen.model.rates import Rates, rates
from attngen.model.simulate import Span

__all__ = ["Estimate", "Rates", "Span", "estimate", "rates"]
