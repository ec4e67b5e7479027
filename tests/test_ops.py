"""The torch operator: its contract with torch (opcheck), under torch.compile, and on a GPU in graphs and on streams."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from stand_in import stand_in
from support import qkv
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import attngen
from attngen import execute, ops, plan
from attngen.arguments import bind, workspaces
from attngen.errors import GradientError, SignatureError
from attngen.params import packer
from attngen.prepare import _constant, _constant_reads, prepare
from attngen.target import SM80
from attngen.tensormap import encode_emulator
from attngen.variants import Mask

OLD_TORCH = tuple(int(x) for x in torch.__version__.split(".")[:2]) < (2, 11)
needs_new_torch = pytest.mark.skipif(OLD_TORCH, reason="torch.compile of this version does not follow `&` of objects")
gpu = pytest.mark.gpu

SLOPES = torch.tensor([0.5, 0.25])
TABLE = torch.randn(2, 512, generator=torch.Generator().manual_seed(3))
FACTOR = 2.0


def blocks(b: Any, h: Any, i: Any, j: Any) -> Any:
    return (i // 64) >= (j // 64)


def from_table(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    return s + TABLE[h, i - j + 256] * FACTOR


def shifted(by: int) -> Callable[..., Any]:
    return lambda b, h, i, j: j <= i - by


class Module(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", TABLE.clone())
        self.width = 20
        self.score = lambda s, b, h, i, j: s + self.table[h, i - j + 256]

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Any:
        return attngen.attention(q, k, v, mask=attngen.sliding_window(self.width), score=self.score)


def arguments(spec: attngen.Attention, q: Tensor, k: Tensor, v: Tensor) -> tuple[Any, ...]:
    key, captures = prepare(spec, SM80)
    return q, k, v, captures, key, spec.scale_for(q.size(3))


# ---- the operator ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "spec",
    [
        attngen.Attention(mask=attngen.causal()),
        attngen.Attention(score=attngen.alibi(SLOPES), sink=torch.zeros(2)),
        attngen.Attention(score=lambda s, b, h, i, j: attngen.sigmoid(s), normalizer="none"),
    ],
    ids=str,
)
@pytest.mark.parametrize("layout", ["contiguous", "transposed"])
def test_opcheck(spec: attngen.Attention, layout: str) -> None:
    q, k, v = qkv(sq=33, sk=40)
    if layout == "transposed":
        q, k, v = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v))
    found = torch.library.opcheck(torch.ops.attngen.forward.default, arguments(spec, q, k, v))
    assert set(found.values()) == {"SUCCESS"}


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (2, 1, 0)])
@pytest.mark.parametrize("shape", [(2, 2, 33), (1, 1, 1), (0, 2, 5), (1, 2, 0)])
def test_fake_equals_real(order: tuple[int, ...], shape: tuple[int, ...]) -> None:
    """Shapes, strides and dtypes, for every memory order of q."""
    memory = torch.randn([shape[d] for d in order] + [64]).bfloat16()
    q = memory.permute(*(order.index(d) for d in range(3)), 3)
    k, v = torch.randn(2, shape[0], 1, 17, 64).bfloat16()
    args = arguments(attngen.Attention(), q, k, v)
    real = ops.forward(*args)
    with torch._subclasses.FakeTensorMode() as mode:
        fake = ops.forward(*(mode.from_tensor(t) for t in (q, k, v)), *args[3:])
    for r, f in zip(real, fake, strict=True):
        assert (r.shape, r.stride(), r.dtype) == (f.shape, f.stride(), f.dtype)


def test_unknown_key() -> None:
    q, k, v = qkv()
    with pytest.raises(SignatureError, match="is not known in this process"):
        ops.forward(q, k, v, [], "no such key", 1.0)


def test_captures_of_another_type() -> None:
    q, k, v = qkv()
    key, _ = prepare(attngen.Attention(score=attngen.alibi(SLOPES)), SM80)
    with pytest.raises(SignatureError, match=r"torch\.float32 of rank 1"):
        ops.forward(q, k, v, [SLOPES.half()], key, 1.0)


# ---- gradients ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", ["q", "k", "v", "slopes", "sink"])
def test_results_require_gradients_as_inputs_do(which: str) -> None:
    tensors = dict(zip("qkv", qkv(), strict=True), slopes=SLOPES.clone(), sink=torch.zeros(2))
    tensors[which].requires_grad_()

    def call() -> Any:
        q, k, v, slopes, sink = tensors.values()
        return attngen.attention(q, k, v, score=attngen.alibi(slopes), sink=sink)

    assert call().requires_grad
    with torch.no_grad():
        assert not call().requires_grad
    with torch.inference_mode():
        assert call().is_inference()
    tensors[which] = tensors[which].detach()
    assert not call().requires_grad


def test_tangents_are_refused() -> None:
    q, k, v = qkv()
    with pytest.raises(GradientError, match="forward-mode"):
        torch.func.jvp(lambda x: attngen.attention(x, k, v), (q,), (torch.ones_like(q),))


# ---- torch.compile -----------------------------------------------------------------------------------------------


def test_torch_compile_is_imported_by_those_who_use_it() -> None:
    """It takes longer to import than all the rest; what it looks for in a function is set without it."""
    code = "import sys, attngen.api; print('torch._dynamo' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout == "False\n"
    marked = torch.compiler.assume_constant_result(lambda: None)
    assert vars(marked) == vars(_constant) == vars(_constant_reads) != {}


def compiled(
    fn: Callable[..., Any], backend: str = "aot_eager"
) -> tuple[Callable[..., Any], CompileCounterWithBackend]:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    return torch.compile(fn, fullgraph=True, backend=counter), counter


OUTSIDE = {
    "spec": attngen.Attention(mask=attngen.causal(), score=attngen.alibi(SLOPES), sink=torch.zeros(2), return_lse=True),
    "spec of functions": attngen.Attention(mask=blocks, score=from_table),
}
MASK = attngen.causal() & ~attngen.sliding_window(20)
INSIDE: dict[str, Callable[..., Any]] = {
    "causal": lambda q, k, v: attngen.attention(q, k, v, mask=attngen.causal()),
    "alibi": lambda q, k, v: attngen.attention(
        q, k, v, score=[attngen.softcap(5.0), attngen.alibi(SLOPES)], return_lse=True
    ),
    "mask": lambda q, k, v: attngen.attention(q, k, v, mask=MASK),
    "functions": lambda q, k, v: attngen.attention(q, k, v, mask=blocks, score=from_table),
    "computed": lambda q, k, v: attngen.attention(q, k, v, score=attngen.alibi(q[0, :, 0, 0].float())),
    "attention": lambda q, k, v: attngen.attention(q, k, v, spec=attngen.Attention(mask=attngen.causal(), scale=0.3)),
}
CALLS = {**{n: lambda q, k, v, s=s: attngen.attention(q, k, v, spec=s) for n, s in OUTSIDE.items()}, **INSIDE}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compile(name: str, backend: str) -> None:
    """No graph break, two compiles at most for any number of lengths, and the same bits and strides as without."""
    fn, counter = compiled(CALLS[name], backend)
    for length in (65, 80, 31, 130):
        q, k, v = qkv(sq=length, sk=length, seed=length)
        got, want = fn(q, k, v), CALLS[name](q, k, v)
        for g, w in zip(*((x if isinstance(x, tuple) else (x,)) for x in (got, want)), strict=True):
            assert torch.equal(g, w) and g.stride() == w.stride()
    assert counter.frame_count <= 2


def test_compile_marked_dynamic() -> None:
    """Lengths marked dynamic compile once, also for a transposed view."""
    fn, counter = compiled(INSIDE["causal"])
    for length in (65, 80, 31):
        tensors = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in qkv(sq=length, sk=length)]
        for t in tensors:
            torch._dynamo.mark_dynamic(t, 2)
        got, want = fn(*tensors), INSIDE["causal"](*tensors)
        assert torch.equal(got, want) and got.stride() == want.stride()
    assert counter.frame_count == 1


@needs_new_torch
def test_compile_combined_inside() -> None:
    def call(q: Tensor, k: Tensor, v: Tensor) -> Any:
        mask = attngen.causal() & attngen.sliding_window(9) & blocks
        return attngen.attention(q, k, v, mask=mask, score=lambda s, b, h, i, j: s * 2)

    fn, counter = compiled(call)
    assert torch.equal(fn(*qkv()), call(*qkv()))
    assert counter.frame_count == 1


def test_compile_inductor() -> None:
    def call(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return attngen.attention(q * 2, k, v.relu(), mask=attngen.causal(), score=from_table) + 1

    torch._dynamo.reset()
    fn = torch.compile(call, fullgraph=True)
    for length in (65, 80):
        assert torch.equal(fn(*qkv(sq=length, sk=length)), call(*qkv(sq=length, sk=length)))


def test_compile_sees_what_functions_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A number or tensor that a function reads is replaced: the compiled function follows."""
    q, k, v = qkv()
    fn, _ = compiled(INSIDE["functions"])
    outs = []
    for n in range(4):
        monkeypatch.setitem(globals(), "FACTOR", float(n % 3))
        monkeypatch.setitem(globals(), "TABLE", torch.randn(2, 512))
        outs.append(fn(q, k, v))
        assert torch.equal(outs[-1], INSIDE["functions"](q, k, v))
    assert not torch.equal(outs[0], outs[1])


def test_compile_sees_closures() -> None:
    q, k, v = qkv()

    def call(q: Tensor, k: Tensor, v: Tensor, mask: Callable[..., Any]) -> Any:
        return attngen.attention(q, k, v, mask=mask)

    fn, counter = compiled(call)
    for by in (0, 3, 7, 11, 3):
        assert torch.equal(fn(q, k, v, shifted(by)), call(q, k, v, shifted(by)))
    assert counter.frame_count == 4


def test_compile_sees_far_closures_and_keyword_defaults() -> None:
    """Functions around functions, as combinators make them, and a default of a keyword-only parameter."""
    q, k, v = qkv()
    held = SimpleNamespace(factor=1.0)

    def scaled(s: Any, *, by: float = 2.0) -> Any:
        return s * by * held.factor

    def around(inner: Callable[..., Any]) -> Callable[..., Any]:
        return lambda s: inner(s)

    deep = around(around(around(around(scaled))))

    def score(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return deep(s)

    fn, _ = compiled(lambda q, k, v: attngen.attention(q, k, v, score=score))
    outs = [fn(q, k, v)]
    held.factor = 3.0
    outs.append(fn(q, k, v))
    assert scaled.__kwdefaults__ is not None
    scaled.__kwdefaults__["by"] = 5.0
    outs.append(fn(q, k, v))
    for out, factor in zip(outs, (2.0, 6.0, 15.0), strict=True):
        want = attngen.attention(q, k, v, score=lambda s, b, h, i, j, factor=factor: s * factor)
        torch.testing.assert_close(out, want, atol=2e-3, rtol=1e-2)
    assert not torch.equal(outs[1], outs[2])


def test_compile_sees_modules() -> None:
    q, k, v = qkv()
    module = Module()
    fn, _ = compiled(module)
    for width in (20, 30, 40):
        module.width, module.table = width, torch.randn(2, 512)
        assert torch.equal(fn(q, k, v), module(q, k, v))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda q, k, v: (q, k[..., :32], v), "k has head_dim 32, q has 64"),
        (lambda q, k, v: (q, k, v.half()), "v has dtype torch.float16"),
    ],
)
def test_compile_shows_errors(change: Callable[..., tuple[Tensor, ...]], words: str) -> None:
    """Without fullgraph as raised by attngen, with it in the words of torch.compile's own error."""
    tensors = change(*qkv())
    torch._dynamo.reset()
    with pytest.raises(Exception) as error:  # noqa: PT011  (torch wraps it in its own class)
        torch.compile(INSIDE["causal"], backend="aot_eager")(*tensors)
    assert words in str(error.value)


def test_nothing_keeps_tensors_alive() -> None:
    import gc
    import weakref

    q, k, v = qkv()
    slopes = torch.rand(2)
    alive = [weakref.ref(t) for t in (q, k, v, slopes)]
    out = attngen.attention(q, k, v, score=attngen.alibi(slopes), mask=blocks)
    assert isinstance(out, Tensor)
    del q, k, v, slopes
    gc.collect()
    assert [ref() for ref in alive] == [None] * 4


# ---- what is launched ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mask", [attngen.causal(), attngen.document(torch.arange(65) // 30)], ids=str)
def test_plan_passes_what_bind_passes(mask: Mask, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan of a GPU call, made with a stand-in for the device, against the plain way to pack parameters."""
    launched = stand_in(monkeypatch).launched
    q, k, v = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in qkv())
    spec = attngen.Attention(mask=mask, score=attngen.alibi(SLOPES), sink=torch.zeros(2))
    kernel = attngen.compile(spec, head_dim=64).kernel
    made = plan.plan(kernel, q, k, v, list(spec.tensors.values()), list(spec.tensors), 0.125)
    out, lse = made.run([t.data_ptr() for t in (q, k, v, *spec.tensors.values())])
    assert out.stride() == q.stride() and lse.is_contiguous() and lse.shape == q.shape[:3]

    scalars = execute.scalars_of(q, k, 0.125)
    work = workspaces(kernel.schedule, {n: x for n, x in scalars.items() if isinstance(x, int)}, q.device)
    tensors = {"q": q, "k": k, "v": v, "out": out, "lse": lse, **spec.tensors, **work}
    wanted = bind(kernel.schedule, tensors, scalars, encode_emulator)
    assert len(launched) == len(wanted) == len(made.launches.steps)
    for (grid, threads, params), want in zip(launched, wanted, strict=True):
        assert (grid, threads, len(params)) == (want.grid, want.kernel.threads, len(want.params))
        layout, names = packer(want.kernel)
        for name, one, other in zip(names, layout.unpack(params), layout.unpack(want.params), strict=True):
            assert one == other or name in work  # a workspace is fresh in every call


# ---- on a GPU ----------------------------------------------------------------------------------------------------


def on_gpu(length: int = 300, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    return qkv("cuda", sq=length, sk=length, seed=seed)


@gpu
def test_gpu_equals_emulator() -> None:
    out = attngen.attention(*on_gpu(), mask=attngen.causal())
    want = attngen.attention(*qkv(sq=300, sk=300), mask=attngen.causal())
    assert (out.cpu().float() - want.float()).abs().max() < 1e-2


@gpu
@pytest.mark.parametrize("mask", [attngen.causal(), blocks])
def test_gpu_graph_capture(mask: Any) -> None:
    q, k, v = on_gpu()
    slopes = SLOPES.cuda()
    spec = attngen.Attention(mask=mask, score=attngen.alibi(slopes), return_lse=True)
    attngen.attention(q, k, v, spec=spec)  # compiles and loads
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = attngen.attention(q, k, v, spec=spec)
    for n, new in enumerate((on_gpu(seed=1), on_gpu(seed=2))):
        for old, t in zip((q, k, v, slopes), (*new, SLOPES.cuda() * n), strict=True):
            old.copy_(t)
        graph.replay()
        want, want_lse = attngen.attention(q, k, v, spec=spec)
        assert torch.equal(out, want) and torch.equal(lse, want_lse)


@gpu
def test_gpu_compile_inductor() -> None:
    table = TABLE.cuda()

    def score(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return s + table[h, (i - j + 256) % 512]

    def call(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return attngen.attention(q * 2, k, v, mask=attngen.causal(), score=score) + 1

    torch._dynamo.reset()
    fn = torch.compile(call, fullgraph=True)
    for length in (300, 411, 97):
        assert torch.equal(fn(*on_gpu(length)), call(*on_gpu(length)))


@gpu
def test_gpu_other_stream() -> None:
    """Work is ordered on the current stream: the input is filled there after a long kernel."""
    q, k, v = on_gpu()
    want = attngen.attention(q, k, v, mask=attngen.causal())
    late, stream = torch.zeros_like(q), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        late.copy_(q)
        out = attngen.attention(late, k, v, mask=attngen.causal())
    stream.synchronize()
    assert torch.equal(out, want)


@gpu
def test_gpu_second_call_does_not_wait() -> None:
    q, k, v = on_gpu()
    ids = torch.arange(300, device="cuda") // 100
    spec = attngen.Attention(mask=attngen.document(ids))
    attngen.attention(q, k, v, spec=spec)
    torch.cuda.synchronize()
    done = torch.cuda.Event()
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.cuda._sleep(200_000_000)
        attngen.attention(q, k, v, spec=spec)
        done.record()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not done.query()
    torch.cuda.synchronize()


@gpu
@pytest.mark.parametrize("sizes", [(0, 5, 5), (1, 0, 5), (1, 5, 0)])
def test_gpu_empty(sizes: tuple[int, int, int]) -> None:
    b, sq, sk = sizes
    out, lse = attngen.attention(*qkv("cuda", b=b, sq=sq, sk=sk), return_lse=True)
    torch.cuda.synchronize()
    assert out.shape == (b, 2, sq, 64) and lse.shape == (b, 2, sq)
    assert not out.any() and (lse == float("-inf")).all()
