"""attngen: a compiler that generates specialised attention kernels."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from attngen import errors
    from attngen.api import attention, compile, precompile
    from attngen.config import Config, FoldPolicy, HopperConfig
    from attngen.functions import abs, exp, floor, log, maximum, minimum, sigmoid, sqrt, tanh, where
    from attngen.merge import merge
    from attngen.spec import Attention
    from attngen.variants import alibi, bias, causal, document, full, prefix_lm, sliding_window, softcap, window

__version__ = "0.1.0"

# The names are loaded at first use: the command line then starts without torch.
_HOME = {
    "attngen.api": ("attention", "compile", "precompile"),
    "attngen.config": ("Config", "FoldPolicy", "HopperConfig"),
    "attngen.merge": ("merge",),
    "attngen.functions": ("abs", "exp", "floor", "log", "maximum", "minimum", "sigmoid", "sqrt", "tanh", "where"),
    "attngen.spec": ("Attention",),
    "attngen.variants": (
        "alibi", "bias", "causal", "document", "full", "prefix_lm", "sliding_window", "softcap", "window",
    ),
}  # fmt: skip


def __getattr__(name: str) -> object:
    if name == "errors":
        return import_module("attngen.errors")
    for module, names in _HOME.items():
        if name in names:
            value: object = getattr(import_module(module), name)
            globals()[name] = value
            return value
    raise AttributeError(f"module 'attngen' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__


__all__ = [
    "Attention",
    "Config",
    "FoldPolicy",
    "HopperConfig",
    "__version__",
    "abs",
    "alibi",
    "attention",
    "bias",
    "causal",
    "compile",
    "document",
    "errors",
    "exp",
    "floor",
    "full",
    "log",
    "maximum",
    "merge",
    "minimum",
    "precompile",
    "prefix_lm",
    "sigmoid",
    "sliding_window",
    "softcap",
    "sqrt",
    "tanh",
    "where",
    "window",
]
