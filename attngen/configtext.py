"""Configurations as texts: what `str` gives, and less where the rest is as usual."""

from __future__ import annotations

import re
from dataclasses import replace

from attngen.config import SUMS_FLAGS, AnyConfig, Config, FoldPolicy, HopperConfig, HopperSumsConfig, SumsConfig
from attngen.errors import SpecError

_CONFIG = re.compile(r"m(\d+)n(\d+)w(\d+)(?: ?s(\d+))?(?: ?c(?:tas)?(\d+))?")
_HOPPER = re.compile(
    r"m(?P<m>\d+)n(?P<n>\d+)g(?P<groups>\d+)(?: ?s(?P<slots>\d+))?"
    rf"(?: (?P<policy>{'|'.join(p.value for p in FoldPolicy)}))?(?: order (?P<order>(?:\d\+?)+))?(?P<turns> turns)?"
)
_HOPPER_SUMS = re.compile(
    r"m(?P<m>\d+)n(?P<n>\d+)g(?P<groups>\d+)(?: ?s(?P<slots>\d+))? (?P<maps>split|joint)"
    rf"(?P<flags>(?: (?:{'|'.join(SUMS_FLAGS)}))*)"
)


def parse_config(text: str, argument: str = "config") -> AnyConfig:
    """A configuration as `explain` prints it; `argument`: where it was given, for errors.

    `m128n64w4 s1 ctas2`: rows, keys, warps, stages, CTAs an SM. `m128n128g2 s2 anticipated order 01+ turns`: rows,
    keys, warpgroups, slots, policy of the fold, the products of a step in their order (`+`: of the tile before), turns
    on the tensor cores."""
    words = " ".join(text.split())
    if found := _CONFIG.fullmatch(words):
        return Config(*(int(x) if x else 1 for x in found.groups()))
    if found := _HOPPER.fullmatch(words):
        return _hopper(text, found, argument)
    raise SpecError(
        f"{argument}: {text!r} is not understood. Allowed: as `attngen explain` prints one, m128n64w4 with s1 (stages) "
        "and c2 (CTAs an SM) behind it, or 'm128n128g2 s2 reference order 01+ turns'"
    )


def _hopper(text: str, found: re.Match[str], argument: str) -> HopperConfig:
    """What is left out behind the tile is as in `HopperConfig`, but turns are taken only where the text says so."""
    config = HopperConfig(int(found["groups"]), int(found["n"]), turns=found["turns"] is not None)
    _check_rows(text, found, argument, config)
    if found["slots"]:
        config = replace(config, slots=int(found["slots"]))
    if found["policy"]:
        config = replace(config, policy=FoldPolicy(found["policy"]))
    if found["order"]:
        products = re.findall(r"(\d)(\+?)", found["order"])
        issue = tuple(int(n) for n, _ in products)
        later = {int(n) for n, plus in products if plus}
        config = replace(config, issue=issue, stages=tuple(int(n in later) for n in range(len(issue))))
    return config


def parse_sums(text: str, argument: str = "config") -> SumsConfig:
    """A configuration of a kernel of gradients, as `explain` prints it.

    `m128n32w4 s2 ctas2`: rows of the axis that it owns, rows of a streamed tile, warps, stages, CTAs an SM.
    `m128n128g2 s2 split turns unroll`: warpgroups and slots; weights in two maps (`split`) or in one (`joint`);
    turns on the tensor cores, a loop that is written out; `merged` where the role that adds parts up in memory issues
    the copies; `short` where tiles that one step alone reads have a slot less."""
    words = " ".join(text.split())
    if found := _CONFIG.fullmatch(words):
        return Config(*(int(x) if x else 1 for x in found.groups()))
    if found := _HOPPER_SUMS.fullmatch(words):
        config = HopperSumsConfig(
            int(found["groups"]), int(found["n"]), int(found["slots"] or 2), found["maps"] == "split",
            **dict.fromkeys(found["flags"].split(), True),
        )  # fmt: skip
        _check_rows(text, found, argument, config)
        return config
    raise SpecError(
        f"{argument}: {text!r} is not understood for gradients. Allowed: as `kernel.backward().explain()` prints one, "
        "'m128n32w4 s2 ctas2' or 'm128n64g2 s2 split turns unroll' (split or joint; then any "
        f"of {', '.join(SUMS_FLAGS)})"
    )


def _check_rows(text: str, found: re.Match[str], argument: str, config: HopperConfig | HopperSumsConfig) -> None:
    if config.block_m != int(found["m"]):
        raise SpecError(
            f"{argument}: {text!r} has m{found['m']}. Allowed for g{config.warpgroups}: m{config.block_m}, 64 rows for "
            "each warpgroup"
        )
