"""The way of a call past torch's dispatcher: when it is taken, what decides the plan, and what is launched."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from struct import Struct
from typing import Any

import pytest
import torch
from stand_in import CONTEXT, STREAM, Driver, stand_in
from support import qkv
from torch import Tensor
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import attngen
from attngen import ops
from attngen.dispatch import addresses
from attngen.errors import LaunchError, SignatureError
from attngen.params import packer
from attngen.prepare import prepare
from attngen.runtime import launch
from attngen.target import SM80

gpu = pytest.mark.gpu
POINTERS = Struct("=2Q")


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    return stand_in(monkeypatch)


# ---- when it is taken ----------------------------------------------------------------------------------------------


class Subclass(Tensor):
    pass


class Functions(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Dispatch(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_plain_tensors_have_addresses() -> None:
    a, b = torch.ones(2), torch.nn.Parameter(torch.ones(3))
    with torch.no_grad():
        assert addresses((a, b)) == [a.data_ptr(), b.data_ptr()]
    with torch.inference_mode(), torch.autocast("cpu"):
        assert addresses((a, b)) == [a.data_ptr(), b.data_ptr()]
    assert addresses((a, b.detach())) == [a.data_ptr(), b.data_ptr()]


@contextmanager
def profiled() -> Iterator[None]:
    with torch.profiler.profile():
        yield


@pytest.mark.parametrize("watching", [Functions, Dispatch, torch.device, forward_ad.dual_level, profiled])
def test_not_taken_where_something_watches(watching: Callable[..., Any]) -> None:
    t = torch.ones(2)
    with watching("cpu") if watching is torch.device else watching():
        assert addresses((t,)) is None
    assert addresses((t,)) == [t.data_ptr()]


def test_not_taken_inside_transforms() -> None:
    seen: list[list[int] | None] = []

    def f(x: Tensor) -> Tensor:
        seen.append(addresses((x,)))
        return x * 1

    torch.func.vmap(f)(torch.ones(2, 2))
    torch.func.grad(lambda x: f(x).sum())(torch.ones(2))
    torch.func.functionalize(f)(torch.ones(2))
    torch.jit.trace(f, torch.ones(2), check_trace=False)
    assert len(seen) == 4 and not any(seen)


def special() -> dict[str, Tensor]:
    with torch._subclasses.FakeTensorMode() as mode:
        fake = mode.from_tensor(torch.ones(2))
    return {
        "gradient": torch.ones(2, requires_grad=True),
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "subclass": torch.ones(2).as_subclass(Subclass),
        "fake": fake,
        "meta": torch.ones(2, device="meta"),
        "negated": torch._neg_view(torch.ones(2)),
        "functional": torch._to_functional_tensor(torch.ones(2)),
        "zero": torch._efficientzerotensor((2,)),
        "empty": torch.ones(0),
    }


@pytest.mark.parametrize("name", special())
def test_not_taken_with_special_tensors(name: str) -> None:
    assert addresses((torch.ones(2), special()[name])) is None


def test_cpu_tensors_take_the_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "_on_gpu", lambda *rest: pytest.fail("taken for a CPU tensor"))
    q, k, v = qkv(sq=33)
    assert attngen.attention(q, k, v).shape == q.shape


# ---- what decides the plan -----------------------------------------------------------------------------------------


def run(q: Tensor, k: Tensor, v: Tensor, spec: attngen.Attention) -> tuple[Tensor, Tensor]:
    key, captures = prepare(spec, SM80)
    pointers = addresses((q, k, v, *captures))
    assert pointers is not None
    return ops._on_gpu(q, k, v, captures, key, spec.scale_for(q.size(3)), pointers)


def shifted(t: Tensor) -> Tensor:
    """The same tensor two bytes further: its rows are not aligned."""
    return torch.cat([t.flatten()[:1], t.flatten()])[1:].view(t.shape)


def test_a_plan_serves_equal_calls(driver: Driver) -> None:
    spec = attngen.Attention(mask=attngen.causal())
    outs = [run(*qkv(seed=seed), spec) for seed in range(3)]
    outs.append(run(*qkv(), attngen.Attention(mask=attngen.causal())))
    assert len(ops._plans) == 1 and len(driver.launched) == 4 and set(driver.streams) == {STREAM}
    assert len({t.data_ptr() for pair in outs for t in pair}) == 8


CHANGES: dict[str, Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]] = {
    "strides": lambda q, k, v: (q, torch.cat([k, k], 2)[:, :, :65], v),
    "strides of q": lambda q, k, v: (q.transpose(1, 2).contiguous().transpose(1, 2), k, v),
    "keys": lambda q, k, v: (q, k[:, :, :20], v[:, :, :20]),
    "alignment": lambda q, k, v: (q, k, shifted(v)),
    "dtype": lambda q, k, v: (q.half(), k.half(), v.half()),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_takes_another_plan(name: str, driver: Driver) -> None:
    spec, tensors = attngen.Attention(mask=attngen.causal()), qkv()
    run(*tensors, spec)
    out, _ = run(*CHANGES[name](*tensors), spec)
    assert len(ops._plans) == 2 and driver.launched[0] != driver.launched[1]
    assert out.dtype == (torch.float16 if name == "dtype" else torch.bfloat16)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda q, k, v: (q, k[:, :, :20], v), "v has 65 keys, k has 20"),
        (lambda q, k, v: (q, k.half(), v), r"k has dtype torch\.float16"),
        (lambda q, k, v: (q, k, v.transpose(2, 3).contiguous().transpose(2, 3)), "the last dimension of v has stride"),
    ],
)
def test_a_warm_plan_hides_no_error(change: Any, words: str, driver: Driver) -> None:
    spec, tensors = attngen.Attention(mask=attngen.causal()), qkv()
    run(*tensors, spec)
    for _ in range(2):
        with pytest.raises(SignatureError, match=words):
            run(*change(*tensors), spec)
    assert len(driver.launched) == 1


def pointers_in(params: bytes, kernel: Any) -> dict[str, int]:
    layout, names = packer(kernel)
    return {n: x for n, x in zip(names, layout.unpack(params), strict=True) if isinstance(x, int)}


def test_captured_tensors_are_those_of_the_call(driver: Driver) -> None:
    tensors, tables = qkv(), [torch.rand(2), torch.rand(2)]
    specs = [attngen.Attention(score=attngen.alibi(t)) for t in tables]
    text = attngen.compile(specs[0], head_dim=64).kernel.schedule.kernels[-1]
    name = next(iter(specs[0].tensors))
    for n in (0, 1, 0):
        run(*tensors, specs[n])
        assert pointers_in(driver.launched[-1][2], text)[name] == tables[n].data_ptr()
    assert len(ops._plans) == 1
    with pytest.raises(SignatureError, match=r"has the shape \[3\]"):
        run(*tensors, attngen.Attention(score=attngen.alibi(torch.rand(3))))


def test_a_kept_key_follows_its_description() -> None:
    bias = torch.zeros(1, 1, 65, 65)
    spec = attngen.Attention(score=attngen.bias(bias))
    keys = [prepare(spec, None)[0] for _ in range(2)]
    keys.append(prepare(spec, SM80)[0])
    spec.scale = -0.5
    keys.append(prepare(spec, SM80)[0])
    bias.resize_(1, 2, 65, 65)
    keys.append(prepare(spec, SM80)[0])
    spec.mask = attngen.causal()
    keys.append(prepare(spec, SM80)[0])
    assert keys[0] == keys[1] and len(set(keys)) == 5


# ---- what is launched ----------------------------------------------------------------------------------------------


def launcher(driver: Driver) -> launch.Launcher:
    return launch.Launcher(driver.loaded("add", 0, 24), 3, 32, bytes(range(24)), POINTERS)


def test_a_launcher_changes_the_front_alone(driver: Driver) -> None:
    made = launcher(driver)
    for values in ((1, 2), (3, 4)):
        made.run(values)
        assert driver.launched[-1] == (3, 32, POINTERS.pack(*values) + bytes(range(16, 24)))


def test_threads_share_no_parameters(driver: Driver) -> None:
    """All threads have written their parameters before the first one's are read."""
    count = 6
    made, together = launcher(driver), threading.Barrier(count)
    driver.during = lambda: together.wait(timeout=20)
    for _ in range(2):
        threads = [threading.Thread(target=made.run, args=((n, n + 50),)) for n in range(count)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
    seen = sorted(POINTERS.unpack(params[:16]) for _, _, params in driver.launched)
    assert seen == sorted([(n, n + 50) for n in range(count)] * 2)


@pytest.mark.parametrize("context", [None, CONTEXT + 1, CONTEXT])
def test_the_context_is_made_current_where_it_is_not(
    context: int | None, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered: list[object] = []
    monkeypatch.setattr(launch, "current", lambda context: entered.append(context) or nullcontext())
    driver.context = context
    launcher(driver).run((1, 2))
    assert entered == ([] if context == CONTEXT else ["context"]) and len(driver.launched) == 1


@pytest.mark.parametrize(("status", "name"), [(1, "CUDA_ERROR_INVALID_VALUE"), (123456, "123456")])
def test_a_refused_launch_is_named(status: int, name: str, driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    bindings = pytest.importorskip("cuda.bindings.driver")
    monkeypatch.setattr(launch, "driver", lambda: bindings)
    driver.status = status
    made = launcher(driver)
    for _ in range(2):
        with pytest.raises(LaunchError, match=rf"add: cuLaunchKernel failed: {name} \(grid 3, 32 threads"):
            made.run((1, 2))


def test_a_launcher_checks_its_arguments(driver: Driver) -> None:
    with pytest.raises(LaunchError, match="8 bytes of parameters; the kernel takes 24"):
        launch.Launcher(driver.loaded("add", 0, 24), 1, 32, bytes(8), Struct("=Q"))


# ---- on a GPU ------------------------------------------------------------------------------------------------------


@gpu
def test_gpu_direct_equals_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = qkv("cuda", sq=300, sk=300)
    taken: list[list[int] | None] = []
    monkeypatch.setattr(ops, "addresses", lambda tensors: taken.append(addresses(tensors)) or taken[-1])
    with torch.no_grad():
        out, lse = attngen.attention(q, k, v, mask=attngen.causal(), return_lse=True)
    assert taken[-1] is not None
    with Dispatch():
        want, want_lse = attngen.attention(q, k, v, mask=attngen.causal(), return_lse=True)
    assert taken[-1] is None
    assert torch.equal(out, want) and torch.equal(lse, want_lse) and out.stride() == want.stride()
    with torch.inference_mode():
        assert attngen.attention(q, k, v, mask=attngen.causal()).is_inference()


@gpu
def test_gpu_gradients_leave_the_direct_path() -> None:
    q, k, v = qkv("cuda")
    plain = attngen.attention(q, k, v)
    out = attngen.attention(q.requires_grad_(), k, v)
    assert torch.equal(out, plain)
    (dq,) = torch.autograd.grad(out.sum(), q)
    assert dq.isfinite().all()


@gpu
def test_gpu_threads() -> None:
    """Threads that have made no CUDA call yet, all in one plan."""
    spec = attngen.Attention(mask=attngen.causal())
    inputs = [qkv("cuda", seed=seed) for seed in range(4)]
    want = [attngen.attention(*tensors, spec=spec) for tensors in inputs]
    torch.cuda.synchronize()
    got: dict[int, Any] = {}

    def work(n: int) -> None:
        for _ in range(50):
            got[n] = attngen.attention(*inputs[n], spec=spec)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    torch.cuda.synchronize()
    assert all(torch.equal(got[n], want[n]) for n in range(4))
