"""What this machine has measured: a table a target, device and compiler in the folder of compiled kernels, in the form
of those that come with the package (attngen.tuned), and looked up before them for calls on that device.

A measurement here is of one variant, mask and type included; nothing of it decides about the text that `compile`
and `generate` write, which is the same on every machine."""

from __future__ import annotations

import logging
import os
import re
import tempfile
import time
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from pathlib import Path

from filelock import FileLock

from attngen import __version__, tuned
from attngen.config import AnyConfig
from attngen.errors import MissingToolError, SignatureError
from attngen.pipelines import ranked
from attngen.runtime.cache import cache_directory
from attngen.runtime.load import device_facts
from attngen.runtime.nvrtc import find_nvrtc
from attngen.signature import Signature
from attngen.spec import Variant
from attngen.target import Feature, Target

FOLDER = "tuned"
WHAT = "fastest of the first in rank, milliseconds by configuration"
_log = logging.getLogger("attngen")


@dataclass(frozen=True)
class Machine:
    """What a measurement holds for."""

    device: str
    compiler: str

    def path(self, target: Target) -> Path:
        words = f"{target.name} {self.device} {self.compiler} attngen {__version__}"
        return cache_directory() / FOLDER / f"{re.sub(r'[^A-Za-z0-9.]+', '-', words)}.json"


@cache
def machine(device_index: int) -> Machine | None:
    """None without a compiler: nothing can be measured then, and what is precompiled is used as it is."""
    try:
        return Machine(device_facts(device_index).name, find_nvrtc().name)
    except MissingToolError:
        return None


def any_kept() -> bool:
    """Whether anything was ever measured: the first call of a process need not ask for the compiler's version else."""
    return (cache_directory() / FOLDER).is_dir()


def key_of(variant: Variant, signature: Signature) -> str:
    s = signature
    return f"{variant.variant_key()} {s.head_dim_qk} {s.head_dim_v} {s.dtype.value} align{s.alignment}"


def table(on: Machine, target: Target) -> tuned.Table | None:
    """As it is on disk now."""
    path = on.path(target)
    try:
        changed = path.stat()
    except FileNotFoundError:
        return None
    return _table(path, changed.st_mtime_ns, changed.st_ino)


@lru_cache(maxsize=16)
def _table(path: Path, changed: int, inode: int) -> tuned.Table | None:
    try:
        return tuned.table_of(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SignatureError) as error:
        _log.warning("the measurements in %s cannot be read and are not used: %r", path, error)
        return None


def lookup(on: Machine, variant: Variant, signature: Signature, target: Target) -> AnyConfig | None:
    found = table(on, target)
    entry = found.entries.get(key_of(variant, signature)) if found else None
    return entry.config if entry else None


def remember(on: Machine, variant: Variant, signature: Signature, target: Target, entry: tuned.Entry) -> Path:
    """Writes the whole table or nothing; any number of processes may do so at once."""
    path = on.path(target)
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(path.with_name(f".{path.name}.lock")):
        old = table(on, target) or tuned.Table(on.device, on.compiler, "", WHAT, {})
        new = replace(old, date=time.strftime("%Y-%m-%d")).with_entry(key_of(variant, signature), entry)
        handle, name = tempfile.mkstemp(prefix=f".{path.stem}-", dir=path.parent)
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(tuned.table_text(new))
            Path(name).chmod(0o644)  # mkstemp's 0600 would hide a shared folder's table from its other users
            Path(name).replace(path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
    return path


def origin(
    variant: Variant, signature: Signature, target: Target, config: AnyConfig, on: Machine | None = None
) -> str:
    """Where a configuration comes from: a measurement on the machine `on`, one that is shipped, a place in rank, or the
    caller."""
    own = table(on, target) if on else None
    entry = own.entries.get(key_of(variant, signature)) if own else None
    here = (own, entry) if own and entry else None
    for words, known in (
        ("measured here", here),
        ("shipped measurement", tuned.found(variant, signature, target)),
    ):
        if known and known[1].config == config:
            return f"{words}: {known[0].say(known[1])}"
    every = ranked(variant, signature, target)
    if config not in every:
        return "given by the caller"
    by = "the machine model" if target.has(Feature.WGMMA) else "rules"
    return f"{by}: place {every.index(config) + 1} of {len(every)}; not measured"
