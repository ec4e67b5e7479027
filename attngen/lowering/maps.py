"""`map` and `reduce`: scalar statements on fragments, by scope."""

from __future__ import annotations

import re

from attngen.cprint import C_DTYPE, Printer
from attngen.errors import PassError
from attngen.expr import Expr, variables
from attngen.ir import ops as o
from attngen.ir.ops import ReduceKind, Scope, Stmt
from attngen.ir.schedule import Value
from attngen.layout import Fragment
from attngen.lowering.context import RoleContext
from attngen.render import Argument, call


def reduce_call(context: RoleContext, op: o.Reduce) -> tuple[str, dict[str, Argument]]:
    value = context.values[op.src.name]
    shape: dict[str, Argument] = {"rows": value.rows // 8, "dst": op.dst.name, "src": op.src.name}
    if value.fragment is Fragment.ROW:
        return "reduce_quad", shape
    if op.kind is not ReduceKind.MAX:
        raise PassError(
            f"lower: op {op.id}: sums over a fragment are accumulated by the map that makes the elements"
        )
    return "reduce", {**shape, "tiles": value.cols // 8, "combine": "max_f32"}


def map_call(context: RoleContext, op: o.Map) -> tuple[str, dict[str, Argument]]:
    """A scope with the locals, and a pass for each scope that has statements."""
    over, text, target = context.values[op.over.name], MapText(context, op), context.target
    read, again = afresh(context, op)
    rows, lines = over.rows // 8, [*again, *text.locals]
    own = {n: f"{n}_now" if n in read else n for n in ("m", "n")}
    column = "2 * quad"
    tile = {"M": f"m * {over.cols} + ", "N": f"n * {over.cols} + "}.get(over.cols_axis, "")
    if over.rows_axis == "M":
        first = {"i": context.row0(own["m"]), "j": f"{tile}{column}", "it": context.tile_row0, "jt": column}
    else:
        first = {"i": f"{tile}{column}", "j": context.key0(own["n"])}
    for index in first:
        if text.uses(index):
            lines.append(f"const int {index}0 = {first[index]};")
        if text.uses(f"{index}_f"):
            lines.append(f"const float {index}0_f = f32_of_s32({index}0);")
    if text.lines[Scope.ROW]:
        lines += call(target, "map_rows", {"rows": rows, "lines": text.with_indices(Scope.ROW)})
    if text.lines[Scope.ELEM]:
        cols = text.vectors()
        cols += call(target, "map_cols", {"lines": text.with_indices(Scope.COL)}) if text.lines[Scope.COL] else []
        lines += call(target, "map_elems", {
            "rows": rows, "tiles": over.cols // 8, "cols": cols, "lines": text.with_indices(Scope.ELEM),
            "pair": text.pair,
        })  # fmt: skip
    return "map", {"lines": lines}


def afresh(context: RoleContext, op: o.Map) -> tuple[list[str], list[str]]:
    """What the statements of scope ITEM read, and their text. It is opaque to the compiler, which would work them out
    once and keep them."""
    statements = [s for s in op.body if s.scope is Scope.ITEM]
    own = {s.target for s in statements}
    read = sorted({n for s in statements for n in variables(s.value) if n not in own | context.parameters})
    lines = [f"const int {n}_now = (int)opaque_u32({n});" for n in read]
    printer = Printer(
        lambda v: f"{v.name}_now" if v.name in read else context.spell(v), context.elems, context.dense
    )
    lines += (f"const {C_DTYPE[s.value.dtype]} {s.target} = {printer(s.value)};" for s in statements)
    return read, lines


class MapText:
    """The statements of a map as C, by scope."""

    def __init__(self, context: RoleContext, op: o.Map) -> None:
        self.context, self.op = context, op
        self.locals: list[str] = []
        self.pair: list[str] = []
        self.lines: dict[Scope, list[str]] = {s: [] for s in Scope}
        self.local_scope = {
            s.target: s.scope for s in op.body
            if s.target not in context.values and not s.index and s.scope is not Scope.ITEM
        }  # fmt: skip
        for s in op.body:
            if s.target in self.local_scope and s.scope in (Scope.ROW, Scope.COL):
                count = context.values[op.over.name].rows // 8 if s.scope is Scope.ROW else 2
                line = f"{C_DTYPE[s.value.dtype]} {s.target}[{count}];"
                if line not in self.locals:
                    self.locals.append(line)
        for scope in (Scope.ROW, Scope.COL, Scope.ELEM):
            self._statements([s for s in op.body if s.scope is scope], scope)

    @property
    def numbers(self) -> dict[str, str]:
        """What an index adds to the thread's first one."""
        row, column = "8 * ri", "8 * ci + ei"
        if self.context.values[self.op.over.name].rows_axis == "N":
            return {"i": column, "j": row}
        return {"i": row, "j": column, "it": row, "jt": column}

    def vectors(self) -> list[str]:
        """Reads of the shared vectors: two neighbouring columns a lane."""
        lines = []
        for ref in self.op.copies:
            if ref.name not in self.context.values:
                x, at = f"{ref.name}_at", f"{self.context.address(ref)} + 32 * ci + 8 * quad"
                lines += [f"float {x}[2];", f"ld_shared_v2_f32({x}[0], {x}[1], {at});"]
        return lines

    def uses(self, name: str) -> bool:
        """Whether any scope needs this index, or (i_f, j_f) its value as a float."""
        return any(re.search(rf"\b{name.removesuffix('_f')}{'_f' if name.endswith('_f') else '(_f|0)?'}\b", x)
                   for lines in self.lines.values() for x in lines)  # fmt: skip

    def with_indices(self, scope: Scope) -> list[str]:
        """The statements of a scope below the declarations of the indices they use."""
        text = "\n".join(self.lines[scope])
        head = []
        for index, number in self.numbers.items():
            if re.search(rf"\b{index}\b", text):
                head.append(f"const int {index} = {index}0 + {number};")
            if re.search(rf"\b{index}_f\b", text):
                head.append(f"const float {index}_f = {index}0_f + (float)({number});")
        return head + self.lines[scope]

    def spell(self, v: Expr) -> str:
        if v.name in ("i", "j", "it", "jt"):  # of the row, of the column, of both within the tile
            return v.name
        scope = self.local_scope.get(v.name)
        if scope is not None:
            return v.name + {Scope.ROW: "[ri]", Scope.COL: "[ei]", Scope.ELEM: ""}[scope]
        value = self.context.values.get(v.name)
        if value is None:
            shared = self.context.kernel.buffer(v.name) is not None
            return f"{v.name}_at[ei]" if shared else self.context.spell(v)
        if value.fragment is Fragment.UNI:
            return v.name
        if value.fragment is Fragment.OPA:
            return f"unpack_{value.dtype}({self.packed(v.name, value)}, ei)"
        return f"{v.name}[{'at' if value.fragment is Fragment.ACC else 'ri'}]"

    def packed(self, name: str, value: Value) -> str:
        """The pair of columns 8 ci + 2 quad and its neighbour."""
        return f"{self.c_name(name)}[ri / 2 * {value.cols // 4} + 2 * ci + ri % 2]"

    def c_name(self, target: str) -> str:
        """The array of a value; with copies, that of the copy which the op names."""
        if self.context.values[target].copies == 1:
            return target
        copy = next(r for r in self.op.copies if r.name == target)
        return f"{target}{copy.index[0].value}"

    def _statements(self, statements: list[Stmt], scope: Scope) -> None:
        """Runs of statements that do not read what an earlier one wrote share their temporaries."""
        written: set[str] = set()
        printer = Printer(self.spell, self.context.elems, self.context.dense, self.numbers)
        counter = 0
        pending = list(statements)
        while pending:
            run: list[Stmt] = []
            written.clear()
            while pending and not variables(*pending[0].exprs) & written:
                run.append(pending.pop(0))
                written.add(run[-1].target)
            printer.named, printer.counter = {}, counter
            self.lines[scope] += printer.temporaries(*(e for s in run for e in s.exprs))
            counter = printer.counter
            for s in run:
                self.lines[scope] += self._add(s, printer) if s.index else [self._assign(s, printer(s.value))]

    def _add(self, s: Stmt, printer: Printer) -> list[str]:
        steps = [f"(i64){printer(e)} * p.{s.target}_s{k}" for k, e in enumerate(s.index[:-1])]
        at = " + ".join((*steps, printer(s.index[-1])))
        return call(self.context.target, "add_element", {"dst": s.target, "at": at, "value": printer(s.value)})

    def _assign(self, s: Stmt, value: str) -> str:
        known = self.context.values.get(s.target)
        if known is None:
            scope = self.local_scope[s.target]
            return f"{s.target}[{'ri' if scope is Scope.ROW else 'ei'}] = {value};" if scope is not Scope.ELEM else (
                f"const {C_DTYPE[s.value.dtype]} {s.target} = {value};"
            )
        if known.fragment is Fragment.OPA:
            pair = f"packed{len(self.pair) or ''}"
            self.locals.append(f"float {pair}[2];")
            self.pair.append(f"{self.packed(s.target, known)} = pack_{known.dtype}({pair}[0], {pair}[1]);")
            return f"{pair}[ei] = {value};"
        index = "at" if known.fragment is Fragment.ACC else "ri"
        return f"{s.target}[{index}] {'+=' if s.accumulate else '='} {value};"
