"""Compiled kernels on disk, addressed by what they were made from.

An entry is a directory that a person can read: kernel.cu, kernel.cubin, build.log, manifest.json. The cache
proper names it by source, flags and exact compiler. A precompiled folder names it by source and flags alone,
so that it can be used on a machine that has no compiler."""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import tempfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import platformdirs
from filelock import FileLock

from attngen import env
from attngen.runtime.compile import Artifact, Resources, compile_cuda, flags_for, require_symbols
from attngen.runtime.nvrtc import find_nvrtc

SCHEMA = 2

_SOURCE, _CUBIN, _LOG, _MANIFEST = "kernel.cu", "kernel.cubin", "build.log", "manifest.json"
_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Unit:
    """One translation unit to compile: its text, the architecture, the kernels it must define."""

    source: str
    arch: str
    symbols: tuple[str, ...]


def cache_directory(cache_dir: Path | None = None) -> Path:
    """Where compiled kernels go: the argument, else ATTNGEN_CACHE_DIR, else the user's cache directory."""
    return cache_dir or env.CACHE_DIR.get() or Path(platformdirs.user_cache_dir("attngen"))


def source_key(source: str, arch: str) -> str:
    """Name of an entry in a precompiled folder."""
    return _digest(str(SCHEMA), *flags_for(arch), source)


def entry_key(source: str, arch: str, compiler: str) -> str:
    """Name of an entry in the cache."""
    return _digest(compiler, source_key(source, arch))


def compile_cached(
    source: str, *, arch: str, symbols: tuple[str, ...], cache_dir: Path | None = None
) -> Artifact:
    """The compiled kernel from a precompiled folder, from the cache, or from the compiler, in this order.

    Any number of processes that ask for one kernel at once compile it once: the rest wait for the lock and
    read."""
    artifact = _precompiled(source_key(source, arch))
    if artifact is None:
        artifact = _cached(source, arch, symbols, cache_directory(cache_dir))
    require_symbols(symbols, artifact.resources)
    return artifact


def precompile_into(folder: Path, units: Iterable[Unit]) -> tuple[Path, ...]:
    """Fills a folder that can be copied anywhere and named in ATTNGEN_PRECOMPILED. Returns the entries, in
    order."""
    entries: list[Path] = []
    for unit in units:
        entry = folder / source_key(unit.source, unit.arch)
        with _lock(entry):
            if read_entry(entry) is None:
                artifact = compile_cuda(unit.source, arch=unit.arch, symbols=unit.symbols)
                _write_entry(entry, unit.source, artifact)
        entries.append(entry)
    return tuple(entries)


def read_entry(entry: Path) -> Artifact | None:
    """The artifact in an entry, or None when there is none or it is not whole."""
    try:
        manifest = json.loads((entry / _MANIFEST).read_text(encoding="utf-8"))
        artifact = Artifact(
            cubin=(entry / _CUBIN).read_bytes(),
            log=(entry / _LOG).read_text(encoding="utf-8"),
            resources={name: Resources(**used) for name, used in manifest["resources"].items()},
            arch=manifest["arch"],
            compiler=manifest["compiler"],
            seconds=manifest["seconds"],
            instructions=manifest["instructions"],
        )
        whole = artifact.digest == manifest["cubin_sha256"]
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        _logger.warning("the cache entry %s cannot be read and is not used: %s", entry, error)
        return None
    if not whole:
        _logger.warning("the cache entry %s is damaged and is not used", entry)
        return None
    return artifact


def _precompiled(key: str) -> Artifact | None:
    found = (read_entry(folder / key) for folder in env.PRECOMPILED.get())
    return next((artifact for artifact in found if artifact is not None), None)


def _cached(source: str, arch: str, symbols: tuple[str, ...], directory: Path) -> Artifact:
    compiler = find_nvrtc()
    entry = directory / entry_key(source, arch, compiler.name)
    artifact = read_entry(entry)
    if artifact is not None:
        return artifact
    with _lock(entry):
        artifact = read_entry(entry)  # another process may have been first
        if artifact is None:
            artifact = compile_cuda(source, arch=arch, symbols=symbols, lib=compiler)
            _write_entry(entry, source, artifact)
        return artifact


def _write_entry(entry: Path, source: str, artifact: Artifact) -> None:
    """Writes a whole entry or none. The caller holds the entry's lock."""
    manifest = {
        "schema": SCHEMA,
        "arch": artifact.arch,
        "compiler": artifact.compiler,
        "flags": flags_for(artifact.arch),
        "seconds": round(artifact.seconds, 3),
        "cubin_sha256": artifact.digest,
        "resources": {name: asdict(used) for name, used in artifact.resources.items()},
        "instructions": artifact.instructions,
    }
    work = Path(tempfile.mkdtemp(prefix=f".{entry.name[:8]}-", dir=entry.parent))
    try:
        work.chmod(0o755)  # mkdtemp's 0700 would hide an entry of a shared folder from its other users
        (work / _SOURCE).write_text(source, encoding="utf-8")
        (work / _CUBIN).write_bytes(artifact.cubin)
        (work / _LOG).write_text(artifact.log, encoding="utf-8")
        (work / _MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
        if entry.exists():  # what is there was found damaged
            shutil.rmtree(entry)
        work.rename(entry)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise


def _lock(entry: Path) -> FileLock:
    entry.parent.mkdir(parents=True, exist_ok=True)
    return FileLock(entry.with_name(f".{entry.name}.lock"))


def _digest(*parts: str) -> str:
    state = hashlib.sha256()
    for part in parts:
        data = part.encode()
        # Lengths, so that no two lists of parts join to one text.
        state.update(len(data).to_bytes(8, "little"))
        state.update(data)
    return state.hexdigest()
