"""The work table that the device makes: beside a reference in Python, beside the host's, and from a schedule text to a
result."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import pytest
import torch
from test_sm90 import same_dtype_error, spec_of
from torch import Tensor

from attngen import Attention, causal, document
from attngen.arguments import bind, tables, workspaces
from attngen.config import Config, FoldPolicy, HopperConfig
from attngen.emulator import Mode
from attngen.errors import LaunchError, PassError, VerifyError
from attngen.execute import emulate, launch_module, scalars_of
from attngen.ir.schedule import Order, Schedule, VerifiedSchedule
from attngen.ir.verify import findings, verify
from attngen.kernel import Generated, Kernel, kernel_for
from attngen.passes.work_table import ITEM_KEYS, add_work_table
from attngen.pipelines import Levels, Stage, tile_levels
from attngen.plan import plan
from attngen.reference import reference
from attngen.signature import IoType, Signature
from attngen.target import target
from attngen.tensormap import encode_emulator
from attngen.worktable import device_table, tile_counts, work_table

TEXTS = Path(__file__).parent / "data" / "sm90"
DEVICE = sorted(TEXTS.glob("*_devicetable.schedule"))
H200_CTAS = 132
Item = tuple[int, int, int]
Counts = Callable[[int, int, int], int]  # row tile, head, batch -> key tiles


def module_of(schedule: Schedule) -> Generated:
    return Generated(verify(schedule), target("sm90"), "work table")


@cache
def host_text(name: str) -> Schedule:
    folder = TEXTS
    return Schedule.parse((folder / f"{name}.schedule").read_text())


def block_n(schedule: Schedule) -> int:
    return next(b for b in schedule.kernels[-1].buffers if b.name == "sK").layout.rows


@cache
def device_text(name: str) -> Schedule:
    return add_work_table(host_text(name), block_n(host_text(name)))


def sizes_of(b: int, h: int, group: int, sq: int, sk: int, ctas: int) -> dict[str, int]:
    return {"batch": b, "heads": h, "group": group, "seqlen_q": sq, "seqlen_k": sk, "ctas": ctas}


# ---- a reference ---------------------------------------------------------------------------------------------


def dealt(count: Counts, block_m: int, tile: int, sizes: dict[str, int], section: int) -> list[list[Item | None]]:
    """Rounds of items, one a CTA, by the words of attngen/passes/work_table.py."""
    tiles, ctas = -(-sizes["seqlen_q"] // block_m), sizes["ctas"]
    heads = [(h, b) for b in range(sizes["batch"]) for h in range(sizes["heads"])]
    items = [(m, h, b) for h, b in heads for m in reversed(range(tiles))]
    work = [0] * ctas
    rounds: list[list[Item | None]] = []
    for start in range(0, len(items), section):
        queue = sorted(items[start : start + section], key=lambda item: -count(*item))
        while queue:
            row: list[Item | None] = [None] * ctas
            for c in sorted(range(ctas), key=lambda c: (work[c], c)):
                if queue:
                    row[c] = queue.pop(0)
                    work[c] += count(*row[c]) * tile + ITEM_KEYS
            rounds.append(row)
    return rounds


def imbalance(rounds: list[list[Item | None]], count: Counts, tile: int) -> float:
    """The most work of a CTA over the mean."""
    work = [sum(count(*item) * tile + ITEM_KEYS for item in column if item) for column in zip(*rounds, strict=True)]
    return max(work) * len(work) / sum(work)


def table_on_device(
    schedule: Schedule, sizes: dict[str, int], head_bytes: int, captures: dict[str, Tensor] | None = None,
    mode: Mode = Mode.LATE, seed: int = 0,
) -> list[list[Item | None]]:  # fmt: skip
    """What the two kernels write in the emulator."""
    _, numbers = tables(schedule, sizes, head_bytes, torch.device("cpu"))
    sizes = {**sizes, **numbers}
    made = Schedule(
        name="tables", target="sm90", kernels=schedule.kernels[:-1], workspaces=schedule.workspaces
    )
    module = Generated(VerifiedSchedule(made), target("sm90"), "work table")
    held = {**(captures or {}), **workspaces(schedule, sizes, torch.device("cpu"))}
    for t in ("items", "work"):
        held[t].fill_(-77)
    for item in bind(made, held, sizes, encode_emulator):
        emulate(module, item, held, mode, seed)
    assert (held["work"][..., 3] == 0).all()
    assert list(held["work"].shape) == [numbers["rounds"], sizes["ctas"], 4]
    rows = held["work"].tolist()
    assert all(m >= 0 or (m, h, b) == (-1, 0, 0) for row in rows for m, h, b, _ in row)
    return [[(m, h, b) if m >= 0 else None for m, h, b, _ in row] for row in rows]


def counts_of(name: str, sizes: dict[str, int]) -> Counts:
    counts = tile_counts(host_text(name).kernels[0], sizes)
    return lambda m, h, b: counts[m]


SHAPES = (  # B, H, group, Sq, Sk, CTAs
    (1, 16, 1, 2048, 2048, 132),
    (3, 5, 5, 700, 1500, 7),
    (2, 3, 1, 1, 1, 132),
    (2, 40, 8, 900, 300, 64),
    (1, 2, 1, 4000, 4000, 1),
    (1, 1, 1, 300, 300, 1024),
)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", ["sm90_causal_d128_bf16", "sm90_window100_d64"])
def test_table_is_the_reference(name: str, shape: tuple[int, int, int, int, int, int]) -> None:
    sizes, schedule = sizes_of(*shape), device_text(name)
    block_m, tile, count = schedule.kernels[-1].work.block_m, block_n(schedule), counts_of(name, sizes)
    for head_bytes in (0, 3 * 10**6, 40 * 10**6):
        found = table_on_device(schedule, sizes, head_bytes)
        section = device_table(schedule, sizes, head_bytes).section
        assert found == dealt(count, block_m, tile, sizes, section)
        tiles = -(-sizes["seqlen_q"] // block_m)
        every = {(m, h, b) for m in range(tiles) for h in range(sizes["heads"]) for b in range(sizes["batch"])}
        given = [item for row in found for item in row if item]
        assert len(given) == len(every)
        assert set(given) == every


def test_sections_that_cannot_be_sorted_at_once_are_cut() -> None:
    """More row tiles in a head than a CTA sorts: sections end inside a head."""
    sizes, schedule = sizes_of(1, 2, 1, 5000 * 128, 256, 132), device_text("sm90_causal_d128_bf16")
    assert device_table(schedule, sizes, 0).section == 4096
    found = table_on_device(schedule, sizes, 0)
    assert found == dealt(counts_of("sm90_causal_d128_bf16", sizes), 128, 128, sizes, 4096)


def test_equal_sizes_give_equal_tables() -> None:
    sizes, schedule = sizes_of(2, 6, 2, 1500, 1500, 5), device_text("sm90_causal_d128_bf16")
    first = table_on_device(schedule, sizes, 10**6)
    for mode, seed in ((Mode.EAGER, 0), (Mode.RANDOM, 1), (Mode.RANDOM, 2)):
        assert table_on_device(schedule, sizes, 10**6, mode=mode, seed=seed) == first


# ---- beside the host's table ---------------------------------------------------------------------------------

GRID = [(d, s) for d in (64, 128, 256) for s in (512, 1024, 2048, 4096, 8192, 16384)]


def beside_the_host(head_dim: int, seqlen: int) -> float:
    """Imbalance of the device's table over that of the host's, which gives one item after the other to the CTA with the
    least work, in the best of several section sizes. B*S = 16384, H*D = 2048, causal."""
    name = f"sm90_causal_d{head_dim}_bf16"
    sizes = sizes_of(16384 // seqlen, 2048 // head_dim, 1, seqlen, seqlen, H200_CTAS)
    schedule, count, head_bytes = device_text(name), counts_of(name, sizes), 4 * seqlen * head_dim
    tile, block_m = block_n(schedule), schedule.kernels[-1].work.block_m
    host = work_table(host_text(name).kernels[0], sizes, head_bytes, H200_CTAS)
    rows = [host.entries[k : k + 3] for k in range(0, len(host.entries), 4)]
    of_host = [[(m, h, b) if m >= 0 else None for m, h, b in rows[k : k + H200_CTAS]]
               for k in range(0, len(rows), H200_CTAS)]  # fmt: skip
    of_device = dealt(count, block_m, tile, sizes, device_table(schedule, sizes, head_bytes).section)
    return imbalance(of_device, count, tile) / imbalance(of_host, count, tile)


def test_as_balanced_as_the_hosts() -> None:
    """On the shapes of the benchmark. The worst are heads of two row tiles: rounds give each CTA as many items."""
    ratios = {at: beside_the_host(*at) for at in GRID}
    assert all(ratio <= 1.01 for at, ratio in ratios.items() if at != (64, 512)), ratios
    assert ratios[64, 512] <= 1.025
    assert sum(ratios.values()) / len(ratios) <= 1.0025


def test_ragged_tiles_dealt_in_turn_come_to_every_cta() -> None:
    """22 row tiles a head, six heads a round: without a shift, six CTAs would have the last tile of every head."""
    kernel, heads = host_text("sm90_full_d40").kernels[0], 128
    rows = 22
    sizes = sizes_of(1, heads, 1, rows * kernel.work.block_m - 5, 4096, H200_CTAS)
    made = work_table(kernel, sizes, 2 * 2 * 40 * 4096, H200_CTAS)
    items = [made.entries[k : k + 3] for k in range(0, len(made.entries), 4)]
    assert sorted(x for x in items if x[0] >= 0) == [(m, h, 0) for m in range(rows) for h in range(heads)]
    last = [sum(m == rows - 1 for m, _, _ in items[c::H200_CTAS]) for c in range(H200_CTAS)]
    assert sum(last) == heads and max(last) == 1


# ---- what the host cannot know -------------------------------------------------------------------------------


@cache
def with_lengths() -> Schedule:
    """Full attention at head dim 40 over the first `lens[b]` keys: the number of key tiles depends on a tensor."""
    text = host_text("sm90_full_d40").print()
    text = text.replace("max((seqlen_k + 127)", "max((keys + 127)").replace("j < seqlen_k", "j < keys")
    text = text.replace("min(seqlen_k // 128", "min(keys // 128")
    text = text.replace("        let n_end", "        let keys = min(lens[b], seqlen_k)\n        let n_end")
    text = text.replace("    scalar batch", "    tensor lens elem=i32 rank=1 access=capture\n    scalar batch")
    return Schedule.parse(text)


def attended(lens: Tensor) -> Attention:
    return Attention(mask=lambda b, h, i, j: j < lens[b], return_lse=True)


def test_counts_by_a_tensor() -> None:
    sizes, lens = sizes_of(4, 3, 1, 500, 2000, 5), torch.tensor([1, 2000, 700, 130], dtype=torch.int32)
    with pytest.raises(PassError, match="use a device table"):
        tables(with_lengths(), sizes, 0, torch.device("cpu"))
    schedule = add_work_table(with_lengths(), 128)
    assert findings(schedule) == []
    assert [t.name for t in schedule.kernels[0].tensors] == ["lens", "items"]
    found = table_on_device(schedule, sizes, 0, {"lens": lens})
    section = device_table(schedule, sizes, 0).section
    assert found == dealt(lambda m, h, b: -(-int(lens[b]) // 128), 128, 128, sizes, section)


# ---- end to end ----------------------------------------------------------------------------------------------


def tensors_of(schedule: Schedule, b: int, h: int, kv: int, sq: int, sk: int, device: str = "cpu") -> dict[str, Tensor]:
    generator, d = torch.Generator().manual_seed(sq), schedule.head_dim_qk
    shapes = {"q": (b, h, sq, d), "k": (b, kv, sk, d), "v": (b, kv, sk, d)}
    made = {n: torch.randn(*s, generator=generator).bfloat16().to(device) for n, s in shapes.items()}
    out = torch.full((b, h, sq, d), math.nan, device=device).bfloat16()
    return {**made, "out": out, "lse": torch.full((b, h, sq), math.nan, device=device)}


def close(spec: Attention, t: dict[str, Tensor]) -> None:
    want, lse = reference(spec, t["q"], t["k"], t["v"])
    assert lse is not None
    allowed = 2 * same_dtype_error(spec, t["q"], t["k"], t["v"], want) + 1e-5
    assert (t["out"].double() - want).abs().max().item() <= allowed
    assert torch.allclose(t["lse"].double(), lse, atol=1e-3, rtol=1e-6)


def test_emulator_against_float64() -> None:
    path = TEXTS / "sm90_causal_d128_devicetable.schedule"
    module = module_of(Schedule.parse(path.read_text()))
    assert [k.name for k in module.schedule.kernels] == ["sort_items", "deal_items", "attn_fwd"]
    t = tensors_of(module.schedule, 2, 2, 1, 300, 300)
    launch_module(module, t, scalars_of(t["q"], t["k"], t["q"].size(3) ** -0.5))
    close(spec_of(path.stem, {}), t)


def test_the_texts_are_what_the_pass_makes() -> None:
    assert len(DEVICE) == 2
    for path, name in zip(DEVICE, ("sm90_causal_d128_bf16", "sm90_window100_d64"), strict=True):
        assert path.read_text() == device_text(name).print()


def test_lengths_of_keys_by_a_tensor() -> None:
    module, lens = module_of(add_work_table(with_lengths(), 128)), torch.tensor([300, 20, 129], dtype=torch.int32)
    t = tensors_of(module.schedule, 3, 2, 2, 140, 300)
    launch_module(module, {**t, "lens": lens}, scalars_of(t["q"], t["k"], t["q"].size(3) ** -0.5))
    close(attended(lens), t)


# ---- errors --------------------------------------------------------------------------------------------------


def test_a_table_that_nobody_makes_is_found() -> None:
    text = host_text("sm90_causal_d128_bf16").print().replace("source=table", "source=device_table")
    with pytest.raises(VerifyError, match="nothing has written it") as caught:
        verify(Schedule.parse(text))
    assert caught.value.rule == "outputs"


def test_items_that_nobody_sorts_are_found() -> None:
    schedule = device_text("sm90_causal_d128_bf16")
    broken = Schedule.parse(schedule.print().replace("T1 sort_items dst=items", "T1 sort_items dst=work").replace(
        "tensor items elem=i32 rank=2", "tensor work elem=i32 rank=2", 1))  # fmt: skip
    assert {"outputs"} == {f.rule for f in findings(broken)}


def test_more_ctas_than_the_kernel_deals_to() -> None:
    with pytest.raises(LaunchError, match=r"deal_items: 1025 CTAs\. Allowed: 1024"):
        device_table(device_text("sm90_causal_d128_bf16"), sizes_of(1, 1, 1, 128, 128, 1025), 0)


def test_keys_of_a_size_that_cannot_be_sorted() -> None:
    text = device_text("sm90_causal_d128_bf16").print().replace("[1,4096]x4", "[1,3000]x4")
    with pytest.raises(PassError, match=r"a section of 3000 items cannot be sorted\. Allowed: powers of 2"):
        module_of(Schedule.parse(text))


# ---- on a GPU ------------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_gpu_table_follows_a_tensor_inside_a_graph() -> None:
    """The lengths change between replays of one captured call, and with them the table."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")
    module = module_of(add_work_table(with_lengths(), 128))
    lens = torch.tensor([300, 20, 129, 5000], dtype=torch.int32, device="cuda")
    t = tensors_of(module.schedule, 4, 8, 2, 1400, 5000, "cuda")
    scalars = scalars_of(t["q"], t["k"], t["q"].size(3) ** -0.5)
    launch_module(module, {**t, "lens": lens}, scalars)
    close(attended(lens), t)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch_module(module, {**t, "lens": lens}, scalars)
    for new in ([1, 1, 1, 1], [5000, 4000, 3000, 17], [128, 129, 2560, 2561]):
        lens.copy_(torch.tensor(new))
        t["out"].fill_(math.nan)
        graph.replay()
        torch.cuda.synchronize()
        close(attended(lens), t)


@pytest.mark.gpu
def test_gpu_plan() -> None:
    """The fast path of a call: workspaces and three launches."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")
    spec, schedule = Attention(mask=causal(), return_lse=True), device_text("sm90_causal_d128_bf16")
    signature, config = Signature(IoType.BF16, 128, 128), Config(128, 128, 8)
    stages = (*tile_levels(spec.variant, signature, config), Stage("text", schedule))
    kernel = Kernel(spec.variant, signature, target("sm90"), Levels(stages, config, verify(schedule)))
    t = tensors_of(schedule, 2, 8, 4, 1500, 1500, "cuda")
    made = plan(kernel, t["q"], t["k"], t["v"], [], [], 128**-0.5)
    for _ in range(2):
        out, lse = made.run([t[n].data_ptr() for n in "qkv"])
        close(spec, {**t, "out": out, "lse": lse})
    same = verify(host_text("sm90_causal_d128_bf16"))
    host = Kernel(spec.variant, signature, target("sm90"), Levels(stages, config, same))
    own, own_lse = plan(host, t["q"], t["k"], t["v"], [], [], 128**-0.5).run([t[n].data_ptr() for n in "qkv"])
    assert torch.equal(out, own)
    assert torch.equal(lse, own_lse)


# ---- items by rank -----------------------------------------------------------------------------------------------

DOCUMENTS = (0.05, 0.2, 0.3, 0.5, 0.55, 0.8, 0.9, 1.0)  # where they end


def documents(n: int) -> Tensor:
    at = torch.arange(n) / n
    return (at[:, None] >= torch.tensor(DOCUMENTS)).sum(1).int()


def listed_kernel(length: int) -> Kernel:
    spec = Attention(mask=document(documents(length)))
    config = HopperConfig(2, 128, 2, FoldPolicy.ANTICIPATED)
    return kernel_for(spec.variant, Signature(IoType.BF16, 128, 128), target("sm90"), config)


def greatest_load(entries: Sequence[int], count: Sequence[int], ctas: int) -> float:
    """Over the mean; `count`: key tiles of the row tile that an item's first entry means."""
    loads = [0.0] * ctas
    for k in range(0, len(entries), 4):
        if entries[k] >= 0:
            loads[k // 4 % ctas] += count[entries[k]] + 1.5
    return max(loads) * ctas / sum(loads)


@pytest.mark.parametrize(("batch", "heads", "length"), [(4, 16, 4096), (1, 16, 16384), (8, 16, 2048)])
def test_items_by_rank_are_balanced_without_their_lengths(batch: int, heads: int, length: int) -> None:
    """The host knows no length, only that lengths fall with the rank: the greatest load is near the mean for lengths
    that it has not seen. Dealt in turn, items of long heads are far from it."""
    kernel = listed_kernel(length).schedule.kernels[-1]
    ids = documents(length).view(-1, 128)
    counts = [int(torch.isin(ids, row).any(1).sum()) for row in ids]
    sizes = sizes_of(batch, heads, 1, length, length, H200_CTAS)
    made = work_table(kernel, sizes, 2 * 2 * 128 * length, H200_CTAS)
    ranked = greatest_load(made.entries, sorted(counts, reverse=True), H200_CTAS)
    items = {made.entries[k : k + 3] for k in range(0, len(made.entries), 4) if made.entries[k] >= 0}
    assert items == {(m, h, b) for m in range(len(counts)) for h in range(heads) for b in range(batch)}
    turn = dataclasses.replace(kernel, work=dataclasses.replace(kernel.work, order=Order.ASCENDING))
    in_turn = greatest_load(work_table(turn, sizes, 1, H200_CTAS).entries, counts, H200_CTAS)
    assert ranked < 1.06 and (in_turn > ranked + 0.05 or length < 4096)


def test_row_tiles_are_ranked_by_their_lists() -> None:
    """Most key tiles first, equal ones in their order, for each batch apart."""
    ids = torch.stack([documents(700), torch.zeros(700, dtype=torch.int32), documents(700).flip(0)])
    spec = Attention(mask=document(ids))
    kernel = kernel_for(
        spec.variant, Signature(IoType.BF16, 16, 16), target("sm90"), HopperConfig(1, 32, 2, turns=False)
    )
    q, k, v = torch.randn(3, 3, 2, 700, 16).bfloat16()
    tensors = {"q": q, "k": k, "v": v, "out": torch.empty_like(q), "lse": torch.empty(3, 2, 700), **spec.tensors}
    scalars = scalars_of(q, k, 0.25)
    sizes = {n: x for n, x in scalars.items() if isinstance(x, int)} | {"ctas": 4}
    more, made = tables(kernel.schedule, sizes, 1, q.device)
    spaces = workspaces(kernel.schedule, sizes, q.device)
    every = {**tensors, **more, **spaces}
    for item in bind(kernel.schedule, every, {**scalars, **sizes, **made}, encode_emulator)[:-1]:
        emulate(kernel, item, every)
    counts = spaces["visit"][:, 0, :, 1]
    assert counts.min() < counts.max()
    for b in range(3):
        want = sorted(range(counts.size(1)), key=lambda m: (-int(counts[b, m]), m))
        assert spaces["by_length"][b, 0].tolist() == want
