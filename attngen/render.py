"""Jinja: macros by op name, no decisions. Templates may hold holes and `for` over prepared lists, nothing else."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import jinja2

from attngen.resources import templates_dir

Argument = str | int | Sequence[str] | Sequence[Mapping[str, str | Sequence[str]]]


@cache
def environment() -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(templates_dir()), undefined=jinja2.StrictUndefined, autoescape=False,
        trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=False,
    )  # fmt: skip


@cache
def macros(target: str) -> Mapping[str, jinja2.runtime.Macro]:
    """All macros of a target by name: common ones and its own."""
    found: dict[str, jinja2.runtime.Macro] = {}
    for file in ("common", target):
        module = environment().get_template(f"ops/{file}.jinja").module
        found.update({n: m for n, m in vars(module).items() if isinstance(m, jinja2.runtime.Macro)})
    return found


def call(target: str, macro: str, arguments: Mapping[str, Argument]) -> list[str]:
    """The lines of one macro."""
    text = str(macros(target)[macro](**arguments))
    return text.strip("\n").split("\n")


@dataclass(frozen=True)
class Prelude:
    head: str
    functions: tuple[tuple[str, str], ...]  # name, text


# A target's kernels use the primitives of the older ones, too.
PRELUDES = {"sm80": ("common", "sm80"), "sm90": ("common", "sm80", "sm90")}


@cache
def prelude_of(target: str) -> Prelude:
    """The prelude files of a target, cut into the head that is always there and one entry a function or struct."""
    head, functions = "", []
    for file in PRELUDES[target]:
        text = (templates_dir() / "prelude" / f"{file}.cuh").read_text()
        start, _, rest = text.partition("// ---- primitives\n")
        if file == "common":
            head = start.strip()
        for block in re.split(r"\n\s*\n", rest.strip()):
            name = re.search(r"DI [\w ]+?[ *&]+(\w+)\(|struct (?:alignas\(\d+\) )?(\w+)", block)
            assert name, f"no function in a block of {file}.cuh: {block!r}"
            functions.append((name[1] or name[2], block.strip()))
    return Prelude(head, tuple(functions))


def select_prelude(target: str, body: str) -> str:
    """The head and the functions that `body` calls, in the order of the files; then its warpgroup products."""
    prelude = prelude_of(target)
    words = set(re.findall(r"\w+", body))
    wanted = words | {w for n, text in prelude.functions if n in words for w in re.findall(r"TensorMap", text)}
    used = [text for name, text in prelude.functions if name in wanted]
    products = set(re.findall(r"wgmma_m64n(\d+)k16_(ss|rs)_(bf16|f16)", body))
    used += [wgmma(int(n), a, elem) for n, a, elem in sorted(products, key=lambda x: (x[1], x[2], int(x[0])))]
    return "\n\n".join([prelude.head, *used]) + "\n"


def wgmma(n: int, a: str, elem: str) -> str:
    """The wrapper of wgmma.m64n{n}k16: n/2 accumulator registers, a from shared memory (ss) or four registers (rs)."""
    count = n // 2
    first = count + (2 if a == "ss" else 5)  # operand number of `accumulate`
    place = {
        "a": f"%{count}" if a == "ss" else braced(range(count, count + 4)), "b": f"%{first - 1}",
        "accumulate": f"%{first}",
    }  # fmt: skip
    tiles = ["transpose_a", "transpose"] if a == "ss" else ["transpose"]  # of the operands in shared memory
    place |= {name: f"%{first + 1 + k}" for k, name in enumerate(tiles)}
    macro = getattr(environment().get_template("prelude/wgmma.cuh.jinja").module, a)
    return str(macro(
        name=f"wgmma_m64n{n}k16_{a}_{elem}", instruction=f"wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{elem}.{elem}",
        count=count, registers=braced(range(count)),
        outputs=", ".join(f'"+f"(d[{x}])' for x in range(count)), **place,
    )).strip()  # fmt: skip


def braced(operands: Iterable[int]) -> str:
    """A list of registers as PTX takes it, by the numbers of the operands."""
    return "{" + ", ".join(f"%{x}" for x in operands) + "}"
