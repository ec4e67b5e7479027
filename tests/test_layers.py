"""Imports go one way, and the lists of files that CONTRIBUTING gives are true."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import networkx as nx
import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "attngen"

# From the ground up; a module imports from its own layer and from those before it. The front end (what the user says)
# and the levels (`ir`) do not know each other: passes are the first to see both. An entry covers what is below it,
# unless a longer one does: the interpreter of a fold takes the monoid from the pass that derives it.
LAYERS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("ground", ("errors", "env", "resources", "progress", "layout", "target", "config", "configtext", "naming",
                "reads")),
    (
        "expressions",
        ("expr", "exprtext", "fold", "sums", "rows", "interval", "evaluate", "proxy", "once", "trace", "functions",
         "derivative", "polynomial"),
    ),
    ("specification", ("shared", "masks", "scores", "variants", "spec", "signature", "reference")),
    ("levels", ("ir",)),
    ("machine model", ("model",)),
    ("passes", ("passes",)),
    ("pipeline", ("tuned", "pipelines", "backward_pipeline", "ir.interpret")),
    ("text", ("params", "cprint", "render", "lowering", "lower", "predict")),
    ("machines", ("runtime", "emulator")),
    ("kernels", ("tensormap", "worktable", "arguments", "kernel", "measured", "execute", "plan", "gradient")),
    ("instruments", ("files", "golden", "trial", "gradient_trial", "commute", "faults", "doctor", "bench.timing")),
    (
        "operators",
        ("reads", "keywords", "dispatch", "batching", "ops", "tune", "merge", "prepare", "described", "api", "compat"),
    ),
    ("reports", ("draw", "bench")),
    ("command line", ("cli", "__main__")),
)
PACKAGES_OWN = {"__version__"}  # what a module may take from `attngen` itself, which imports everything


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


MODULES = {name_of(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def layer_of(module: str) -> int:
    """The layer of the longest entry that covers a module."""
    name = module.removeprefix("attngen.") + "."
    found = [
        (len(entry), k) for k, (_, entries) in enumerate(LAYERS) for entry in entries if name.startswith(f"{entry}.")
    ]
    assert found, f"{module} is in no layer; give it one in tests/test_layers.py"
    return max(found)[1]


def imports(tree: ast.AST) -> list[tuple[str, int, str]]:
    """(module of attngen, line, imported name) of each import statement below `tree`."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(a.name, node.lineno, "") for a in node.names if a.name.split(".")[0] == "attngen"]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: a relative import"
            if node.module and node.module.split(".")[0] == "attngen":
                for a in node.names:
                    full = f"{node.module}.{a.name}"
                    found.append((full if full in MODULES else node.module, node.lineno, a.name))
    return found


@pytest.mark.parametrize("module", [m for m in MODULES if m != "attngen"])
def test_imports_go_down(module: str) -> None:
    own = layer_of(module)
    for target, line, name in imports(ast.parse(MODULES[module].read_text())):
        if target == "attngen":
            assert name in PACKAGES_OWN or own >= layer_of("attngen.cli"), (
                f"{module}:{line} takes {name} from the package"
            )
        else:
            assert layer_of(target) <= own, (
                f"{module}:{line} ({LAYERS[own][0]}) imports {target} ({LAYERS[layer_of(target)][0]}) above it"
            )


def test_modules_load_without_cycles() -> None:
    """Imports inside functions are left out: they run when all is loaded (a `__str__` that calls the printer)."""
    graph: nx.DiGraph[str] = nx.DiGraph()
    for module, path in MODULES.items():
        for statement in ast.parse(path.read_text()).body:
            if isinstance(statement, ast.Import | ast.ImportFrom):
                graph.add_edges_from(
                    (module, target) for target, _, _ in imports(statement) if target not in (module, "attngen")
                )
    assert list(nx.simple_cycles(graph)) == []
    assert graph.number_of_edges() > 100


def test_the_compiler_does_not_need_a_gpu_library() -> None:
    """CuPy and cuda-bindings are imported where a kernel is loaded or launched, inside functions."""
    for module, path in MODULES.items():
        for statement in ast.parse(path.read_text()).body:
            if isinstance(statement, ast.Import | ast.ImportFrom):
                names = (
                    [a.name for a in statement.names] if isinstance(statement, ast.Import) else [statement.module or ""]
                )
                assert not {n.split(".")[0] for n in names} & {"cupy", "cuda"}, (
                    f"{module} imports {names} when it is loaded"
                )


@pytest.mark.parametrize(
    "path", [*PACKAGE.rglob("*.py"), *(ROOT / "tests").rglob("*.py")], ids=lambda p: str(p.relative_to(ROOT))
)
def test_files_are_short(path: Path) -> None:
    lines = len(path.read_text().splitlines())
    assert lines <= 500, f"{lines} lines: a file this long holds two ideas"


# ---- CONTRIBUTING --------------------------------------------------------------------------------------------


def recipes() -> dict[str, list[str]]:
    """The files in backticks of the numbered steps of each `## Add ...` section of CONTRIBUTING.md."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    found: dict[str, list[str]] = {}
    for title, body in re.findall(r"^## (Add [^\n]+)\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL):
        steps = re.findall(r"^\d+\. .*?(?=^\d+\. |\Z)", body, re.MULTILINE | re.DOTALL)
        found[title] = [
            f for step in steps for f in re.findall(r"`([\w./]+\.(?:py|jinja|cuh|hpp|cpp|md|schedule))`", step)
        ]
    return found


@pytest.mark.parametrize("title", ["Add a score function", "Add an op", "Add a pass", "Add a target"])
def test_recipes_name_files_that_exist(title: str) -> None:
    files = recipes()[title]
    assert len(files) >= 3, f"{title}: the steps name {files}"
    assert [f for f in files if not (ROOT / f).is_file()] == []


def test_the_recipe_of_an_op_is_complete() -> None:
    """An op is a dataclass, a macro, a case of lowering, a primitive with its emulated meaning, and a verifier rule."""
    needed = {"attngen/ir/ops.py", "attngen/lowering/sm80.py", "templates/ops/sm80.jinja"}
    needed |= {"templates/prelude/sm80.cuh", "templates/emulator/sm80.hpp"}
    assert "attngen/ir/rules/" in (ROOT / "CONTRIBUTING.md").read_text()
    assert needed <= set(recipes()["Add an op"])
