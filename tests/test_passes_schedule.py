"""Passes that make and complete a schedule, each with the text it reads and the text it gives, for causal attention."""

from __future__ import annotations

from levels import CAUSAL, DOCUMENT, TWO_STAGES, Level, level, part, same

from attngen.ir.ops import CpAsync, CpWait, CtaSync
from attngen.ir.schedule import ops_of

# ---- Program -> Schedule -> Schedule -------------------------------------------------------------------------------

STEP_OF_PROGRAM = """
for t: n = n_hi - 1 - t   (masked to end0, full to end1)
  o0 load_tile dst=sK src=k heads=kv row={n * 16} limit={seqlen_k}
  o1 contract_tile d=rS a=sQ b=sK.T zero
  o2 map only=masked over=rS  # mask causal
    col u0 = j < seqlen_k
    row u2 = i + u1
    elem rS = where(u0 & j <= u2, rS, -inf)
  o3 reduce kind=max dst=x src=rS
  o4 map over=rS
    row r_old = r
    row r = max(r_old, x * scale_log2)
    row r_ref = where(r == -inf, 0.0, r)
    row a = exp2(r_old - r_ref)
    row l = l * a
  o5 map over=rO
    elem rO = rO * a
  o6 map over=rS
    elem l += exp2(fma(rS, scale_log2, -r_ref))
    elem rP = exp2(fma(rS, scale_log2, -r_ref))
  o7 load_tile dst=sV src=v heads=kv row={n * 16} limit={seen_hi}
  o8 contract_tile d=rO a=rP b=sV
"""

STEP = """
block prologue
  P1 cp_async dst=sQ src=q heads=q row={m * 32} limit={seqlen_q}
  P2 cp_async when={0 < end1} dst=sK src=k heads=kv row={(n_hi - 1) * 16} limit={seqlen_k}
  P3 fill dst=r value={-inf}
  P4 fill dst=l value={0.0}
  P5 fill dst=rO value={0.0}
tiles var=t start=0 classes=branch
  range cls=masked end={end0}
  range cls=full end={end1}
  let n = n_hi - 1 - t
  step
    S1 cp_async when={t < end1} dst=sV src=v heads=kv row={(n_hi - 1 - t) * 16} limit={seen_hi}
    S2 mma_sync d=rS a=sQ b=sK.T zero
    S3 cp_async when={t + 1 < end1} dst=sK src=k heads=kv row={(n_hi - 1 - (t + 1)) * 16} limit={seqlen_k}
    S4 map only=masked over=rS  # mask causal
      col u0 = j < seqlen_k
      row u2 = i + u1
      elem rS = where(u0 & j <= u2, rS, -inf)
    S5 reduce kind=max dst=x src=rS
    S6 map over=rS
      row r_old = r
      row r = max(r_old, x * scale_log2)
      row r_ref = where(r == -inf, 0.0, r)
      row a = exp2(r_old - r_ref)
      row l = l * a
    S7 map over=rO
      elem rO = rO * a
    S8 map over=rS
      elem l += exp2(fma(rS, scale_log2, -r_ref))
      elem rP = exp2(fma(rS, scale_log2, -r_ref))
    S9 mma_sync d=rO a=rP b=sV
block epilogue
  E1 reduce kind=sum dst=l src=l
  E2 map over=rO
    row inv = where(l == 0.0, 0.0, rcp(l))
    row lse = (r + log2(l)) * 0.6931471805599453
  E3 st_frag dst=sO src=rO scaled=inv
  E4 st_tile dst=out src=sO heads=q row={m * 32} limit={seqlen_q}
  E5 st_rows dst=lse src=lse heads=q limit={seqlen_q}
"""


def touching_buffers(of: Level) -> str:
    """Buffers, copies and contractions."""
    words = ("smem", "cp_async", "mma_sync")
    return "\n".join(x.strip() for x in str(of).splitlines() if any(w in x.split()[:2] for w in words))


def test_schedule() -> None:
    """Tile ops become ops of the target in their final order: K of the next tile behind the contraction that reads this
    one, V at the head of its step."""
    same(part(level(CAUSAL, "place"), "for t", "o0 reduce"), STEP_OF_PROGRAM)
    same(part(level(CAUSAL, "schedule"), "block prologue", "fact"), STEP)


def test_schedule_in_two_stages() -> None:
    """Both copies of the next tile at the head of the step."""
    steps = part(level(CAUSAL, "schedule", TWO_STAGES), "step", "block")
    same("\n".join(steps.splitlines()[:4]), """
    step
      S1 cp_async when={t + 1 < end1} dst=sK src=k heads=kv row={(n_hi - 1 - (t + 1)) * 16} limit={seqlen_k}
      S2 cp_async when={t + 1 < end1} dst=sV src=v heads=kv row={(n_hi - 1 - (t + 1)) * 16} limit={seen_hi}
      S3 mma_sync d=rS a=sQ b=sK.T zero
    """)


def test_expand() -> None:
    """A tile that is copied ahead of its reader in the step needs a second slot; in one stage nothing does."""
    assert str(level(CAUSAL, "schedule")) == str(level(CAUSAL, "expand"))
    before, after = level(CAUSAL, "schedule", TWO_STAGES), level(CAUSAL, "expand", TWO_STAGES)
    same(touching_buffers(before), """
    smem sQ elem=bf16 layout=[32,64]x2:xor
    smem sK elem=bf16 layout=[16,64]x2:xor
    smem sV elem=bf16 layout=[16,64]x2:xor
    smem sO elem=bf16 layout=[32,64]x2:xor
    P1 cp_async dst=sQ src=q heads=q row={m * 32} limit={seqlen_q}
    P2 cp_async when={0 < end1} dst=sK src=k heads=kv row={(n_hi - 1) * 16} limit={seqlen_k}
    P3 cp_async when={0 < end1} dst=sV src=v heads=kv row={(n_hi - 1) * 16} limit={seen_hi}
    S1 cp_async when={t + 1 < end1} dst=sK src=k heads=kv row={(n_hi - 1 - (t + 1)) * 16} limit={seqlen_k}
    S2 cp_async when={t + 1 < end1} dst=sV src=v heads=kv row={(n_hi - 1 - (t + 1)) * 16} limit={seen_hi}
    S3 mma_sync d=rS a=sQ b=sK.T zero
    S9 mma_sync d=rO a=rP b=sV
    """)
    same(touching_buffers(after), """
    smem sQ elem=bf16 layout=[32,64]x2:xor
    smem sK elem=bf16 layout=[16,64]x2:xor slots=2
    smem sV elem=bf16 layout=[16,64]x2:xor slots=2
    smem sO elem=bf16 layout=[32,64]x2:xor
    P1 cp_async dst=sQ src=q heads=q row={m * 32} limit={seqlen_q}
    P2 cp_async when={0 < end1} dst=sK[0%2] src=k heads=kv row={(n_hi - 1) * 16} limit={seqlen_k}
    P3 cp_async when={0 < end1} dst=sV[0%2] src=v heads=kv row={(n_hi - 1) * 16} limit={seen_hi}
    S1 cp_async when={t + 1 < end1} dst=sK[(t+1)%2] src=k heads=kv row={(n_hi - 1 - (t + 1)) * 16} limit={seqlen_k}
    S2 cp_async when={t + 1 < end1} dst=sV[(t+1)%2] src=v heads=kv row={(n_hi - 1 - (t + 1)) * 16} limit={seen_hi}
    S3 mma_sync d=rS a=sQ b=sK[t%2].T zero
    S9 mma_sync d=rO a=rP b=sV[t%2]
    """)

SYNCHRONIZED = """
block prologue
  P1 cp_async dst=sQ src=q heads=q row={m * 32} limit={seqlen_q}
  P2 cp_async when={0 < end1} dst=sK src=k heads=kv row={(n_hi - 1) * 16} limit={seqlen_k}
  PC0 cp_commit group=QK
  P3 fill dst=r value={-inf}
  P4 fill dst=l value={0.0}
  P5 fill dst=rO value={0.0}
tiles var=t start=0 classes=branch
  range cls=masked end={end0}
  range cls=full end={end1}
  let n = n_hi - 1 - t
  step
    W0 cp_wait group=QK pending=0
    W0s cta_sync
    S1 cp_async when={t < end1} dst=sV src=v heads=kv row={(n_hi - 1 - t) * 16} limit={seen_hi}
    C0 cp_commit group=V
    S2 mma_sync d=rS a=sQ b=sK.T zero
    W1 cp_wait group=V pending=0
    W1s cta_sync
    S3 cp_async when={t + 1 < end1} dst=sK src=k heads=kv row={(n_hi - 1 - (t + 1)) * 16} limit={seqlen_k}
    C1 cp_commit group=K
    S4 map only=masked over=rS  # mask causal
      col u0 = j < seqlen_k
      row u2 = i + u1
      elem rS = where(u0 & j <= u2, rS, -inf)
    S5 reduce kind=max dst=x src=rS
    S6 map over=rS
      row r_old = r
      row r = max(r_old, x * scale_log2)
      row r_ref = where(r == -inf, 0.0, r)
      row a = exp2(r_old - r_ref)
      row l = l * a
    S7 map over=rO
      elem rO = rO * a
    S8 map over=rS
      elem l += exp2(fma(rS, scale_log2, -r_ref))
      elem rP = exp2(fma(rS, scale_log2, -r_ref))
    S9 mma_sync d=rO a=rP b=sV
block epilogue
  E1 reduce kind=sum dst=l src=l
  E2 map over=rO
    row inv = where(l == 0.0, 0.0, rcp(l))
    row lse = (r + log2(l)) * 0.6931471805599453
  W9 cp_wait group=all pending=0
  W9s cta_sync
  E3 st_frag dst=sO src=rO scaled=inv
  W10s cta_sync
  E4 st_tile dst=out src=sO heads=q row={m * 32} limit={seqlen_q}
  E5 st_rows dst=lse src=lse heads=q limit={seqlen_q}
"""


def test_synchronize() -> None:
    """A wait and a barrier before each point where copies are issued, a group behind it."""
    same(part(level(CAUSAL, "expand"), "block prologue", "fact"), STEP)
    same(part(level(CAUSAL, "synchronize"), "block prologue", "fact"), SYNCHRONIZED)


def test_synchronize_in_two_stages() -> None:
    """One barrier a step."""
    kernel = level(CAUSAL, "synchronize", TWO_STAGES).kernels[0]  # type: ignore[union-attr]
    step = [op for where, op in ops_of(kernel) if op.id.startswith(("S", "W0", "W1s", "C"))]
    assert sum(isinstance(op, CtaSync) for op in step) == 1
    assert sum(isinstance(op, CpWait) for op in step) == 1
    assert sum(isinstance(op, CpAsync) for op in step) == 2


def test_allocate() -> None:
    """Offsets; the staging tile of the output shares the bytes of Q, which is dead by then."""
    same(part(level(CAUSAL, "synchronize"), "smem"), """
    smem sQ elem=bf16 layout=[32,64]x2:xor
    smem sK elem=bf16 layout=[16,64]x2:xor
    smem sV elem=bf16 layout=[16,64]x2:xor
    smem sO elem=bf16 layout=[32,64]x2:xor
    """)
    same(part(level(CAUSAL, "allocate"), "smem"), """
    smem sQ elem=bf16 layout=[32,64]x2:xor offset=0
    smem sK elem=bf16 layout=[16,64]x2:xor offset=4096
    smem sV elem=bf16 layout=[16,64]x2:xor offset=6144
    smem sO elem=bf16 layout=[32,64]x2:xor offset=0
    """)


def test_visit_table() -> None:
    """A mask without closed form gets a kernel in front that lists the tiles; one with closed forms needs none."""
    assert str(level(CAUSAL, "visit_table")) == str(level(CAUSAL, "allocate"))
    before, after = level(DOCUMENT, "allocate"), level(DOCUMENT, "visit_table")
    assert [k.name for k in before.kernels] == ["attn_fwd"]  # type: ignore[union-attr]
    same(part(before, "workspace"), """
    workspace visit elem=i32 shape=({1};{1};{(seqlen_q + 31) // 32};{(seqlen_k + 15) // 16 + 3})
    workspace classes elem=u8 shape=({1};{1};{(seqlen_q + 31) // 32};{(seqlen_k + 15) // 16})
    """)
    same(part(after, "kernel visit_table", "kernel attn_fwd"), """
    kernel visit_table threads=1024 min_ctas=1
      work source=grid order=ascending block_m=32 per_batch=False per_head=False
      tensor doc_ids elem=i32 rank=1 access=capture
      tensor visit elem=i32 rank=4 access=work
      tensor classes elem=u8 rank=4 access=work
      scalar batch dtype=i32
      scalar heads dtype=i32
      scalar group dtype=i32
      scalar seqlen_q dtype=i32
      scalar seqlen_k dtype=i32
      role scan first_warp=0 warps=32 regs=255
        item
          let i_lo = m * 32
          let i_hi = min(m * 32 + 32, seqlen_q) - 1
          let n_lo = 0
          let n_hi = (seqlen_k + 15) // 16
          let u1 = doc_ids_n0 - 1
          block scan
            V1 scan_tiles dst=classes lo={n_lo} hi={n_hi} block_n=16
              row u0 = doc_ids[min(i, u1)]
              col u2 = doc_ids[min(j, u1)]
              elem visible = u0 == u2
            V2 cta_sync
            V3 compact_tiles dst=visit src=classes lo={n_lo} hi={n_hi}
    """)
    same(part(after, "kernel attn_fwd", "workspace"), part(before, "kernel attn_fwd", "workspace"))
