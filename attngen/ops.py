"""The torch operator. It takes tensors and a key that names what to compute in a registry of this process: so a
compiled graph holds a short text, and every tensor the kernel reads is an input of its node."""

from __future__ import annotations

import hashlib
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from attngen import gradient, measured
from attngen.backward_pipeline import Asked, gradient_names
from attngen.batching import backward_rule, forward_rule
from attngen.config import AnyConfig
from attngen.dispatch import addresses, transformed
from attngen.errors import EmulationWarning, GradientError, PassError, SignatureError, SpecError, VerifyError
from attngen.evaluate import evaluate
from attngen.execute import backward_target, empty_like_rows, run, target_for
from attngen.expr import variables
from attngen.gradient import GradientPlan, backward_for, backward_signature, rows_are_vectors
from attngen.kernel import Kernel, kernel_for
from attngen.plan import Plan, plan
from attngen.progress import Progress
from attngen.signature import VECTOR_BYTES, Shapes, Signature, check_tensors, signature_of
from attngen.spec import Normalizer, Variant
from attngen.target import Feature, Target
from attngen.trace import ShapeRule

EMULATED_PER_SECOND = 400e6  # multiply-adds of the emulator on one core, measured at head dims 64 and 128
PATIENCE_SECONDS = 10.0
PLANS = 4096
BACKWARD_WORK = 3.5  # multiply-adds of all gradients, in those of the forward pass
_log = logging.getLogger("attngen")


@dataclass(frozen=True)
class Entry:
    """What a key stands for."""

    variant: Variant
    rules: tuple[ShapeRule, ...]
    target: Target | None  # None: what serves the device and the call best
    config: AnyConfig | None

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Names of the captured tensors in the order of the operator's argument; the sink comes last."""
        return tuple(c.name for c in self.variant.captures) + (("sink",) if self.variant.sink else ())

    @property
    def has_lse(self) -> bool:
        return self.variant.normalizer is Normalizer.SOFTMAX

    @cached_property
    def _types(self) -> tuple[tuple[torch.dtype, int], ...]:
        sink = ((self.variant.sink.torch_dtype, 1),) if self.variant.sink else ()
        return tuple((c.storage.torch_dtype, c.rank) for c in self.variant.captures) + sink

    def check(self, q: Tensor, k: Tensor, v: Tensor, captures: Sequence[Tensor]) -> Shapes:
        """Raises SignatureError where the tensors fit neither each other nor the description."""
        got = tuple((t.dtype, t.dim()) for t in captures)
        if got != self._types:
            raise SignatureError(
                f"attngen::forward: captures are {_types(got)}. Allowed for this key: {_types(self._types)} "
                f"({', '.join(self.names) or 'none'})"
            )
        return check_tensors(q, k, v, Bound(self, dict(zip(self.names, captures, strict=True))))


@dataclass(frozen=True)
class Bound:
    """An entry with the captured tensors of one call."""

    entry: Entry
    tensors: Mapping[str, Tensor]

    @property
    def variant(self) -> Variant:
        return self.entry.variant

    @property
    def shape_rules(self) -> tuple[ShapeRule, ...]:
        return self.entry.rules


def _types(types: Sequence[tuple[torch.dtype, int]]) -> str:
    return ", ".join(f"{dtype} of rank {rank}" for dtype, rank in types) or "none"


_entries: dict[str, Entry] = {}
_plans: dict[tuple[object, ...], Plan] = {}
_gradient_plans: dict[tuple[object, ...], GradientPlan] = {}


def register(
    variant: Variant, rules: tuple[ShapeRule, ...], target: Target | None, config: AnyConfig | None = None
) -> str:
    """The key of a description. Equal descriptions have the same key, in every process."""
    more = hashlib.sha256(repr((rules, config)).encode()).hexdigest()[:8]
    key = f"{variant.variant_key()}-{more}-{target.name if target else 'auto'}"
    _entries.setdefault(key, Entry(variant, rules, target, config))
    return key


def entry(key: str) -> Entry:
    """What `register` gave this key for."""
    found = _entries.get(key)
    if found is None:
        raise SignatureError(
            f"attngen::forward: the key {key!r} is not known in this process. Allowed: keys of descriptions that "
            "this process has made. Call attngen.attention(...) with the description once before a saved graph is run"
        )
    return found


# ---- running -----------------------------------------------------------------------------------------------------


def _forward(q: Tensor, k: Tensor, v: Tensor, captures: list[Tensor], key: str, scale: float) -> tuple[Tensor, Tensor]:
    if not q.is_cuda:
        return _emulated(q, k, v, captures, key, scale)
    return _on_gpu(q, k, v, captures, key, scale, [t.data_ptr() for t in (q, k, v, *captures)])


def _on_gpu(
    q: Tensor, k: Tensor, v: Tensor, captures: list[Tensor], key: str, scale: float, pointers: list[int]
) -> tuple[Tensor, Tensor]:
    # what the plan depends on, and what its checks looked at
    call: tuple[object, ...] = (
        key, scale, not (pointers[0] | pointers[1] | pointers[2]) % VECTOR_BYTES,
        q.dtype, q.get_device(), q.shape, q.stride(), k.dtype, k.get_device(), k.shape, k.stride(),
        v.dtype, v.get_device(), v.shape, v.stride(),
    )  # fmt: skip
    if captures:
        call += tuple([x for t in captures for x in (t.dtype, t.get_device(), t.shape, t.stride())])
    found = _plans.get(call)
    if found is not None:
        return found.run(pointers)
    kernel, shapes = _kernel(q, k, v, captures, key)
    if is_empty(shapes):
        return run(kernel, q, k, v, dict(zip(entry(key).names, captures, strict=True)), scale)
    if len(_plans) >= PLANS:  # many lengths, as in decoding: forget them together rather than count uses
        _plans.clear()
    made = _plans[call] = plan(kernel, q, k, v, captures, entry(key).names, scale)
    return made.run(pointers)


def _kernel(q: Tensor, k: Tensor, v: Tensor, captures: Sequence[Tensor], key: str) -> tuple[Kernel, Shapes]:
    known = entry(key)
    shapes = known.check(q, k, v, captures)
    signature = signature_of(q, k, v, dict(zip(known.names, captures, strict=True)))
    target = known.target or target_for(known.variant, signature, q.device)
    config = known.config or (_measured(known.variant, signature, target, q.get_device()) if q.is_cuda else None)
    return kernel_for(known.variant, signature, target, config), shapes


def _measured(variant: Variant, signature: Signature, target: Target, device_index: int) -> AnyConfig | None:
    """What was measured fastest on this device; None: nothing, or a configuration that derives no kernel any more."""
    on = measured.machine(device_index) if measured.any_kept() else None
    config = measured.lookup(on, variant, signature, target) if on else None
    if config is not None:
        try:
            kernel_for(variant, signature, target, config)
        except (PassError, VerifyError, SpecError) as error:
            _log.warning("%s was measured here and is not used, measure again: %s", config, error)
            return None
    return config


def forget_plans() -> None:
    """The next call of each kind looks again for what was measured here."""
    _plans.clear()
    _gradient_plans.clear()


def is_empty(shapes: Shapes) -> bool:
    """A call that launches nothing."""
    return 0 in (shapes.B, shapes.Hq, shapes.Sq, shapes.Sk)


def _emulated(
    q: Tensor, k: Tensor, v: Tensor, captures: Sequence[Tensor], key: str, scale: float
) -> tuple[Tensor, Tensor]:
    if q.device.type != "cpu":
        raise SignatureError(f"q is on {q.device}. Allowed: cuda, and cpu (in the emulator)")
    known = entry(key)
    bound = dict(zip(known.names, captures, strict=False))
    kernel, shapes = _kernel(q, k, v, captures, key)
    return emulate(kernel, shapes, q, k, v, bound, scale)


def emulate(
    kernel: Kernel, shapes: Shapes, q: Tensor, k: Tensor, v: Tensor, captures: Mapping[str, Tensor], scale: float
) -> tuple[Tensor, Tensor]:
    """A call on CPU tensors. Warns before it starts where it will take long."""
    if is_empty(shapes):
        return run(kernel, q, k, v, captures, scale)
    seconds = emulation_seconds(kernel.variant, shapes, q.size(3) + v.size(3), captures)
    with _emulating(kernel.variant, shapes, seconds):
        return run(kernel, q, k, v, captures, scale)


@contextmanager
def _emulating(variant: Variant, shapes: Shapes, seconds: float) -> Iterator[None]:
    """Around a call that is emulated: warns where it will take long, and says what is going on."""
    if seconds > PATIENCE_SECONDS:
        warnings.warn(
            f"this call on CPU tensors runs in the emulator and will take about {seconds:.0f} s "
            f"(batch {shapes.B}, {shapes.Hq} heads, {shapes.Sq} queries, {shapes.Sk} keys). Give it smaller shapes, or "
            "move the tensors to a GPU",
            EmulationWarning, stacklevel=5,
        )  # fmt: skip
    with Progress() as progress:
        progress.step(
            f"emulating {variant.description} on the CPU (about {seconds:.0f} s, and a compilation if it is new)"
        )
        yield


def emulation_seconds(variant: Variant, shapes: Shapes, head_dims: int, captures: Mapping[str, Tensor]) -> float:
    """How long the emulator will take. Tiles that the mask leaves empty are not visited, so they do not count."""
    work = shapes.B * shapes.Hq * shapes.Sq * shapes.Sk * head_dims / EMULATED_PER_SECOND
    return work * visited_part(variant, shapes, captures) if work > PATIENCE_SECONDS else work


def visited_part(variant: Variant, shapes: Shapes, captures: Mapping[str, Tensor]) -> float:
    """Share of the score tiles with a visible key, from samples."""
    tile, inside, samples = 64, 8, 512
    draw = torch.Generator().manual_seed(0)

    def at(size: int) -> Tensor:
        return torch.randint(size, (samples, 1, 1), generator=draw)

    step = torch.arange(0, tile, tile // inside)
    env: dict[str, Tensor | int] = {"b": at(shapes.B), "h": at(shapes.Hq), "seqlen_q": shapes.Sq, "seqlen_k": shapes.Sk}
    env["i"] = (at(shapes.Sq) // tile * tile + step[None, :, None]).clamp(max=shapes.Sq - 1)
    env["j"] = (at(shapes.Sk) // tile * tile + step[None, None, :]).clamp(max=shapes.Sk - 1)
    seen = evaluate(variant.mask, env, captures).expand(samples, inside, inside)
    return seen.flatten(1).any(1).double().mean().item()


# ---- gradients ---------------------------------------------------------------------------------------------------


def reject_transforms() -> None:
    """Raises GradientError inside torch.func.grad and the like, where torch's own error names none of this."""
    if transformed() in ("Grad", "Jvp"):
        raise GradientError(
            "attngen.attention inside a transformation of torch.func (grad, vjp, jvp, jacrev), which its operator does "
            "not support. Take gradients with torch.autograd.grad or backward(); torch.vmap is supported"
        )


def reject_tangents(tensors: Sequence[Tensor], names: Sequence[str]) -> None:
    """Raises GradientError where forward-mode autograd would have to know a derivative."""
    if forward_ad._current_level >= 0:
        for name, t in zip(names, tensors, strict=True):
            if forward_ad.unpack_dual(t).tangent is not None:
                raise GradientError(
                    f"`{name}` has a tangent, and attngen has no forward-mode derivative. Give it without one, or take "
                    "gradients in reverse mode: torch.autograd.grad"
                )


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, captures, ctx.key, ctx.scale = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, *output, *captures)


def _gradients(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
    """The gradients of the operator's arguments, from those of its results."""
    q, k, v, out, lse, *captures = ctx.saved_tensors
    needed = [*ctx.needs_input_grad[:3], *(ctx.needs_input_grad[3] if captures else ())]
    result: list[Tensor | None] = [None] * len(needed)
    if (dout is not None or dlse is not None) and any(needed):
        arguments = (q, k, v, out, lse, dout, dlse, captures, needed, ctx.key, ctx.scale)
        made = iter(torch.ops.attngen.backward.default(*arguments))
        result = [next(made) if n else None for n in needed]
    return (*result[:3], result[3:], None, None)


def _backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor | None, dlse: Tensor | None,
    captures: list[Tensor], needed: list[bool], key: str, scale: float,
) -> list[Tensor]:  # fmt: skip
    known = entry(key)
    tensors = dict(zip(("q", "k", "v", *known.names), (q, k, v, *captures), strict=True))
    wanted = [name for name, n in zip(tensors, needed, strict=True) if n]
    bound = dict(zip(known.names, captures, strict=True))
    same_bits = torch.are_deterministic_algorithms_enabled()
    if dout is None:
        dout = q.new_zeros(()).expand(out.shape)
    if not rows_are_vectors(dout) and signature_of(q, k, v).alignment == VECTOR_BYTES:
        serving = known.target or target_for(known.variant, signature_of(q, k, v), q.device)
        if serving.has(Feature.WGMMA):  # a copy costs a fraction of what kernels without the copy engine do
            dout = dout.clone(memory_format=torch.contiguous_format)
    given = {"q": q, "k": k, "v": v, "out": out, "lse": lse, "dout": dout, **({} if dlse is None else {"dlse": dlse})}
    call: tuple[object, ...] = (key, scale, *needed, dlse is None, same_bits)
    if q.is_cuda:  # what the plan depends on, and what its checks looked at
        call += tuple([x for t in given.values() for x in (t.data_ptr() % VECTOR_BYTES == 0, t.shape, t.stride())])
        call += tuple([x for t in (q, k, v, *captures) for x in (t.dtype, t.get_device(), t.shape, t.stride())])
        plan = _gradient_plans.get(call)
        if plan is not None:
            return _in_order(plan.run(given, bound), wanted, tensors)
    shapes = known.check(q, k, v, captures)
    if is_empty(shapes):
        found = {}
        if dlse is not None and "sink" in wanted:  # without a key, lse is the sink
            found["sink"] = dlse.sum((0, 2)).to(tensors["sink"].dtype)
        return _in_order(found, wanted, tensors)
    asked = Asked(frozenset(wanted) & frozenset(gradient_names(known.variant)), dlse is not None, same_bits)
    if not asked.wanted:
        return _in_order({}, wanted, tensors)
    signature = backward_signature(signature_of(q, k, v), out, dout)
    target = backward_target(known.target or target_for(known.variant, signature, q.device), signature)
    kernel = backward_for(known.variant, signature, target, asked)
    sizes = {"b": shapes.B, "h": shapes.Hq, "i": shapes.Sq, "j": shapes.Sk}
    unordered = gradient.unordered(kernel, sizes) if same_bits else []
    _check_order(unordered)
    if not q.is_cuda:
        work = emulation_seconds(known.variant, shapes, q.size(3) + v.size(3), bound) * BACKWARD_WORK
        with _emulating(known.variant, shapes, work):
            return _in_order(gradient.run(kernel, given, bound, scale), wanted, tensors)
    plan = gradient.plan(kernel, given, bound, scale)
    if not unordered:  # a warning comes with each call
        if len(_gradient_plans) >= PLANS:
            _gradient_plans.clear()
        _gradient_plans[call] = plan
    return _in_order(plan.run(given, bound), wanted, tensors)


def _in_order(found: Mapping[str, Tensor], wanted: Sequence[str], tensors: Mapping[str, Tensor]) -> list[Tensor]:
    return [found[n] if n in found else _gradient_like(n, tensors[n]).zero_() for n in wanted]


def _check_order(unordered: Sequence[str]) -> None:
    """What torch.use_deterministic_algorithms asks for, where gradients are added in no fixed order."""
    if unordered:
        message = (
            f"the gradient of `{unordered[0]}` is a sum of many elements, added by atomics in an order that differs "
            "from run to run, and torch.use_deterministic_algorithms(True) is set. Allowed: gradients of q, k, v, the "
            "sink, scalars, tensors that are indexed by b, h and i, and a bias with an element for each score. Give "
            f"{unordered[0]}.detach(), or leave the setting off"
        )
        if not torch.is_deterministic_algorithms_warn_only_enabled():
            raise GradientError(message)
        warnings.warn(message, stacklevel=2)


def _gradient_like(name: str, t: Tensor) -> Tensor:
    """An uninitialised gradient, as the kernels make it."""
    return empty_like_rows(t, t.size(3)) if name in ("q", "k", "v") else t.new_empty(t.shape)


def _twice(ctx: Any, *_: object) -> None:
    raise GradientError(
        "attngen::backward has no derivative: second-order gradients of attention are not supported. Take first-order "
        "ones (create_graph=False), or write the part that is differentiated twice in torch"
    )


# ---- shapes, registration ------------------------------------------------------------------------------------------


def _fake(q: Tensor, k: Tensor, v: Tensor, captures: list[Tensor], key: str, scale: float) -> tuple[Tensor, Tensor]:
    known = entry(key)
    known.check(q, k, v, captures)
    lse = q.new_empty(q.shape[:3] if known.has_lse else (0,), dtype=torch.float32)
    return empty_like_rows(q, v.size(3)), lse


def _fake_backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor | None, dlse: Tensor | None,
    captures: list[Tensor], needed: list[bool], key: str, scale: float,
) -> list[Tensor]:  # fmt: skip
    tensors = dict(zip(("q", "k", "v", *entry(key).names), (q, k, v, *captures), strict=True))
    return [_gradient_like(name, t) for (name, t), n in zip(tensors.items(), needed, strict=True) if n]


def _reads_batch(key: str) -> bool:
    variant = entry(key).variant
    return "b" in variables(variant.score, variant.mask)


_library = torch.library.Library("attngen", "DEF")
_library.define(
    "forward(Tensor q, Tensor k, Tensor v, Tensor[] captures, str key, float scale) -> (Tensor out, Tensor lse)"
)
_library.define(
    "backward(Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor? dout, Tensor? dlse, Tensor[] captures, "
    "bool[] needed, str key, float scale) -> Tensor[]"
)
_library.impl("forward", _forward, "CompositeExplicitAutograd")
_library.impl("backward", _backward, "CompositeExplicitAutograd")
torch.library.register_fake("attngen::forward", _fake, lib=_library)
torch.library.register_fake("attngen::backward", _fake_backward, lib=_library)
torch.library.register_vmap("attngen::forward", partial(forward_rule, _reads_batch), lib=_library)
torch.library.register_vmap("attngen::backward", partial(backward_rule, _reads_batch), lib=_library)
torch.library.register_autograd("attngen::forward", _gradients, setup_context=_save, lib=_library)
torch.library.register_autograd("attngen::backward", _twice, lib=_library)

forward: Any = torch.ops.attngen.forward.default


def call(q: Tensor, k: Tensor, v: Tensor, captures: list[Tensor], key: str, scale: float) -> tuple[Tensor, Tensor]:
    """As `forward`, without the way through torch's dispatcher where that only costs time."""
    if not torch.compiler.is_dynamo_compiling():
        if q.is_cuda:
            pointers = addresses((q, k, v, *captures))
            if pointers is not None:
                return _on_gpu(q, k, v, captures, key, scale, pointers)
        reject_tangents((q, k, v, *captures), ("q", "k", "v", *(entry(key).names if captures else ())))
        reject_transforms()
    result: tuple[Tensor, Tensor] = forward(q, k, v, captures, key, scale)
    return result
