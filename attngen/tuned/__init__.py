"""Configurations that were measured fastest among the machine model's first.

What decides is the score, the head dims and the type; masks change how many tiles there are, not what a tile costs. The
model's ranking follows behind, for a compiler that refuses the first."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

from attngen.config import FoldPolicy, HopperConfig
from attngen.expr import SCORE
from attngen.exprtext import show
from attngen.signature import Signature
from attngen.spec import Normalizer, Variant
from attngen.target import Target

FOLDER = Path(__file__).parent


def key_of(variant: Variant, signature: Signature) -> str:
    """The word for a score, and the head dims."""
    plain = variant.score is SCORE and variant.scale_positive and variant.normalizer is Normalizer.SOFTMAX
    text = f"{show(variant.score)} {variant.scale_positive} {variant.normalizer.value}"
    word = "plain" if plain else hashlib.sha256(text.encode()).hexdigest()[:16]
    return f"{word} {signature.head_dim_qk} {signature.head_dim_v}"


def written(config: HopperConfig) -> dict[str, Any]:
    return {**asdict(config), "policy": config.policy.value}


def read(entry: Mapping[str, Any]) -> HopperConfig:
    fields: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in entry.items()}
    fields["policy"] = FoldPolicy(entry["policy"])
    return HopperConfig(**fields)


@cache
def shipped(target: Target) -> Mapping[str, HopperConfig]:
    """By key; empty for a target without a table."""
    path = FOLDER / f"{target.name}.json"
    if not path.exists():
        return {}
    return {key: read(entry["config"]) for key, entry in json.loads(path.read_text())["entries"].items()}


def lookup(variant: Variant, signature: Signature, target: Target) -> HopperConfig | None:
    return shipped(target).get(key_of(variant, signature))
