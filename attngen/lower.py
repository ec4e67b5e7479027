"""Schedule -> text. A walk: each op becomes one macro call with identifiers, numbers and printed expressions as
arguments. Nothing is decided here; `lower` accepts only a verified schedule."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from attngen.cprint import C_DTYPE, Printer
from attngen.errors import PassError
from attngen.expr import Expr, const, variables
from attngen.exprtext import show
from attngen.ir import ops as o
from attngen.ir.ops import Heads, Op, ReduceKind, Ref, Scope, Stmt, kind_of
from attngen.ir.schedule import Block, Buffer, Classes, Elem, Guard, Kernel, Schedule, Step, Tiles, Value, VerifiedSchedule, WorkSource, ops_of
from attngen.ir.text import describe
from attngen.layout import Fragment, SmemLayout
from attngen.params import C_TYPE, fields
from attngen.render import Argument, call, environment, select_prelude


@dataclass(frozen=True)
class Source:
    """The emitted text. `text` is banner + prelude + body; the emulator compiles the identical `body`.

    `line_ops`: which op each line of the body belongs to (1 is the first line)."""

    banner: str
    prelude: str
    body: str
    line_ops: Mapping[int, str]

    @property
    def text(self) -> str:
        return f"{self.banner}\n{self.prelude}\n{self.body}"

    def __str__(self) -> str:
        return self.text


_PARAMS = ("batch", "heads", "group", "seqlen_q", "seqlen_k")

KSTEP_UNROLL = 4  # k-steps of a contraction of shared tiles that the compiler may interleave: more only costs registers


class _KernelLowering:
    """Lowers the one role of a kernel of a target without roles; roles of other targets join here."""

    def __init__(self, schedule: Schedule, kernel: Kernel) -> None:
        self.schedule, self.kernel = schedule, kernel
        (self.role,) = kernel.roles
        self.values: dict[str, Value] = {v.name: v for v in self.role.values}
        self.elems = {t.name: t.elem for t in kernel.tensors}
        self.sizes = {f.name for f in fields(kernel)}

    # ---- names -------------------------------------------------------------------------------------------------

    def spell(self, v: Expr) -> str:
        return f"p.{v.name}" if v.name in self.sizes and v.name not in self.values else v.name

    def expr(self, e: Expr) -> str:
        return Printer(self.spell, self.elems)(e)

    def address(self, ref: Ref) -> str:
        buffer = self.buffer(ref)
        text = f"smem + {buffer.offset}"
        if ref.index:
            text += f" + {self.expr(ref.index[0])} * {buffer.layout.bytes}"
        return f"({text})"

    def buffer(self, ref: Ref) -> Buffer:
        buffer = self.kernel.buffer(ref.name)
        if buffer is None:
            raise PassError(f"lower: {ref.name} is not a buffer of {self.kernel.name}")
        return buffer

    @property
    def warp_rows(self) -> int:
        return next(v.rows for v in self.role.values if v.fragment is Fragment.ACC)

    @property
    def row0(self) -> str:
        return f"m * {self.kernel.work.block_m} + warp * {self.warp_rows} + lane / 4"

    def row_of(self, tensor: str) -> str:
        """Offset of this item's row in a table [batch or 1, heads or 1, row tiles, ...]."""
        return f"(i64)b * p.{tensor}_s0 + (i64)h * p.{tensor}_s1 + (i64)m * p.{tensor}_s2"

    # ---- ops ---------------------------------------------------------------------------------------------------

    def op(self, op: Op) -> list[str]:
        """The lines of an op under its comment."""
        lines = [f"// {describe(op)}"]
        for macro, arguments in self.calls(op):
            lines += call(self.schedule.target, macro, arguments)
        if op.when is not None:
            lines = [lines[0], *call(self.schedule.target, "when", {"predicate": self.expr(op.when), "body": lines[1:]})]
        return lines

    def calls(self, op: Op) -> Iterator[tuple[str, dict[str, Argument]]]:
        kind = kind_of(type(op))
        match op:
            case o.CpAsync() | o.CopyTile():
                inside = f"row0 + r < {self.expr(op.limit)}"
                if op.first is not None:
                    inside += f" && row0 + r >= {self.expr(op.first)}"
                yield kind, {"dst": self.address(op.dst), "src": op.src, "row": self.expr(op.row), "inside": inside,
                             **self.chunks(self.buffer(op.dst).layout, op.src)}  # fmt: skip
            case o.StTile():
                yield kind, {"dst": op.dst, "src": self.address(op.src), "row": self.expr(op.row),
                             "limit": self.expr(op.limit), **self.chunks(self.buffer(op.src).layout, op.dst)}  # fmt: skip
            case o.CpWait():
                yield kind, {"pending": op.pending}
            case o.CpCommit() | o.CtaSync():
                yield kind, {}
            case o.MmaSync():
                if op.zero:
                    yield from self.calls(o.Fill(id=op.id, dst=op.d, value=const(0.0)))
                yield self.mma(op)
            case o.Map():
                yield self.map(op)
            case o.Reduce():
                yield self.reduce(op)
            case o.Fill():
                value = self.values[op.dst.name]
                yield kind, {"dst": op.dst.name, "value": self.expr(op.value), "count": value.registers}
            case o.StFrag():
                value, buffer = self.values[op.src.name], self.buffer(op.dst)
                yield kind, {
                    "dst": self.address(op.dst), "src": op.src.name, "pack": f"pack_{buffer.elem.value}x2",
                    "scale": f"{op.scaled}[ri]" if op.scaled else "1.0f", "rows": value.rows // 8, "tiles": value.cols // 8,
                    "warp_rows": value.rows, **swizzle(buffer.layout),
                }  # fmt: skip
            case o.StRows():
                yield kind, {"rows": self.values[op.src.name].rows // 8, "dst": op.dst, "src": op.src.name,
                             "i0": self.row0, "limit": self.expr(op.limit)}  # fmt: skip
            case o.Pointwise():
                yield kind, {"lines": list(self.pointwise(op))}
            case o.ScanTiles():
                yield kind, self.scan(op)
            case o.CompactTiles():
                yield kind, {"dst": op.dst, "dst_at": self.row_of(op.dst), "src": op.src, "src_at": self.row_of(op.src),
                             "lo": self.expr(op.lo), "hi": self.expr(op.hi)}  # fmt: skip
            case _:
                raise PassError(f"lower: {self.schedule.target} has no macro for op {op.id} {kind}")

    def chunks(self, layout: SmemLayout, tensor: str) -> dict[str, Argument]:
        """How the threads share the 16-byte chunks of a tile: blocks of 2^a columns (a of the swizzle), whole rows of
        blocks a pass. Conditions that always hold are written as `true`."""
        block = 1 << layout.xor_bits
        rows = self.kernel.threads // block
        head_dim = self.schedule.head_dim_qk if tensor in ("q", "k") else self.schedule.head_dim_v
        in_tile = "true" if layout.rows % rows == 0 else f"(int)r0 + r < {layout.rows}"
        in_head = "true" if head_dim // 8 == layout.chunks else f"group * {block} + (int)ch < {head_dim // 8}"
        return {"block": block, "groups": layout.chunks // block, "passes": -(-layout.rows // rows), "pass_rows": rows,
                "in_tile": in_tile, "in_head": in_head, **swizzle(layout)}  # fmt: skip

    def mma(self, op: o.MmaSync) -> tuple[str, dict[str, Argument]]:
        d, b = self.values[op.d.name], self.buffer(op.b)
        arguments: dict[str, Argument] = {
            "mma": f"mma_m16n8k16_{b.elem.value}", "d": op.d.name, "b": self.address(op.b), "blocks": d.rows // 16,
            "pairs": d.cols // 16, **{f"b_{k}": v for k, v in swizzle(b.layout).items()},
        }  # fmt: skip
        if op.b.transposed:  # rows of b are columns of d: eight columns by eight k a matrix, k chunks in lanes 8..15, 24..31
            arguments |= {"ldmatrix_b": "ldmatrix_x4", "b_row": "at_lane % 8 + at_lane / 16 * 8", "b_chunk": "at_lane / 8 % 2",
                          "b_row_step": 16, "b_row_kstep": 0, "b_chunk_step": 0, "b_chunk_kstep": 2}  # fmt: skip
            ksteps = b.layout.cols // 16
        else:  # rows of b are k: matrices transposed on the way
            arguments |= {"ldmatrix_b": "ldmatrix_x4_trans", "b_row": "at_lane % 16", "b_chunk": "at_lane / 16",
                          "b_row_step": 0, "b_row_kstep": 16, "b_chunk_step": 2, "b_chunk_kstep": 0}  # fmt: skip
            ksteps = b.layout.rows // 16
        arguments["ksteps"] = ksteps
        if op.a.name in self.values:
            return "mma_sync_rs", {**arguments, "a": op.a.name}
        a = self.buffer(op.a)
        return "mma_sync_ss", {
            **arguments, "a": self.address(op.a), "warp_rows": d.rows, "unroll": KSTEP_UNROLL, **{f"a_{k}": v for k, v in swizzle(a.layout).items()}
        }  # fmt: skip

    def reduce(self, op: o.Reduce) -> tuple[str, dict[str, Argument]]:
        value = self.values[op.src.name]
        shape: dict[str, Argument] = {"rows": value.rows // 8, "dst": op.dst.name, "src": op.src.name}
        if value.fragment is Fragment.ROW:
            return "reduce_quad", shape
        if op.kind is not ReduceKind.MAX:
            raise PassError(f"lower: op {op.id}: sums over a fragment are accumulated by the map that makes the elements")
        return "reduce", {**shape, "tiles": value.cols // 8, "combine": "max_f32"}

    def map(self, op: o.Map) -> tuple[str, dict[str, Argument]]:
        """A scope with the locals, and a pass for each scope that has statements."""
        over, text, target = self.values[op.over.name], _MapText(self, op), self.schedule.target
        rows, lines = over.rows // 8, list(text.locals)
        first = {"i": self.row0, "j": f"n * {over.cols} + 2 * quad" if over.cols_axis == "N" else "2 * quad"}
        for index in ("i", "j"):
            if text.uses(index):
                lines.append(f"const int {index}0 = {first[index]};")
            if text.uses(f"{index}_f"):
                lines.append(f"const float {index}0_f = f32_of_s32({index}0);")
        if text.lines[Scope.ROW]:
            lines += call(target, "map_rows", {"rows": rows, "lines": text.with_indices(Scope.ROW)})
        if text.lines[Scope.ELEM]:
            cols = call(target, "map_cols", {"lines": text.with_indices(Scope.COL)}) if text.lines[Scope.COL] else []
            lines += call(target, "map_elems", {
                "rows": rows, "tiles": over.cols // 8, "cols": cols, "lines": text.with_indices(Scope.ELEM), "pair": text.pair,
            })  # fmt: skip
        return "map", {"lines": lines}

    def scan(self, op: o.ScanTiles) -> dict[str, Argument]:
        cols = -(-op.block_n // 32)
        kept = {s.target for s in op.body if s.scope is Scope.COL}
        lines: dict[Scope, list[str]] = {}
        for scope in (Scope.COL, Scope.ROW, Scope.ELEM):
            printer = Printer(lambda v: f"{v.name}[ci]" if v.name in kept else self.spell(v), self.elems)
            lines[scope] = []
            for s in (s for s in op.body if s.scope is scope):
                lines[scope] += printer.temporaries(s.value)
                head = f"{s.target}[ci]" if scope is Scope.COL else f"const {C_DTYPE[s.value.dtype]} {s.target}"
                lines[scope].append(f"{head} = {printer(s.value)};")
        return {
            "dst": op.dst, "at": self.row_of(op.dst), "lo": self.expr(op.lo), "hi": self.expr(op.hi), "block_n": op.block_n,
            "warps": self.role.warps, "cols": cols, "col": lines[Scope.COL], "row": lines[Scope.ROW],
            "elem": lines[Scope.ELEM],
            "locals": [f"{C_DTYPE[s.value.dtype]} {s.target}[{cols}];" for s in op.body if s.scope is Scope.COL],
        }  # fmt: skip

    def pointwise(self, op: o.Pointwise) -> Iterator[str]:
        """Statements on one element; a target that is an output tensor is stored (a row's by its first element)."""
        tensors = {t.name: t for t in self.kernel.tensors}
        for s in op.body:
            printer = Printer(self.spell, self.elems)
            yield f"// {s.target} = {show(s.value)}"
            if s.target not in tensors:
                yield f"const {C_DTYPE[s.value.dtype]} {s.target} = {printer(s.value)};"
                continue
            t = tensors[s.target]
            index = ["b", "h", "i", "j"][: t.rank]
            at = " + ".join(f"(i64){x} * p.{t.name}_s{k}" if k < t.rank - 1 else x for k, x in enumerate(index))
            arguments: dict[str, Argument] = {"dst": t.name, "at": at, "value": printer(s.value)}
            if t.elem is Elem.F32:
                text = call(self.schedule.target, "store_f32", arguments)
            else:
                text = call(self.schedule.target, "store_packed", {**arguments, "pack": f"pack_{t.elem.value}x2"})
            yield from text if t.rank == 4 else call(self.schedule.target, "when", {"predicate": "j == 0", "body": text})

    # ---- control -------------------------------------------------------------------------------------------------

    def steps(self, steps: Sequence[Step], cls: str) -> list[str]:
        lines: list[str] = []
        for step in steps:
            if isinstance(step, Guard):
                raise PassError(f"lower: {self.schedule.target} has no macro for guard {step.id}")
            if not step.only or step.only == cls:
                lines += self.op(step)
        return lines

    def tiles(self, node: Tiles) -> list[str]:
        if node.classes is Classes.BRANCH:
            return self.branched(node)
        ranges = [
            {
                "cls": r.cls, "end": self.expr(r.end),
                "body": "\n".join("  " + line for line in [*self.lets(node.lets), *self.steps(node.step, r.cls)]),
            }
            for r in node.ranges
        ]  # fmt: skip
        return call(self.schedule.target, "tiles", {"var": node.var, "start": node.start, "ranges": ranges})

    def branched(self, node: Tiles) -> list[str]:
        """One body for all classes; ops of one class stand under a uniform branch on the ranges of that class."""
        lines = self.lets(node.lets)
        for step in node.step:
            text = self.steps((step,), step.only)
            if step.only:
                inside = " || ".join(self.within(node, k) for k, r in enumerate(node.ranges) if r.cls == step.only)
                text = [text[0], *call(self.schedule.target, "when", {"predicate": inside, "body": text[1:]})]
            lines += text
        last = node.ranges[-1]
        return call(self.schedule.target, "tiles", {"var": node.var, "start": node.start, "ranges": [
            {"cls": ", ".join(r.cls for r in node.ranges), "end": self.expr(last.end), "body": "\n".join("  " + x for x in lines)}
        ]})  # fmt: skip

    def within(self, node: Tiles, k: int) -> str:
        """The counter lies in range k, given that it lies in one of them."""
        above = [f"{node.var} >= {self.expr(node.ranges[k - 1].end)}"] if k else []
        below = [f"{node.var} < {self.expr(node.ranges[k].end)}"] if k + 1 < len(node.ranges) else []
        return " && ".join([*above, *below])

    def bases(self) -> list[str]:
        """Where the item's batch and head start in each tensor that tiles are loaded from."""
        heads = {op.src: op.heads for _, op in ops_of(self.kernel) if isinstance(op, o.CpAsync | o.CopyTile)}
        lines = []
        for t in self.kernel.tensors:
            if t.name in heads:
                h = "h" if heads[t.name] is Heads.Q else "hkv"
                place = f"p.{t.name} + (i64)b * p.{t.name}_s0 + (i64){h} * p.{t.name}_s1"
                lines.append(f"const {C_TYPE[t.elem]}* const {t.name}_bh = {place};")
        return lines

    def lets(self, lets: Sequence[Stmt]) -> list[str]:
        printer = Printer(self.spell, self.elems)
        lines = []
        for s in lets:
            lines.append(f"const {C_DTYPE[s.value.dtype]} {s.target} = {printer(s.value)};")
        return lines

    def lower(self) -> list[str]:
        body: list[str] = []
        for node in self.role.item.body:
            body += self.steps(node.ops, "") if isinstance(node, Block) else self.tiles(node)
        kernel, work = self.kernel, self.kernel.work
        name = f"work_{work.source.value}_{work.order.value}"
        place: dict[str, Argument] = {"threads": kernel.threads}
        if work.source is not WorkSource.ELEMENTS:
            place = {"block_m": work.block_m, "round_up": work.block_m - 1, "heads": "p.heads" if work.per_head else "1"}
        text = str(environment().get_template("kernel.cu.jinja").module.kernel(  # type: ignore[attr-defined]
            name=kernel.name, threads=kernel.threads, min_ctas=kernel.min_ctas, params=[f.declaration for f in fields(kernel)],
            asserts=[f'static_assert(sizeof({kernel.name}_params) <= 4096, "parameters exceed what a launch can pass");'],
            indices=[
                "const int tid = thread_id(), warp = uniform(tid / 32), lane = tid % 32, quad = lane % 4;",
                "const u32 smem = smem_base();",
            ],
            work=call(self.schedule.target, name, place),
            bases=self.bases(), lets=self.lets(self.role.item.lets), values=[declaration(v) for v in self.role.values], body=body,
        ))  # fmt: skip
        return text.strip("\n").split("\n")


def swizzle(layout: SmemLayout) -> dict[str, Argument]:
    return {"pitch": layout.pitch, "shift": 3 - layout.xor_bits, "mask": (1 << layout.xor_bits) - 1}


def declaration(v: Value) -> str:
    kind = {"f32": "float", "i32": "int", "bool": "bool"}.get(v.dtype, "u32")
    return f"{kind} {v.name}[{v.registers}];"


class _MapText:
    """The statements of a map as C, by scope."""

    def __init__(self, lowering: _KernelLowering, op: o.Map) -> None:
        self.lowering = lowering
        self.locals: list[str] = []
        self.pair: list[str] = []
        self.lines: dict[Scope, list[str]] = {s: [] for s in Scope}
        self.local_scope = {s.target: s.scope for s in op.body if s.target not in lowering.values}
        for s in op.body:
            if s.target in self.local_scope and s.scope in (Scope.ROW, Scope.COL):
                count = lowering.values[op.over.name].rows // 8 if s.scope is Scope.ROW else 2
                line = f"{C_DTYPE[s.value.dtype]} {s.target}[{count}];"
                if line not in self.locals:
                    self.locals.append(line)
        for scope in (Scope.ROW, Scope.COL, Scope.ELEM):
            self._statements([s for s in op.body if s.scope is scope], scope)

    def uses(self, name: str) -> bool:
        """Whether any scope needs this index, or (i_f, j_f) its value as a float."""
        return any(re.search(rf"\b{name.removesuffix('_f')}{'_f' if name.endswith('_f') else '(_f)?'}\b", x)
                   for lines in self.lines.values() for x in lines)  # fmt: skip

    def with_indices(self, scope: Scope) -> list[str]:
        """The statements of a scope below the declarations of the indices they use."""
        step = {"i": "8 * ri", "j": "8 * ci + ei"}
        text = "\n".join(self.lines[scope])
        head = []
        for index in ("i", "j"):
            if re.search(rf"\b{index}\b", text):
                head.append(f"const int {index} = {index}0 + {step[index]};")
            if re.search(rf"\b{index}_f\b", text):
                head.append(f"const float {index}_f = {index}0_f + (float)({step[index]});")
        return head + self.lines[scope]

    def spell(self, v: Expr) -> str:
        if v.name in ("i", "j"):
            return v.name
        scope = self.local_scope.get(v.name)
        if scope is not None:
            return v.name + {Scope.ROW: "[ri]", Scope.COL: "[ei]", Scope.ELEM: ""}[scope]
        value = self.lowering.values.get(v.name)
        if value is None:
            return self.lowering.spell(v)
        return f"{v.name}[{'at' if value.fragment is Fragment.ACC else 'ri'}]"

    def _statements(self, statements: list[Stmt], scope: Scope) -> None:
        """Runs of statements that do not read what an earlier one wrote share their temporaries."""
        written: set[str] = set()
        printer = Printer(self.spell, self.lowering.elems)
        counter = 0
        pending = list(statements)
        while pending:
            run: list[Stmt] = []
            written.clear()
            while pending and not variables(pending[0].value) & written:
                run.append(pending.pop(0))
                written.add(run[-1].target)
            printer.named, printer.counter = {}, counter
            self.lines[scope] += printer.temporaries(*(s.value for s in run))
            counter = printer.counter
            self.lines[scope] += [self._assign(s, printer(s.value)) for s in run]

    def _assign(self, s: Stmt, value: str) -> str:
        known = self.lowering.values.get(s.target)
        if known is None:
            scope = self.local_scope[s.target]
            return f"{s.target}[{'ri' if scope is Scope.ROW else 'ei'}] = {value};" if scope is not Scope.ELEM else (
                f"const {C_DTYPE[s.value.dtype]} {s.target} = {value};"
            )
        if known.fragment is Fragment.OPA:
            tiles = known.cols // 8
            self.locals.append("float packed[2];")
            self.pair.append(
                f"{s.target}[ri / 2 * {2 * tiles} + 2 * ci + ri % 2] = pack_{known.dtype}(packed[0], packed[1]);"
            )
            return f"packed[ei] = {value};"
        index = "at" if known.fragment is Fragment.ACC else "ri"
        return f"{s.target}[{index}] {'+=' if s.accumulate else '='} {value};"


def lower(verified: VerifiedSchedule, banner: str) -> Source:
    """The CUDA text of every kernel of a module."""
    if not isinstance(verified, VerifiedSchedule):
        raise TypeError(f"lower takes a VerifiedSchedule (attngen.ir.verify.verify makes one), not {type(verified).__name__}")
    schedule = verified.schedule
    lines: list[str] = []
    for kernel in schedule.kernels:
        lines += [*_KernelLowering(schedule, kernel).lower(), ""]
    body = "\n".join(lines)
    return Source(banner, select_prelude(schedule.target, body), body, line_ops(body))


def line_ops(body: str) -> dict[int, str]:
    """Which op a line belongs to: the last op comment above it."""
    result: dict[int, str] = {}
    current = ""
    for number, line in enumerate(body.split("\n"), 1):
        text = line.strip()
        if text.startswith("// "):
            current = text[3:].split("  #")[0]
        elif text.startswith("extern"):
            current = ""
        if current:
            result[number] = current
    return result
