"""Who is measured: attngen, and the peers that this machine has. A contender that cannot take part says why."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from attngen.api import attention
from attngen.bench.cases import CAP, WINDOW, Inputs, Pattern, flex_mods
from attngen.errors import AttngenError
from attngen.target import SM80, Target

SAME_BITS = " same bits"


class UnsupportedError(AttngenError):
    """A contender does not compute a case. The message is the reason, for the record."""


@dataclass(frozen=True)
class Call:
    """`run` is what is timed; `output` finds [B, H, S, Dv] in what it gave, or the gradients of `Inputs.leaves`."""

    run: Callable[[], Any]
    output: Callable[[Any], Any] = lambda given: given


class Contender(Protocol):
    @property
    def name(self) -> str: ...

    def missing(self) -> str | None:
        """Why it cannot take part on this machine; None where it can."""
        ...

    def call(self, inputs: Inputs) -> Call:
        """Raises UnsupportedError where it does not compute this case."""
        ...


def call_of(inputs: Inputs, forward: Callable[[], Any]) -> Call:
    """The forward pass, or the backward pass of one that has run."""
    if inputs.dout is None:
        return Call(forward)
    out, leaves = forward(), inputs.leaves
    return Call(lambda: torch.autograd.grad(out, leaves, inputs.dout, retain_graph=True))


@dataclass(frozen=True)
class Attngen:
    """`target` None: what `attention` chooses for the device and the call."""

    target: Target | None = None

    @property
    def name(self) -> str:
        return f"attngen {self.target.name}" if self.target else "attngen"

    def missing(self) -> str | None:
        return None

    def call(self, inputs: Inputs) -> Call:
        q, k, v, spec = inputs.q, inputs.k, inputs.v, inputs.spec
        target = self.target.name if self.target else None
        return call_of(inputs, lambda: attention(q, k, v, spec=spec, target=target))


@dataclass(frozen=True)
class Sdpa:
    """A backend of torch's scaled_dot_product_attention."""

    name: str
    backend: SDPBackend

    def missing(self) -> str | None:
        return None if torch.cuda.is_available() else "torch finds no GPU"

    def call(self, inputs: Inputs) -> Call:
        case, q, k, v = inputs.case, inputs.q, inputs.k, inputs.v
        causal = case.pattern is Pattern.CAUSAL
        if not causal and case.pattern is not Pattern.FULL:
            raise UnsupportedError("takes no such variant but as a materialised bias")
        if causal and case.seqlen_q != case.seqlen_k:
            raise UnsupportedError("is_causal is aligned to the first key, not to the last")
        grouped = case.heads != case.kv_heads

        def run() -> Tensor:
            with sdpa_kernel(self.backend):
                return scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=grouped)

        return call_of(inputs, run)


@dataclass(frozen=True)
class FlashAttention3:
    """A module `fa3` with `forward(q, k, v, causal=)` or `attention`, on [batch, seq, heads, head_dim]. For the
    variants that FlashAttention-3 has arguments for, the operator that it registers."""

    name: str = "FlashAttention-3"
    head_dims: tuple[int, ...] = (64, 96, 128, 192, 256)

    def missing(self) -> str | None:
        try:
            import_module("fa3")
        except (ImportError, OSError) as error:
            return f"import fa3: {error}"
        return None

    def call(self, inputs: Inputs) -> Call:
        case, more = inputs.case, flash3_arguments(inputs.case.pattern)
        if case.head_dim not in self.head_dims or case.head_dim_v != case.head_dim:
            raise UnsupportedError(f"has kernels for equal head dims {', '.join(map(str, self.head_dims))}")
        fa3 = import_module("fa3")
        compute = getattr(fa3, "forward", fa3.attention)  # the former spares autograd's time
        q, k, v = (t.transpose(1, 2) for t in (inputs.q, inputs.k, inputs.v))
        causal = case.pattern is not Pattern.FULL

        if inputs.dout is not None:
            if more:
                raise UnsupportedError("gradients are asked for without a variant's arguments")
            return self.gradients(inputs, False)

        def output(given: Any) -> Tensor:
            out: Tensor = given[0] if isinstance(given, tuple) else given
            return out.transpose(1, 2)

        if not more:
            return Call(lambda: compute(q, k, v, causal=causal), output)
        scale = inputs.spec.scale_for(case.head_dim)
        operator = torch.ops.flash_attn_3.fwd  # an AttributeError where fa3 registers none is its reason
        return Call(lambda: operator(q, k, v, softmax_scale=scale, is_causal=causal, num_splits=1, **more), output)

    @staticmethod
    def gradients(inputs: Inputs, same_bits: bool) -> Call:
        """By its operator, without autograd's time."""
        q, k, v = (t.detach().transpose(1, 2) for t in (inputs.q, inputs.k, inputs.v))
        assert inputs.dout is not None
        dout, causal = inputs.dout.transpose(1, 2), inputs.case.pattern is Pattern.CAUSAL
        out, lse = import_module("fa3").forward(q, k, v, causal=causal)
        scale = inputs.spec.scale_for(q.size(3))

        def run() -> tuple[Tensor, ...]:
            made = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
            torch.ops.flash_attn_3.bwd(
                dout, q, k, v, out, lse, *made, softmax_scale=scale, is_causal=causal, deterministic=same_bits
            )
            return made

        return Call(run, lambda given: tuple(t.transpose(1, 2) for t in given))


def flash3_arguments(pattern: Pattern) -> dict[str, float]:
    """What FlashAttention-3's operator takes for a variant beside a causal mask. Its softcap is that of the hardware's
    approximate tanh."""
    match pattern:
        case Pattern.FULL | Pattern.CAUSAL:
            return {}
        case Pattern.SOFTCAP:
            return {"softcap": CAP}
        case Pattern.WINDOW:
            return {"window_size_left": WINDOW - 1, "window_size_right": 0}
        case _:
            raise UnsupportedError("takes no such variant")


@dataclass(frozen=True)
class Flex:
    """FlexAttention, compiled by torch.compile for each case."""

    name: str = "FlexAttention"

    def missing(self) -> str | None:
        if not torch.cuda.is_available():
            return "torch finds no GPU"
        try:
            import_module("triton")
        except ImportError as error:
            return f"import triton: {error}"
        return None

    def call(self, inputs: Inputs) -> Call:
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        case, q, k, v = inputs.case, inputs.q, inputs.k, inputs.v
        score_mod, mask_mod = flex_mods(inputs)
        blocks = None
        if mask_mod is not None:
            blocks = create_block_mask(mask_mod, None, None, case.seqlen_q, case.seqlen_k, device=str(q.device))
        torch._dynamo.reset()  # else its limit of recompilations ends the run
        compiled: Any = torch.compile(flex_attention, dynamic=False)
        grouped = case.heads != case.kv_heads
        with torch._functorch.config.patch(donated_buffer=False):  # the backward pass is run again and again
            return call_of(
                inputs, lambda: compiled(q, k, v, score_mod=score_mod, block_mask=blocks, enable_gqa=grouped)
            )


@dataclass(frozen=True)
class SameBits:
    """Gradients that are the same bits in every run, as torch.use_deterministic_algorithms asks for."""

    of: Attngen | Sdpa | FlashAttention3

    @property
    def name(self) -> str:
        return self.of.name + SAME_BITS

    def missing(self) -> str | None:
        return self.of.missing()

    def call(self, inputs: Inputs) -> Call:
        if isinstance(self.of, FlashAttention3):
            self.of.call(inputs)  # says what it does not compute
            return self.of.gradients(inputs, True)
        call = self.of.call(inputs)
        return Call(lambda: _deterministic(call.run), call.output)


def _deterministic(run: Callable[[], Any]) -> Any:
    """Without the NaN that torch would write to fresh memory, which is for debugging."""
    settings = torch.utils.deterministic
    fill, settings.fill_uninitialized_memory = settings.fill_uninitialized_memory, False  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True)
    try:
        return run()
    finally:
        torch.use_deterministic_algorithms(False)
        settings.fill_uninitialized_memory = fill  # type: ignore[attr-defined]


FLASH_2, FLASH_3 = Sdpa("FlashAttention-2", SDPBackend.FLASH_ATTENTION), FlashAttention3()
PEERS: tuple[Contender, ...] = (Sdpa("cuDNN", SDPBackend.CUDNN_ATTENTION), FLASH_2, FLASH_3, Flex())
BACKWARD_PEERS: tuple[Contender, ...] = (*PEERS, SameBits(FLASH_2), SameBits(FLASH_3))


def own(capability: tuple[int, int]) -> tuple[Contender, ...]:
    """attngen as it is called; on Hopper beside what it makes without Hopper's instructions."""
    return (Attngen(), Attngen(SM80)) if capability[0] >= 9 else (Attngen(),)


def own_backward(capability: tuple[int, int]) -> tuple[Contender, ...]:
    return (*own(capability), SameBits(Attngen()))
