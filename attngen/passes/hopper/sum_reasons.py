"""sum_reasons: Kernel -> facts. What a kernel of plain sums came out as, and why, one fact a decision.

Before   a finished kernel
After    its tile, the registers of its roles, slots, who copies, how the weights of a step are made, turns, and what is
         in flight in the role of parts that are added up in memory
Why      a schedule explains itself. These kernels are ranked by rules, so their facts hold no estimates"""

from __future__ import annotations

from attngen.config import HopperSumsConfig
from attngen.expr import variables
from attngen.ir.ops import Map, RedFrag, Scope, TmaLoad, Wgmma
from attngen.ir.schedule import Block, Fact, Kernel, Role, steps_of
from attngen.passes.hopper.stage_sums import MATH, OWN_ROW, SHED


def sum_reasons(kernel: Kernel, config: HopperSumsConfig) -> tuple[Fact, ...]:
    roles = {role.name: role for role in kernel.roles}
    said = [("tile", tile(kernel, config)), ("registers", registers(kernel)), ("slots", slots(kernel))]
    said += [("copies", copies(kernel)), ("weights", weights(roles[MATH])), ("turns", turns(config))]
    if SHED in roles:
        said.append(("parts", parts(roles[SHED])))
    return tuple(Fact(subject=f"{kernel.name} {subject}", text=text) for subject, text in said)


def tile(kernel: Kernel, config: HopperSumsConfig) -> str:
    rows = f"{config.block_m} owned rows = {config.warpgroups} x 64, streamed tiles of {config.block_n} rows"
    return f"{rows}; {kernel.smem_bytes} bytes of shared memory"


def registers(kernel: Kernel) -> str:
    return "; ".join(f"role {role.name}: {role.warps} warps, {role.regs} a thread" for role in kernel.roles)


def slots(kernel: Kernel) -> str:
    loads = [op for role in kernel.roles for op in steps_of(role) if isinstance(op, TmaLoad)]
    item = {op.bar.name.partition(".")[0] for op in loads if OWN_ROW in variables(op.row)}
    streamed = ", ".join(f"{ring.slots} of {ring.name}" for ring in kernel.rings if ring.name not in item)
    return f"{streamed}; {' and '.join(sorted(item)) or 'nothing'} once an item"


def copies(kernel: Kernel) -> str:
    (role,) = (r.name for r in kernel.roles if any(isinstance(op, TmaLoad) for op in steps_of(r)))
    if role == SHED:
        beside = "beside" if min(r.slots for r in kernel.rings if r.full_bytes and r.slots > 1) > 2 else "ahead of"
        return f"role {role} issues them, {beside} its products: the registers of a loading role go to the others"
    return f"role {role} does nothing else: it waits for free slots"


def weights(role: Role) -> str:
    """As the first tile shows it, which has every op once."""
    block = next(node for node in role.item.body if isinstance(node, Block))
    products = {op.d.name for op in block.ops if isinstance(op, Wgmma)}
    maps, made, known = [op for op in block.ops if isinstance(op, Map)], list[list[str]](), set[tuple[str, str]]()
    for op in maps:  # what masked pairs have is taken back by a map of its own, which makes nothing new
        made.append([s.target for s in op.body if s.scope is Scope.ELEM and (op.over.name, s.target) not in known])
        known |= {(op.over.name, name) for name in made[-1]}
    starts = [name for names in made for name in names if name in products]
    ends = [(op.over.name, [n for n in names if n not in products]) for op, names in zip(maps, made, strict=True)]
    steps = ", then ".join(f"{', '.join(names)} behind {over}" for over, names in ends if names)
    begun = f"; {', '.join(starts)} starts at what is subtracted from it" if starts else ""
    if sum(bool(names) for _, names in ends) < 2:
        return f"in one map: {steps}{begun}"
    return f"split in two maps: {steps}{begun}. What the first knows is kept in 16 bits, and one tile of scores is held"


def turns(config: HopperSumsConfig) -> str:
    if config.turns:
        return f"{config.warpgroups} warpgroups issue products in turn: maps of one run beside products of another"
    return "none: warpgroups issue when they are ready"


def parts(role: Role) -> str:
    ops = list(steps_of(role))
    adds = [op for op in ops if isinstance(op, RedFrag)]
    held, (rows,) = len({op.src.name for op in adds}), {op.rows for op in adds}
    return f"role {role.name} adds {len(adds)} a step to memory, a block of {rows} rows each; accumulators: {held}"
