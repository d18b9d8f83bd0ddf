"""Define the calls of a model, such as a training step, and compare what the calls compute."""

import contextlib
import math
from collections.abc import Iterable, Iterator
from functools import partial

import torch
from torch import Tensor, nn

from nanolib.measurement import BadInput, Measurements, MemoryKind, Unsupported, exact
from nanolib.meters.latency import compile_row, timed_call_ms
from nanolib.models.attention.reference import relative_error
from nanolib.models.generation import generation_of
from nanolib.models.training import is_compiled, next_token_loss, optimize
from nanolib.models.user import logits_of
from nanolib.run.memory_plan import Workload

# nanolib compares the logits at this many last positions of each sequence.
_POSITIONS = 8


class Step(Workload):
    """Call that a measurement repeats.

    Args:
        model: Model to call.
        ids: Tokens, int64, shape [batch, length], or [batch, length + 1] for training.
        optimization: Key of `OPTIMIZATIONS`.

    Attributes:
        scope: Scope of the rows about the whole call.
        compared: Name of the result that nanolib compares with the result of the eager model.
        phases: Scope → function that runs a part of the call, in the order of the parts.
        tokens: Number of tokens that a call reads or generates.
        eager: Argument of `result` without the optimization.
        optimized: Argument of `result` with the optimization.
    """

    def __init__(self, model: nn.Module, ids: Tensor, optimization: str):
        self.model, self.ids, self.tokens = model, ids, ids.numel()
        self.eager = logits_of(model)
        self.optimized = optimize(optimization, model, self.eager, ids)

    def __call__(self):
        """Run all phases in order."""
        for phase in self.phases.values():
            phase()

    call = __call__

    def kinds(self) -> dict[str, Iterable[Tensor]]:
        """Return the tensors that exist before a call, by `MemoryKind`."""
        weights = [*self.model.parameters(), *self.model.buffers()]
        return {MemoryKind.WEIGHTS: weights, MemoryKind.INPUTS: [self.ids]}

    def existing(self) -> list[Tensor]:
        """Return the tensors that exist before a call."""
        return [tensor for tensors in self.kinds().values() for tensor in tensors]

    def owners(self) -> dict[int, Tensor]:
        """Map the `id` of each optimizer state to its weight."""
        return {}

    def workloads(self) -> Iterator["Step"]:
        """Yield the calls whose memory is measured: by default, only the whole call."""
        yield self

    def result(self, forward):
        """Compute the result to compare, without an effect on later calls."""

    def against_eager(self, optimization: str) -> Measurements:
        """Measure the compile time and the difference from the eager result."""
        if is_compiled(optimization):
            yield compile_row(first_ms=timed_call_ms(self), later_ms=timed_call_ms(self))
        if optimization in ("eager", "checkpoint"):
            return  # Checkpoints change only the backward pass.
        eager, again = (self.result(self.eager) for _ in range(2))
        # A result that depends on random numbers, such as those of dropout, cannot be compared.
        if isinstance(eager, Tensor) and torch.equal(eager, again):
            error = relative_error(self.result(self.optimized), eager)
            yield exact("relative_error", error, scope="against_eager", method=self.compared)


class Inferring(Step):
    """Forward pass without gradients, in evaluation mode."""

    scope, compared = "inference", "logits"

    def __init__(self, model: nn.Module, ids: Tensor, optimization: str):
        super().__init__(model.eval(), ids, optimization)
        self.phases = {self.scope: partial(self.result, self.optimized)}

    @torch.no_grad()  # torchao's FP8 with a scale per row fails in inference_mode.
    def result(self, forward):
        """Compute the logits."""
        return forward(self.ids)


class Training(Step):
    """Forward pass, backward pass and step of AdamW, in training mode."""

    scope, compared = "training_step", "loss"

    def __init__(self, model: nn.Module, ids: Tensor, optimization: str):
        super().__init__(model.train(), ids, optimization)
        self._optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        self.phases = {
            "forward": self.forward,
            "backward": self.backward,
            "optimizer_step": self.optimizer_step,
        }
        self.tokens = ids[:, 1:].numel()

    def forward(self) -> None:
        """Compute the loss."""
        self._loss = next_token_loss(self.optimized, self.ids)

    def backward(self) -> None:
        """Compute the gradients."""
        self._loss.backward()

    def optimizer_step(self) -> None:
        """Update the weights and free the gradients."""
        self._optimizer.step()
        self._optimizer.zero_grad()

    def result(self, forward) -> Tensor:
        """Compute the loss."""
        return next_token_loss(forward, self.ids).detach()

    def kinds(self) -> dict[str, Iterable[Tensor]]:
        """Return the weights, the input and the optimizer's states by `MemoryKind`."""
        return super().kinds() | {MemoryKind.STATES: [state for _, state in self._states()]}

    def first(self) -> None:
        """Create the optimizer's states."""
        if not self._optimizer.state:
            self()

    def owners(self) -> dict[int, Tensor]:
        """Map the `id` of each optimizer state to its weight."""
        return {id(state): weight for weight, state in self._states()}

    def _states(self) -> list[tuple[Tensor, Tensor]]:
        return [(w, v) for w, state in self._optimizer.state.items() for v in state.values()]


class Generating(Step):
    """Generation: the model reads a prompt at once, and then generates tokens one by one.

    Args:
        model: Model to call, in evaluation mode.
        prompt: Tokens, int64, shape [batch, length].
        new_tokens: Number of tokens to generate before decoding restarts at the end of the prompt.
        optimization: Optimization of decoding, `eager` or `cuda_graph`.
    """

    scope, compared = "decode", "cache"

    def __init__(
        self, model: nn.Module, prompt: Tensor, new_tokens: int, optimization: str = "eager"
    ):
        self.model, self.ids, self.tokens = model.eval(), prompt, len(prompt)
        captured = optimization == "cuda_graph"
        self.generation = self.optimized = generation_of(model, prompt, new_tokens, captured)
        self.phases = {self.scope: self.generation.decode}

    @property
    def eager(self):
        """Return another generation from the same prompt, without the optimization."""
        return generation_of(self.model, self.ids, self.generation.new_tokens)

    @torch.no_grad()
    def result(self, forward) -> Tensor:
        """Generate all new tokens, and return the cache as one vector."""
        forward.all_tokens()
        return torch.cat([x.flatten() for x in forward.cache.tensors])

    def kinds(self) -> dict[str, Iterable[Tensor]]:
        """Return the weights, the cache, the prompt and the last token, by `MemoryKind`."""
        *cache, prompt, token = self.generation.tensors
        # A loop over the result keeps the last tensor alive, so the cache must not be last.
        return {MemoryKind.CACHE: cache} | super().kinds() | {MemoryKind.INPUTS: [prompt, token]}

    def first(self) -> None:
        """Read the prompt and generate a token, because sliding windows then drop the prompt."""
        self.generation.prefill()
        if self.generation.new_tokens > 1:
            self.generation.decode()

    def workloads(self) -> Iterator[Step]:
        """Yield the calls whose memory is measured: reading the prompt, and generating a token."""
        yield _Prefill(self)
        yield self


class _Prefill(Step):
    """The part of `Generating` that reads the prompt."""

    scope = "prefill"

    def __init__(self, whole: Generating):
        self.model, self.generation, self.kinds = whole.model, whole.generation, whole.kinds
        self.phases = {self.scope: self.generation.prefill}
        self.tokens = whole.ids.numel()

    def first(self):
        """Read the prompt and empty the cache, so that only the masks of the prompt remain."""
        self.generation.prefill()
        self.generation.forget()


def determinism_rows(model: nn.Module, ids: Tensor) -> Measurements:
    """Compare logits between two runs, between batch sizes, and between prefill and decode.

    Args:
        model: Model in evaluation mode.
        ids: Tokens, int64, shape [batch, length]. nanolib splits each sequence into two sequences,
            because the comparison of batch sizes needs at least two.

    Yields:
        Rows of `ulp_difference` and `greedy_agreement` for the last positions, by scope.
    """
    length = ids.shape[1] // 2
    if (positions := min(_POSITIONS, length - 1)) < 1:
        return
    ids = ids[:, : 2 * length].reshape(-1, length)
    # Not every model has a cache, finite logits, and a mask that keeps a pair at this length.
    with contextlib.suppress(Unsupported, BadInput):
        batch, alone = (_read(model, some, positions) for some in (ids, ids[:1]))
        yield from _compare_logits("run_to_run", batch, _read(model, ids, positions))
        yield from _compare_logits("batch", alone, batch[:1])
        yield from _compare_logits("decode", alone, _decode(model, ids[:1], positions))


@torch.no_grad()
def _read(model: nn.Module, ids: Tensor, positions: int) -> Tensor:
    """Compute the last positions' logits in one pass, shape [batch, positions, vocab_size]."""
    logits = logits_of(model)(ids)
    if not isinstance(logits, Tensor) or logits.dim() != 3:
        raise Unsupported("the model returns no logits of shape [batch, length, vocab_size]")
    return logits[:, -positions:].cpu()


def _decode(model: nn.Module, ids: Tensor, positions: int) -> Tensor:
    """Compute the last positions' logits token by token, shape [batch, positions, vocab_size]."""
    generation, logits = generation_of(model, ids[:, :-positions], positions), []
    generation.prefill()
    for position in range(-positions, 0):
        generation.token = ids[:, position]
        logits.append(generation.next_logits())
    return torch.stack(logits, dim=1).cpu()


def _compare_logits(scope: str, some: Tensor, others: Tensor) -> Measurements:
    """Compare the logits of the same positions, floating-point, shape [..., vocab_size].

    The unit of the difference is the unit in the last place (ULP) of the largest logit at a
    position, because the ULP of a logit near zero is tiny.

    Raises:
        Unsupported: A logit is not finite.
    """
    exponent = torch.maximum(some.abs(), others.abs()).amax(dim=-1, keepdim=True).frexp().exponent
    unit = torch.finfo(some.dtype).eps * 2.0 ** (exponent - 1)
    ulps = ((some.double() - others.double()).abs() / unit).max().item()
    if not math.isfinite(ulps):
        raise Unsupported("a logit is not finite")
    agreement = (some.argmax(dim=-1) == others.argmax(dim=-1)).double().mean().item()
    row = {"scope": scope, "method": f"logits of the last {some.shape[1]} positions"}
    yield exact("ulp_difference", ulps, **row)
    yield exact("greedy_agreement", agreement, **row)
