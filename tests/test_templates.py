"""Guards on templates, prelude and generated text: decisions in Python, spelling in templates, PTX in the prelude."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import jinja2
import pytest
import torch
from jinja2 import nodes

from attngen import lowering
from attngen.ir import ops
from attngen.ir.ops import OPS, kind_of
from attngen.kernel import Kernel, kernel_for
from attngen.render import environment, macros, prelude_of
from attngen.resources import templates_dir
from attngen.signature import IoType, Signature
from attngen.spec import Attention
from attngen.target import target
from attngen.variants import alibi, causal, document, sliding_window, softcap

TEMPLATES = sorted(templates_dir().rglob("*.jinja"))
PRELUDES = sorted((templates_dir() / "prelude").glob("*.cuh"))
TARGETS = tuple(p.stem for p in PRELUDES if p.stem != "common")

# What a template may consist of: holes, macros with plain parameters, and loops over prepared lists.
ALLOWED = (nodes.Template, nodes.Output, nodes.TemplateData, nodes.Macro, nodes.For, nodes.Name, nodes.Getattr)
LONGEST_MACRO = 25


def descend(node: nodes.Node) -> Iterator[nodes.Node]:
    yield node
    for child in node.iter_child_nodes():
        yield from descend(child)


def forbidden(text: str) -> list[str]:
    """What a template holds beyond holes and loops over named lists."""
    found = []
    for node in descend(environment().parse(text)):
        if not isinstance(node, ALLOWED):
            found.append(f"line {node.lineno}: {type(node).__name__}")
        elif isinstance(node, nodes.For) and (
            not isinstance(node.iter, nodes.Name | nodes.Getattr) or node.test or node.else_ or node.recursive
        ):
            found.append(f"line {node.lineno}: a loop over something else than a list by its name")
        elif isinstance(node, nodes.Getattr) and not isinstance(node.node, nodes.Name):
            found.append(f"line {node.lineno}: a path of attributes")
        elif isinstance(node, nodes.Macro) and node.defaults:
            found.append(f"line {node.lineno}: {node.name} has a default, which is a decision")
    return found


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda p: p.name)
def test_templates_hold_holes_and_loops_only(path: Path) -> None:
    assert forbidden(path.read_text()) == []


@pytest.mark.parametrize(
    "text",
    [
        "{% if x %}a{% endif %}", "{{ 'a' if x else 'b' }}", "{{ x + 1 }}", "{{ x == 1 }}", "{{ x | upper }}",
        "{% set x = 1 %}",
        "{% for i in range(3) %}{{ i }}{% endfor %}", "{% for i in x if i %}{{ i }}{% endfor %}", "{{ x[0] }}",
        "{{ f(x) }}",
        "{% macro f(a, b=1) %}{{ a }}{% endmacro %}", "{% include 'a' %}", "{{ -x }}", "{{ x and y }}", "{{ x.y.z }}",
    ],
)  # fmt: skip
def test_the_guard_sees_each_decision(text: str) -> None:
    assert forbidden(text) != []


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda p: p.name)
def test_macros_are_short(path: Path) -> None:
    """The longest stay on one screen with their call in the generated text."""
    for name, body in re.findall(r"{% macro (\w+)\([^)]*\) %}\n(.*?){% endmacro %}", path.read_text(), re.DOTALL):
        lines = [line for line in body.splitlines() if not line.strip().startswith("{%")]
        assert len(lines) <= LONGEST_MACRO, f"{name} has {len(lines)} lines"


def test_a_missing_argument_is_an_error() -> None:
    assert environment().undefined is jinja2.StrictUndefined
    with pytest.raises(jinja2.UndefinedError):
        macros("sm80")["fill"](dst="rO", count=4)


# ---- ops and macros ----------------------------------------------------------------------------------------------

# Macros without an op of the same name: parts of a macro, control flow, and how work is found.
PARTS = {"map_rows", "map_cols", "map_elems", "add_element", "when", "tiles", "store_f32", "store_packed"}
PARTS |= {"load_pair", "store_pair", "sum_lanes"}
PARTS |= {"kernel_roles", "role", "items", "phase", "tiles_drained", "guard", "ring_armed", "ring_closed"}
PARTS |= {"tiles_alternating", "item_keys", "items_keys", "store_eights"}
# One op, several spellings: the place of an operand decides in Python.
SPELLINGS = {"mma_sync_ss": "mma_sync", "mma_sync_rs": "mma_sync", "mma_sync_ts": "mma_sync", "reduce_quad": "reduce"}
SPELLINGS |= {"st_packed": "st_frag", "cp_async_narrow": "cp_async", "st_tile_narrow": "st_tile"}
SPELLINGS |= {"sum_eights": "sum_rows", "st_matrix_packed": "st_frag", "mbar_arrive_after_warp": "mbar_arrive"}
SPELLINGS |= {"wgmma_ss": "wgmma", "wgmma_rs": "wgmma", "mbar_arrive_warp": "mbar_arrive", "st_matrix": "st_frag"}
SPELLINGS |= {"st_matrix_zeros": "st_frag"}


def lowering_trees(name: str = "") -> list[ast.Module]:
    """The files of lowering; of one target: without those of others."""
    others = {p.stem for p in TEMPLATES if p.parent.name == "ops"} - {name} if name else set()
    files = [p for p in sorted(Path(lowering.__file__).parent.glob("*.py")) if p.stem not in others]
    return [ast.parse(path.read_text()) for path in files]


def cases(name: str) -> set[str]:
    """Kinds of the ops that lowering has a case for."""
    arms = [n for tree in lowering_trees(name) for n in ast.walk(tree) if isinstance(n, ast.match_case)]
    patterns = [p for arm in arms for p in ast.walk(arm.pattern)]
    classes = {p.cls.attr for p in patterns if isinstance(p, ast.MatchClass) and isinstance(p.cls, ast.Attribute)}
    return {kind_of(getattr(ops, c)) for c in classes}


@pytest.mark.parametrize("name", TARGETS)
def test_each_macro_belongs_to_an_op(name: str) -> None:
    left = [m for m in macros(name) if m not in PARTS and not m.startswith("work_") and SPELLINGS.get(m, m) not in OPS]
    assert left == [], "name the macro after its op, or list it here with the reason"


@pytest.mark.parametrize("name", TARGETS)
def test_each_lowered_op_has_a_macro(name: str) -> None:
    spelled = {SPELLINGS.get(m, m) for m in macros(name)}
    assert cases(name) - spelled == set()
    assert spelled & set(OPS) - cases(name) == set(), "a macro that nothing calls"


# ---- the prelude -------------------------------------------------------------------------------------------------

# Not instructions: the type of a tensor map, and an empty asm for each register of an array.
TYPES = {"TensorMap"}
EMPTY = {"hold"}
CONTROL = re.compile(r"\b(if|else|for|while|do|switch|goto|case)\b")


def functions() -> list[tuple[str, str]]:
    return [(name, text) for t in TARGETS for name, text in prelude_of(t).functions]


def test_every_prelude_file_is_read() -> None:
    assert {p.stem for p in TEMPLATES if p.parent.name == "ops"} >= {"common", *TARGETS}
    assert len(functions()) > 40


@pytest.mark.parametrize(("name", "text"), functions(), ids=lambda x: x if x.isidentifier() else "")
def test_a_primitive_is_one_instruction(name: str, text: str) -> None:
    comment, _, code = text.partition("\n")
    assert re.match(r"// .{4}", comment), "a primitive says what it is and in which units"
    quoted = re.sub(r'"(?:[^"\\]|\\.)*"', '""', code)
    assert len(re.findall(r"\basm\b", quoted)) <= 1
    assert not CONTROL.search(quoted) or (name in EMPTY and 'asm volatile(""' in code)
    assert code.count("DI ") == (0 if name in TYPES else 1)


def test_prelude_includes_nothing() -> None:
    for path in PRELUDES:
        assert "#include" not in path.read_text(), path.name


# ---- generated text ----------------------------------------------------------------------------------------------

VARIANTS = {
    "causal": lambda: Attention(mask=causal()),
    "window_softcap": lambda: Attention(mask=causal() & sliding_window(100), score=softcap(20.0)),
    "alibi_sink": lambda: Attention(mask=causal(), score=alibi(torch.ones(2)), sink=torch.ones(2)),
    "document": lambda: Attention(mask=document(torch.arange(64) // 10)),
    "sigmoid": lambda: Attention(score=lambda s, b, h, i, j: torch.sigmoid(s), normalizer="none"),
}
NOT_IN_A_BODY = re.compile(
    r"\basm\b|__shared__|#include|\b(?:thread|block|grid)(?:Idx|Dim)\b|__syncthreads|__shfl|\?\?|\{\{|\{%"
)
C_WORDS = {"if", "while", "for", "return", "sizeof", "static_assert", "_Pragma", "__launch_bounds__"}


@cache
def generated(variant: str, head_dim: int, alignment: int) -> Kernel:
    spec = VARIANTS[variant]()
    return kernel_for(spec.variant, Signature(IoType.BF16, head_dim, head_dim, alignment), target("sm80"))


def code_of(kernel: Kernel) -> str:
    """The body without its comments, which show schedule ops and the user's expressions."""
    return re.sub(r"//[^\n]*", "", kernel.source.body)


GRID = [(v, d, a) for v in VARIANTS for d, a in ((64, 16), (40, 2), (128, 16))]


@pytest.mark.parametrize(("variant", "head_dim", "alignment"), GRID)
def test_the_body_speaks_to_the_machine_through_primitives(variant: str, head_dim: int, alignment: int) -> None:
    body = code_of(generated(variant, head_dim, alignment))
    assert NOT_IN_A_BODY.findall(body) == []
    called = {name for name in re.findall(r"\b([a-z_]\w*)(?:<\d+>)?\(", body) if name not in C_WORDS}
    known = {name for name, _ in functions()}
    kernels = {k.name for k in generated(variant, head_dim, alignment).schedule.kernels}
    assert called - known - kernels == set()


@pytest.mark.parametrize(("variant", "head_dim", "alignment"), GRID)
def test_the_file_holds_what_it_uses_and_no_more(variant: str, head_dim: int, alignment: int) -> None:
    source = generated(variant, head_dim, alignment).source
    assert "#include" not in source.text
    used = set(re.findall(r"\w+", code_of(generated(variant, head_dim, alignment))))
    for name, text in functions():
        assert (name in used) == (text in source.prelude), name


def test_every_op_has_its_comment_above_it() -> None:
    kernel = generated("window_softcap", 64, 16)
    comments = re.findall(r"^\s*// (\w+) (\w+)", kernel.source.body, re.MULTILINE)
    named = {op_id for op_id, kind in comments if kind in OPS}
    printed = set(re.findall(r"^\s+(\w+) (?:" + "|".join(OPS) + r")\b", str(kernel.schedule), re.MULTILINE))
    assert printed == named
    assert len(printed) > 20


def test_equal_input_gives_equal_bytes() -> None:
    first, second = (
        Kernel(s.variant, k.signature, k.target, k.levels).source.text
        for s, k in ((VARIANTS["causal"](), generated("causal", 64, 16)) for _ in range(2))
    )
    assert first == second == generated("causal", 64, 16).source.text


# ---- lower -------------------------------------------------------------------------------------------------------


def test_lowering_writes_no_control_flow() -> None:
    """It may write a declaration, an assignment or the argument of a macro; loops and branches are templates'."""
    nodes_of = [n for tree in lowering_trees() for n in ast.walk(tree)]
    documented = [n for n in nodes_of if isinstance(n, ast.Module | ast.ClassDef | ast.FunctionDef)]
    documentation = {id(n.body[0].value) for n in documented if isinstance(n.body[0], ast.Expr)}
    raised = {id(x) for n in nodes_of if isinstance(n, ast.Raise) for x in ast.walk(n)}
    texts = [
        (n.lineno, n.value) for n in nodes_of
        if isinstance(n, ast.Constant) and isinstance(n.value, str) and id(n) not in documentation | raised
    ]  # fmt: skip
    code = re.compile(
        r"\b(?:for|while|if|else|switch|do|return|goto|asm)\b\s*[({]|_Pragma|#pragma|__shared__|[;{}]\s*\n"
    )
    assert [(line, t) for line, t in texts if code.search(t)] == []
    assert len(texts) > 50
