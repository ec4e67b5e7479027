"""Schedules of the measured ablations: one text with knobs; and what a launch takes by the model's estimates."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

from attngen.ir.ops import OPS
from attngen.ir.schedule import Schedule
from attngen.model import Estimate, Rates, estimate
from attngen.target import SM90

SMS = 132
SEQLEN, TOKENS, WIDTH = 4096, 16384, 2048  # of the measurements: tokens = batch * seqlen, width = heads * head dim

FOLDS = {
    "keep": """\
            map over=rS {copies}
              row s = 0.0
              elem prob = exp2(fma(rS, c, -r))
              elem rP = prob
              elem s += prob
            vote dst=need pred={{~(s <= 1024.0)}}
            guard pred={{need}} touches=(rS;{P};s;r;l;a;x)
              reduce kind=max dst=x src=rS
              map over=rS
                row r_new = max(r, c * x)
                row a = where(r_new == -inf, 1.0, exp2(r - r_new))
                row r = r_new
                row l = l * a
              map over=rS {copies}
                row e = where(r == -inf, 0.0, r)
                row s = 0.0
                elem prob = exp2(fma(rS, c, -e))
                elem rP = prob
                elem s += prob
            map over=rS
              row l = l + s
""",
    "lazy": """\
            reduce kind=max dst=x src=rS
            vote dst=need pred={{r + 8.0 < c * x}}
            guard pred={{need}} touches=(r;l;a;x)
              map over=rS
                row r_new = max(r, c * x)
                row a = where(r_new == -inf, 1.0, exp2(r - r_new))
                row r = r_new
                row l = l * a
            map over=rS {copies}
              row e = where(r == -inf, 0.0, r)
              row s = 0.0
              elem prob = exp2(fma(rS, c, -e))
              elem rP = prob
              elem s += prob
            map over=rS
              row l = l + s
""",
    "always": """\
            reduce kind=max dst=x src=rS
            map over=rS
              row r_new = max(r, c * x)
              row a = where(r_new == -inf, 1.0, exp2(r - r_new))
              row r = r_new
              row l = l * a
            map over=rS {copies}
              row e = where(r == -inf, 0.0, r)
              row s = 0.0
              elem prob = exp2(fma(rS, c, -e))
              elem rP = prob
              elem s += prob
            map over=rS
              row l = l + s
""",
}
RESCALED_RARELY = """\
            guard pred={need} touches=(rO;a)
              map over=rO
                elem rO = rO * a
"""
RESCALED = """\
            map over=rO
              elem rO = rO * a
"""
MASK = """\
            map {only}over=rS
              row e = min(i + shift + 1, seqlen_k)
              elem rS = where(j < e, rS, -inf)
"""
WINDOWS = {
    True: """\
            mbar_wait bar=K.full[k]
            enter ring=tc
            open regs=(rO;rP[v])
            wgmma d=rS a=sQ[w] b=sK[k].T group=g1 zero
            commit group=g1
            mbar_wait bar=V.full[u]
            open
            wgmma d=rO a=rP[v] b=sV[u] group=g2
            commit group=g2
            leave ring=tc
            retire group=g1
            mbar_arrive bar=K.free[k]
            mbar_arrive when={t == count - 1} bar=Q.free
""",
    False: """\
            mbar_wait bar=K.full[k]
            mbar_wait bar=V.full[u]
            enter ring=tc
            open regs=(rO;rP)
            wgmma d=rO a=rP b=sV[u] group=g1
            wgmma d=rS a=sQ[w] b=sK[k].T group=g1 zero
            commit group=g1
            leave ring=tc
            retire group=g1
            mbar_arrive bar=V.free[u]
            mbar_arrive bar=K.free[k]
            mbar_arrive when={t == count - 1} bar=Q.free
""",
}

TEXT = """\
schedule attn_fwd target=sm90 head_dim_qk={D} head_dim_v={D}
  kernel attn_fwd threads={threads} min_ctas=1
    work source=table order=longest_first block_m={M}
    tensor q elem=bf16 rank=4 access=in
    tensor k elem=bf16 rank=4 access=in
    tensor v elem=bf16 rank=4 access=in
    tensor out elem=bf16 rank=4 access=out
    tensor lse elem=f32 rank=3 access=out
    scalar seqlen_q dtype=i32
    scalar seqlen_k dtype=i32
    scalar scale dtype=f32
    smem sQ elem=bf16 layout=[{M},{D}]x2:b128
    smem sK elem=bf16 layout=[{N},{D}]x2:b128 slots={slots}
    smem sV elem=bf16 layout=[{N},{D}]x2:b128 slots={slots}
    smem sO elem=bf16 layout=[{M},{D}]x2:b128
    ring Q slots=1 full_arrivals=1 full_bytes={q_bytes} free_arrivals={warps} cursor=restart buffers=(sQ)
    ring K slots={slots} full_arrivals=1 full_bytes={kv_bytes} free_arrivals={warps} cursor=restart buffers=(sK)
    ring V slots={slots} full_arrivals=1 full_bytes={kv_bytes} free_arrivals={warps} cursor=restart buffers=(sV)
    order tc members={groups} first=1 threads=256
    barrier o first=8 threads=128 count={groups}
    role load first_warp=0 warps=4 regs=24 single
      item
        let n_end = max((seqlen_k + {N} - 1) // {N}, 1)
        let count = n_end
        tiles var=t start=0
          range cls=all end={{count}}
          let n = n_end - 1 - t
          let slot = t % {slots}
          step
            mbar_wait bar=K.free[slot]
            mbar_expect bar=K.full[slot] bytes={kv_bytes}
            tma_load dst=sK[slot] src=k heads=kv row={{n * {N}}} bar=K.full[slot]
            mbar_wait when={{t == 0}} bar=Q.free
            mbar_expect when={{t == 0}} bar=Q.full bytes={q_bytes}
            tma_load when={{t == 0}} dst=sQ src=q heads=q row={{m * {M}}} bar=Q.full
            mbar_wait bar=V.free[slot]
            mbar_expect bar=V.full[slot] bytes={kv_bytes}
            tma_load dst=sV[slot] src=v heads=kv row={{n * {N}}} bar=V.full[slot]
    role math first_warp=4 warps={warps} regs=240 split={groups}
      value rS fragment=acc dtype=f32 rows=16 cols={N}
      value rP fragment=opA dtype=bf16x2 rows=16 cols={N} {copies}
      value rO fragment=acc dtype=f32 rows=16 cols={D} cols_axis=Dv
      value r fragment=row dtype=f32 rows=16 cols=0
      value l fragment=row dtype=f32 rows=16 cols=0
      value s fragment=row dtype=f32 rows=16 cols=0
      value a fragment=row dtype=f32 rows=16 cols=0
      value x fragment=row dtype=f32 rows=16 cols=0
      value inv fragment=row dtype=f32 rows=16 cols=0
      value lse fragment=row dtype=f32 rows=16 cols=0
      value need fragment=uni dtype=bool rows=0 cols=0
      item
        let c = scale * 1.4426950408889634
        let shift = seqlen_k - seqlen_q
        let n_end = max((seqlen_k + {N} - 1) // {N}, 1)
        let count = n_end
        let masked = n_end - seqlen_k // {N}
        let n = n_end - 1
        block peel
          mbar_wait bar=Q.full
          mbar_wait bar=K.full[0]
          enter ring=tc
          open
          wgmma d=rS a=sQ[w] b=sK[0].T group=g1 zero
          commit group=g1
          leave ring=tc
          fill dst=rO value={{0.0}}
          retire group=g1
          mbar_arrive bar=K.free[0]
          mbar_arrive when={{count == 1}} bar=Q.free
          map over=rS
            elem rS = where(j <= i + shift & j < seqlen_k, rS, -inf)
          reduce kind=max dst=x src=rS
          map over=rS
            row r = c * x
          map over=rS {first_copy}
            row e = where(r == -inf, 0.0, r)
            row s = 0.0
            elem prob = exp2(fma(rS, c, -e))
            elem rP = prob
            elem s += prob
          map over=rS
            row l = s
        tiles var=t start=1 unroll={unroll}
          range cls=masked end={{masked}}
          range cls=full end={{count}}
          let n = n_end - 1 - t
          phase k = t % {slots}
          phase u = (t + {slots} - 1) % {slots}
{phases}          step
{step}          drain
            mbar_wait bar=V.full[u]
            open regs=(rO;{V})
            wgmma d=rO a={V} b=sV[u] group=g2
            commit group=g2
            reduce kind=sum dst=l src=l
            map over=rS
              row inv = where(l == 0.0, 0.0, rcp(l))
            retire group=g2
            mbar_arrive bar=V.free[u]
        block store
          map over=rS
            row lse = where(l == 0.0, -inf, (r + log2(l)) * 0.6931471805599453)
          st_rows dst=lse src=lse heads=q limit={{seqlen_q}}
          bulk_retire pending=0 until=read
          sync bar=o[w] threads=128
          st_frag dst=sO[w] src=rO scaled=inv
          proxy
          sync bar=o[w] threads=128
          tma_store dst=out src=sO[w] heads=q row={{m * {M} + w * 64}}
          bulk_commit
      exit
        bulk_retire pending=0 until=read
"""


@dataclass(frozen=True)
class Knobs:
    """What the ablations vary. `fold`: the reference is kept and a bad guess redone; or the running maximum, with the
    accumulator rescaled when it moved far (`lazy`) or in each tile. `turns`: the order ring."""

    head_dim: int
    groups: int
    block_n: int
    slots: int
    overlap: bool
    turns: bool
    fold: str = "keep"
    mask_all: bool = False

    def schedule(self) -> Schedule:
        P, V = ("rP[p]", "rP[v]") if self.overlap else ("rP", "rP")  # noqa: N806
        copies = "copies=(rP[p])" if self.overlap else ""
        step = WINDOWS[self.overlap] + MASK.format(only="" if self.mask_all else "only=masked ")
        step += FOLDS[self.fold].format(copies=copies, P=P)
        if self.overlap:
            step += "            retire group=g2\n            mbar_arrive bar=V.free[u]\n"
        step += RESCALED if self.fold == "always" else RESCALED_RARELY
        m = 64 * self.groups
        text = TEXT.format(
            D=self.head_dim, M=m, N=self.block_n, slots=self.slots, groups=self.groups, warps=4 * self.groups,
            threads=128 + 128 * self.groups,
            q_bytes=2 * m * self.head_dim, kv_bytes=2 * self.block_n * self.head_dim, step=step, V=V,
            copies="copies=2" if self.overlap else "", first_copy="copies=(rP[0])" if self.overlap else "",
            unroll=math.lcm(self.slots, 2 if self.overlap else 1),
            phases="          phase p = t % 2\n          phase v = (t + 1) % 2\n" if self.overlap else "",
        )  # fmt: skip
        lines = text.splitlines()
        if not self.turns:
            lines = [x for x in lines if not x.strip().startswith(("enter", "leave", "order"))]
        return Schedule.parse("\n".join(map(numbered, range(len(lines)), lines)) + "\n")


def numbered(number: int, line: str) -> str:
    """Ops get their ids from their lines."""
    text = line.lstrip()
    is_op = text.split(" ")[0] in (*OPS, "guard")
    return f"{line[: len(line) - len(text)]}O{number} {text}" if is_op else line


@dataclass(frozen=True)
class Launch:
    """Predicted cycles of a launch, and the share of the tensor cores in it that counts as useful."""

    cycles: float
    share: float


@cache
def predicted(knobs: Knobs, causal: bool, table: Rates | None = None) -> Launch:
    """A launch of the measured sizes: items of rows x keys dealt to the SMs, the longest first."""
    kernel = knobs.schedule().kernels[0]
    full = estimate(kernel, SM90, table=table)
    masked = estimate(kernel, SM90, table=table, masked=True) if causal else full
    rows = 64 * knobs.groups
    heads = TOKENS // SEQLEN * WIDTH // knobs.head_dim
    tiles = [_item_tiles(m, rows, knobs.block_n, causal) for m in range(-(-SEQLEN // rows))]
    costs = [_item_cycles(full, masked, *t) for t in tiles]
    # equal items go in rounds; unequal ones, longest first, fill the SMs evenly
    cycles = sum(costs) * heads / SMS if causal else -(-len(costs) * heads // SMS) * costs[0]
    flops = 4 * TOKENS * SEQLEN * WIDTH * (0.5 if causal else 1.0)
    return Launch(cycles, flops / (SMS * 4096 * cycles))


def _item_tiles(m: int, rows: int, block_n: int, causal: bool) -> tuple[int, int]:
    """(full, masked) key tiles of row tile m; the first tile is masked in any case."""
    if not causal:
        return -(-SEQLEN // block_n), 0
    count = -(-min((m + 1) * rows, SEQLEN) // block_n)
    full = min(m * rows // block_n, count)
    return full, count - full


def _item_cycles(full: Estimate, masked: Estimate, full_tiles: int, masked_tiles: int) -> float:
    return full.cycles(full_tiles) + masked_tiles * masked.step
