"""Reads the machine code of a cubin through nvdisasm: instruction counts, and local-memory traffic inside
loops."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from attngen.errors import CompileError, MissingToolError

_WHEEL_GLOBS = ("nvidia/cu13/bin/nvdisasm", "nvidia/cuda_nvdisasm/bin/nvdisasm")
_SYSTEM = "/usr/local/cuda/bin/nvdisasm"
_SECTION = re.compile(r"^\.text\.(\S+):$", re.MULTILINE)
_LABEL = re.compile(r"^([.$][\w.$]+):$")
_INSTRUCTION = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(@\S+\s+)?([A-Z][\w.]*)\s*(.*?)\s*;")
_REFERENCE = re.compile(r"[.$][\w.$]+")
_BARRIER = re.compile(r"\bB\d+\b")
# Instructions after which the next one does not run, unless they are predicated.
_LEAVES = frozenset({"BRA", "BRX", "JMP", "JMX", "EXIT", "RET", "BSYNC", "KILL", "BPT"})
_JUMPS = frozenset({"BRA", "BRX", "JMP", "CALL"})
_LOCAL_MEMORY = frozenset({"STL", "LDL"})
_TENSOR_CORE = frozenset({"HMMA", "HGMMA", "QGMMA", "IMMA", "IGMMA", "DMMA"})

if TYPE_CHECKING:
    import networkx as nx


@dataclass(frozen=True)
class Instruction:
    """One machine instruction. `targets` are the addresses its operands name."""

    address: int
    predicated: bool
    opcode: str
    operands: str
    targets: tuple[int, ...]

    @property
    def mnemonic(self) -> str:
        """The opcode without its modifiers."""
        return self.opcode.split(".", 1)[0]


@dataclass(frozen=True)
class LoopSpill:
    """A local-memory access inside a loop, with the range of the innermost loop around it.

    `hot`: no tensor-core loop is nested inside that loop. The body of a persistent kernel is one loop over
    work items; a spill between two work items is cheap, one in the loop over tiles is not."""

    address: int
    opcode: str
    loop_start: int
    loop_end: int
    hot: bool


def find_nvdisasm() -> Path:
    """The disassembler. Raises MissingToolError with the command that installs it."""
    for pattern in _WHEEL_GLOBS:
        for root in sys.path:
            path = Path(root or ".") / pattern
            if path.is_file():
                return path
    found = shutil.which("nvdisasm") or shutil.which(_SYSTEM)
    if found is None:
        raise MissingToolError("nvdisasm was not found. Install it with `pip install nvidia-cuda-nvdisasm`.")
    return Path(found)


def disassemble(cubin: bytes, symbol: str) -> tuple[Instruction, ...]:
    """The instructions of one kernel in order of address."""
    code = _kernels(_listing(cubin))
    if symbol not in code:
        raise CompileError(f"the binary has no kernel {symbol}; it has {', '.join(code) or 'none'}")
    return _parse(code[symbol])


def sass_counts(cubin: bytes, symbol: str) -> Mapping[str, int]:
    """How often each mnemonic stands in the code of a kernel."""
    return Counter(instruction.mnemonic for instruction in disassemble(cubin, symbol))


def spills_in_loops(cubin: bytes, symbol: str) -> tuple[LoopSpill, ...]:
    """Every access to local memory that lies in a loop, in order of address."""
    code = disassemble(cubin, symbol)
    loops = sorted(_loops(code), key=len)
    tensor = {item.address for item in code if item.mnemonic in _TENSOR_CORE}
    spills: list[LoopSpill] = []
    for item in code:
        if item.mnemonic not in _LOCAL_MEMORY:
            continue
        around = next((loop for loop in loops if item.address in loop), None)
        if around is not None:
            hot = not any(loop < around and loop & tensor for loop in loops)
            spills.append(LoopSpill(item.address, item.opcode, min(around), max(around), hot))
    return tuple(spills)


@lru_cache(maxsize=8)
def _listing(cubin: bytes) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(find_nvdisasm()), "-c", file.name]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise MissingToolError(
            f"nvdisasm could not read the binary: {done.stderr.strip()}. It is older than the compiler: install a "
            "newer one with `pip install -U nvidia-cuda-nvdisasm`."
        )
    return done.stdout


@lru_cache(maxsize=8)
def _kernels(listing: str) -> Mapping[str, str]:
    sections = _SECTION.split(listing)
    return dict(zip(sections[1::2], sections[2::2], strict=True))


def _parse(listing: str) -> tuple[Instruction, ...]:
    rows: list[tuple[int, bool, str, str]] = []
    labels: dict[str, int] = {}
    waiting: list[str] = []
    for line in listing.splitlines():
        if line.startswith("//-----"):  # the next section
            break
        label = _LABEL.match(line)
        if label:
            waiting.append(label.group(1))
            continue
        match = _INSTRUCTION.match(line)
        if match:
            address = int(match.group(1), 16)
            labels.update((name, address) for name in waiting)
            waiting.clear()
            rows.append((address, match.group(2) is not None, match.group(3), match.group(4)))
    return tuple(
        Instruction(
            address,
            predicated,
            opcode,
            operands,
            tuple(labels[name] for name in _REFERENCE.findall(operands) if name in labels),
        )
        for address, predicated, opcode, operands in rows
    )


def _loops(code: Sequence[Instruction]) -> list[frozenset[int]]:
    """Natural loops as sets of addresses. A jump backwards alone is no loop: slow paths lie behind the code
    they return to. It is one where its target dominates it."""
    import networkx as nx  # only where machine code is looked at: its import takes a third of a second

    graph = _flow(code)
    dominators = nx.immediate_dominators(graph, code[0].address)
    bodies: dict[int, set[int]] = {}
    for source, head in graph.edges:
        if head <= source and _dominates(dominators, head, source):
            body = bodies.setdefault(head, {head})
            stack = [source]
            while stack:
                node = stack.pop()
                if node not in body:
                    body.add(node)
                    stack.extend(graph.predecessors(node))
    return [frozenset(body) for body in bodies.values()]


def _dominates(dominators: Mapping[int, int | None], head: int, node: int) -> bool:
    # The first node has no dominator but itself; versions of networkx differ in whether they list it.
    current: int | None = node
    while current is not None and current != head:
        above = dominators.get(current)
        current = None if above == current else above
    return current == head


def _flow(code: Sequence[Instruction]) -> nx.DiGraph[int]:
    import networkx as nx

    graph: nx.DiGraph[int] = nx.DiGraph()
    graph.add_nodes_from(item.address for item in code)
    # A BSSY names the place where the warp meets again; the BSYNC of the same barrier goes there.
    meets = {barrier: item.targets for item in code if item.mnemonic == "BSSY" for barrier in _barriers(item)}
    for item, following in zip(code, [*code[1:], None], strict=True):
        targets = list(item.targets) if item.mnemonic in _JUMPS else []
        if item.mnemonic == "BSYNC":
            targets += [target for barrier in _barriers(item) for target in meets.get(barrier, ())]
        if following is not None and (item.mnemonic not in _LEAVES or _conditional(item)):
            targets.append(following.address)
        graph.add_edges_from((item.address, target) for target in targets)
    return graph


def _barriers(item: Instruction) -> list[str]:
    return _BARRIER.findall(item.operands)


def _conditional(item: Instruction) -> bool:
    # A jump is guarded by a predicate in front (@P0 BRA) or, on the uniform path, among its operands (BRA.U
    # UP0, x); BRA.DIV leaves only when the warp has diverged.
    return item.predicated or (item.mnemonic == "BRA" and not item.operands.startswith("`"))
