"""Define the calls of a model: a forward pass, a training step, and generation."""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from nanolib.measurement import Measurements, MemoryKind, exact
from nanolib.meters.ceilings import rate
from nanolib.models.attention.reference import relative_error
from nanolib.models.generation import generation_of
from nanolib.models.optimize import is_compiled, optimize
from nanolib.models.training import next_token_loss
from nanolib.models.user import logits_of
from nanolib.run.case import Measuring, compile_row, timed_call_ms
from nanolib.run.memory_plan import Workload


class Step(Workload):
    """Call that a measurement repeats.

    Attributes:
        scope: Scope of the rows about the whole call.
        compared: Name of the result that nanolib compares with the result of the eager model.
        model: Model to call.
        ids: Input of the model, int64, shape [batch, length], or [batch, length + 1] for training.
        phases: Parts of the call by scope, in the order in which the parts run.
        tokens: Number of tokens that a call reads or generates.
        eager: Argument of `result` without the optimization.
        optimized: Argument of `result` with the optimization.
    """

    scope: str
    compared: ClassVar[str]
    model: nn.Module
    ids: Tensor
    phases: dict[str, Callable[[], object]]
    tokens: int
    eager: Any
    optimized: Any

    def __call__(self) -> None:
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

    def result(self, forward: Any) -> Any:
        """Compute the result to compare, without an effect on later calls."""

    def against_eager(self, optimization: str) -> Measurements:
        """Measure the compile time and the difference from the eager result."""
        if is_compiled(optimization):
            first_ms, later_ms = (timed_call_ms(self) for _ in range(2))
            yield compile_row(first_ms, later_ms)
        if optimization in ("eager", "checkpoint"):
            return  # Checkpoints change only the backward pass.
        eager, again = (self.result(self.eager) for _ in range(2))
        # A result that depends on random numbers, such as those of dropout, cannot be compared.
        if isinstance(eager, Tensor) and torch.equal(eager, again):
            error = relative_error(self.result(self.optimized), eager)
            yield exact("relative_error", error, scope="against_eager", method=self.compared)


class Inferring(Step):
    """Forward pass without gradients.

    Args:
        model: Model to call. The step sets the model to evaluation mode.
        ids: Tokens, int64, shape [batch, length].
        optimization: Key of `OPTIMIZATIONS`.
    """

    scope, compared = "inference", "logits"

    def __init__(self, model: nn.Module, ids: Tensor, optimization: str) -> None:
        self.model, self.ids = model.eval(), ids
        self.eager = logits_of(model)
        self.optimized = optimize(optimization, model, self.eager, ids)
        self.phases = {self.scope: partial(self.result, self.optimized)}
        self.tokens = ids.numel()

    @torch.no_grad()  # torchao's FP8 with a scale per row fails in inference_mode.
    def result(self, forward: Any) -> Any:
        """Compute the logits."""
        return forward(self.ids)


class Training(Step):
    """Forward pass, backward pass and step of AdamW.

    Args:
        model: Model to train. The step sets the model to training mode.
        ids: Tokens, int64, shape [batch, length + 1].
        optimization: Key of `OPTIMIZATIONS`.
    """

    scope, compared = "training_step", "loss"

    def __init__(self, model: nn.Module, ids: Tensor, optimization: str) -> None:
        self.model, self.ids = model.train(), ids
        self.eager = logits_of(model)
        self.optimized = optimize(optimization, model, self.eager, ids[:, :-1])
        self._optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        self._loss = torch.zeros(())
        self.phases = {
            "forward": self.forward,
            "backward": self.backward,
            "optimizer_step": self.optimizer_step,
        }
        self.tokens = ids[:, :-1].numel()

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

    def result(self, forward: Any) -> Tensor:
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
        model: Model to call. The step sets the model to evaluation mode.
        prompt: Tokens, int64, shape [batch, length].
        new_tokens: Number of tokens to generate before decoding restarts at the end of the prompt.
        optimization: Optimization of decoding, `eager` or `cuda_graph`.
    """

    scope, compared = "decode", "cache"

    def __init__(
        self, model: nn.Module, prompt: Tensor, new_tokens: int, optimization: str = "eager"
    ) -> None:
        self.model, self.ids, self.tokens = model.eval(), prompt, len(prompt)
        captured = optimization == "cuda_graph"
        self.generation = self.optimized = generation_of(model, prompt, new_tokens, captured)
        self.phases = {self.scope: self.generation.decode}

    @property
    def eager(self) -> Any:
        """Return another generation from the same prompt, without the optimization."""
        return generation_of(self.model, self.ids, self.generation.new_tokens)

    @torch.no_grad()
    def result(self, forward: Any) -> Tensor:
        """Generate all new tokens, and return the cache as one vector."""
        forward.all_tokens()
        return torch.cat([x.flatten() for x in forward.cache.tensors])

    def filled(self) -> list[Tensor]:
        """Read the prompt and return the tensors of the filled cache."""
        self.generation.prefill()
        return self.generation.tensors[:-2]

    def measure_prompt(self, params: Any, device: str) -> Measuring:
        """Time the prefill, and then generate all tokens to compile kernels before the next timing."""
        prefill = self.generation.prefill
        timed = yield params.timed(device, {"prefill": prefill})
        yield timed["prefill"]
        yield rate("tokens_per_second", self.ids.numel(), timed["prefill"])
        self.generation.all_tokens()

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

    def __init__(self, whole: Generating) -> None:
        self.model, self.generation, self.kinds = whole.model, whole.generation, whole.kinds
        self.phases = {self.scope: self.generation.prefill}

    def first(self) -> None:
        """Read the prompt and empty the cache, so that only the masks of the prompt remain."""
        self.generation.prefill()
        self.generation.forget()
