"""The calls that a model's case consists of: a forward pass, a training step, a prompt with its tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar

import torch
from torch import nn

from nanolib.measurement import Measurement, MemoryKind, Unsupported, exact
from nanolib.meters.ceilings import rate
from nanolib.models.attention.reference import relative_error
from nanolib.models.generation import generation_of
from nanolib.models.optimize import is_compiled, optimize
from nanolib.models.transformer import WITHOUT_LOSS, next_token_loss
from nanolib.models.user import logits_of, predicts_tokens
from nanolib.run.case import Measuring
from nanolib.run.memory_plan import Workload
from nanolib.run.rows import compile_row, timed_call_ms


def weights_of(model: nn.Module) -> tuple[torch.Tensor, ...]:
    """Weights, and tables such as those of positions: what a model holds whatever it does."""
    return (*model.parameters(), *model.buffers())


class Step:
    """What is called over and over.

    Attributes:
        scope: What the rows of the whole call say was measured.
        compared: Which result is compared with the eager model's.
        model: Whose calls.
        ids: What it reads, int64 [batch, length], in training one more.
        phases: Scope → call, in order.
        tokens: How many a call reads or makes.
    """

    scope: ClassVar[str]
    compared: ClassVar[str]
    model: nn.Module
    ids: torch.Tensor
    phases: dict[str, Callable[[], object]]
    tokens: int

    def __call__(self) -> None:
        """All phases."""
        for phase in self.phases.values():
            phase()

    def kinds(self) -> dict[str, Iterable[torch.Tensor]]:
        """What is there before a call: weights, tables such as those of positions, ids."""
        return {MemoryKind.WEIGHTS: weights_of(self.model), MemoryKind.INPUTS: [self.ids]}

    def first(self) -> None:
        """Leave behind what a first call does and later calls find."""

    def owners(self) -> dict[int, torch.Tensor]:
        """The `id` of an optimizer's state → the weight that it belongs to."""
        return {}

    def workloads(self) -> Iterator[Workload]:
        """What its memory is measured of: the whole call."""
        rest = {"first": self.first, "phases": self.phases, "owners": self.owners}
        yield Workload.of_kinds(self.scope, self, self.kinds, **rest)

    def result(self) -> Any:
        """What is compared; it changes nothing that a later call finds."""
        raise NotImplementedError

    def eager_result(self) -> Any:
        """The same without the optimization."""
        raise NotImplementedError

    def difference(self) -> float:
        """Relative error of the result against the eager one."""
        return relative_error(self.result(), self.eager_result())

    def against_eager(self, optimization: str) -> Iterator[Measurement]:
        """Measure what compiling takes and how far the result is from the eager one."""
        if is_compiled(optimization):
            first_ms, later_ms = (timed_call_ms(self.result) for _ in range(2))
            yield compile_row(first_ms, later_ms)
        if optimization != "eager" and isinstance(self.result(), torch.Tensor):
            row = {"scope": "against_eager", "method": self.compared}
            yield exact("relative_error", self.difference(), **row)


class Inferring(Step):
    """A forward pass without gradients.

    Args:
        model: Is put into evaluation mode.
        ids: int64, shape [batch, length].
        optimization: A key of `OPTIMIZATIONS`.
    """

    scope, compared = "inference", "logits"

    def __init__(self, model: nn.Module, ids: torch.Tensor, optimization: str) -> None:
        self.model, self.ids = model.eval(), ids
        self._eager = logits_of(model)
        self._forward = optimize(optimization, model, self._eager, ids)
        self.phases, self.tokens = {self.scope: self.result}, ids.numel()

    @torch.no_grad()  # torchao's FP8 layers by rows fail under inference_mode
    def result(self) -> Any:
        """Logits."""
        return self._forward(self.ids)

    @torch.no_grad()
    def eager_result(self) -> Any:
        """Logits without the optimization."""
        return self._eager(self.ids)


def check_loss(model: nn.Module) -> None:
    """Raise Unsupported for a model that predicts no tokens, or learns nothing."""
    lacking = ""
    if not predicts_tokens(model):
        lacking = "gives no logits of tokens"
    elif not any(weight.requires_grad for weight in model.parameters()):
        lacking = "has no weight that learns"
    if lacking:
        raise Unsupported(f"{type(model).__name__} {lacking}; leave the loss out: {WITHOUT_LOSS}")


# Name → (weights, learning rate) → the optimizer. SGD's fused kernel takes no tensors without data.
OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter], float], torch.optim.Optimizer]] = {
    "adamw": lambda weights, rate: torch.optim.AdamW(weights, lr=rate, fused=True),
    "sgd": lambda weights, rate: torch.optim.SGD(weights, lr=rate, foreach=False),
    "momentum": lambda weights, rate: torch.optim.SGD(
        weights, lr=rate, momentum=0.9, foreach=False
    ),
}


class Training(Step):
    """Forward, backward and a step of the optimizer; with fp16 autocast the loss is scaled.

    Args:
        model: Is put into training mode.
        ids: int64, shape [batch, length + 1].
        optimization: A key of `OPTIMIZATIONS`.
        learning_rate: Of the optimizer.
        optimizer: A key of `OPTIMIZERS`.
    """

    scope, compared = "training_step", "gradient"

    def __init__(
        self,
        model: nn.Module,
        ids: torch.Tensor,
        optimization: str,
        learning_rate: float,
        optimizer: str = "adamw",
    ) -> None:
        check_loss(model)
        self.model, self.ids = model.train(), ids
        self._eager = logits_of(model)
        self._forward = optimize(optimization, model, self._eager, ids[:, :-1])
        self._optimizer = OPTIMIZERS[optimizer](model.parameters(), learning_rate)
        # a scaler looks at its tensors' values, which a plan has not
        has_data = not isinstance(ids, torch._subclasses.FakeTensor)
        scaled = has_data and optimization == "autocast_float16"
        self._scaler = torch.amp.GradScaler(ids.device.type, enabled=scaled)
        self._loss = torch.zeros(())
        self.phases = {
            "forward": self.forward,
            "backward": self.backward,
            "optimizer_step": self.optimizer_step,
        }
        self.tokens = ids[:, :-1].numel()

    def forward(self) -> None:
        """The loss."""
        self._loss = next_token_loss(self._forward, self.ids)

    def backward(self) -> None:
        """The gradients."""
        self._scaler.scale(self._loss).backward()

    def optimizer_step(self) -> None:
        """New weights; the gradients are dropped."""
        self._scaler.step(self._optimizer)
        self._scaler.update()
        self._optimizer.zero_grad()

    def result(self) -> torch.Tensor:
        """The gradient of all weights as one vector; it leaves none behind."""
        return self._gradient(self._forward)

    def eager_result(self) -> torch.Tensor:
        """The gradient without the optimization, for which nothing is checkpointed."""
        checkpointing = getattr(self.model, "checkpointing", False)
        self.model.checkpointing = False
        found = self._gradient(self._eager)
        self.model.checkpointing = checkpointing
        return found

    def _gradient(self, forward: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        weights = [p for p in self.model.parameters() if p.requires_grad]
        found = torch.autograd.grad(next_token_loss(forward, self.ids), weights)
        return torch.cat([gradient.flatten() for gradient in found])

    def kinds(self) -> dict[str, Iterable[torch.Tensor]]:
        """Also the optimizer's states."""
        return super().kinds() | {MemoryKind.STATES: [state for _, state in self._states()]}

    def first(self) -> None:
        """The optimizer's states."""
        if not self._optimizer.state:
            self()

    def owners(self) -> dict[int, torch.Tensor]:
        """The weight of each state."""
        return {id(state): weight for weight, state in self._states()}

    def _states(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        states = [(w, v) for w, state in self._optimizer.state.items() for v in state.values()]
        return [(w, v) for w, v in states if isinstance(v, torch.Tensor)]


class Generating(Step):
    """A prompt read at once, then token by token.

    Args:
        model: Is put into evaluation mode.
        prompt: int64, shape [batch, length].
        new_tokens: After so many it goes back to the end of the prompt.
        optimization: `eager` or `cuda_graph`.
    """

    scope, compared = "decode", "cache"

    def __init__(
        self, model: nn.Module, prompt: torch.Tensor, new_tokens: int, optimization: str = "eager"
    ) -> None:
        self.model, self.ids = model.eval(), prompt
        self.generation = generation_of(model, prompt, new_tokens, optimization == "cuda_graph")
        self.phases, self.tokens = {self.scope: self.generation.decode}, len(prompt)

    def result(self) -> torch.Tensor:
        """The cache after all tokens."""
        return _filled_cache(self.generation)

    def eager_result(self) -> torch.Tensor:
        """The cache that is filled without the optimization."""
        new_tokens = self.generation.new_tokens
        return _filled_cache(generation_of(self.model, self.ids, new_tokens))

    def filled(self) -> list[torch.Tensor]:
        """Read the prompt; what its cache holds then."""
        self.generation.prefill()
        return self.generation.tensors[:-2]

    def measure_prompt(self, params: Any, device: str) -> Measuring:
        """Time the prompt, and fill the cache: a kernel may be planned for each of its lengths."""
        prefill = self.generation.prefill
        timed = yield params.timed(device, {"prefill": prefill})
        yield timed["prefill"]
        yield rate("tokens_per_second", self.ids.numel(), timed["prefill"])
        self.generation.all_tokens()

    def kinds(self) -> dict[str, Iterable[torch.Tensor]]:
        """Also the cache, and the last token."""
        *cache, prompt, token = self.generation.tensors
        # the cache is not the last: a counter's loop would keep what a call replaces
        return {
            MemoryKind.WEIGHTS: weights_of(self.model),
            MemoryKind.CACHE: cache,
            MemoryKind.INPUTS: [prompt, token],
        }

    def first(self) -> None:
        """The prompt and one token: a later one's memory may depend on how full the cache is."""
        self.generation.prefill()
        self.generation.decode()

    def workloads(self) -> Iterator[Workload]:
        """Reading the prompt, and one token after it."""
        prefill = self.generation.prefill
        yield Workload.of_kinds("prefill", prefill, self.kinds, first=self._unread)
        yield from super().workloads()

    def _unread(self) -> None:
        """What a prompt finds that is read again: masks are kept, the cache is its own to make."""
        self.generation.prefill()
        self.generation.forget()


@torch.no_grad()
def _filled_cache(generation: Any) -> torch.Tensor:
    generation.all_tokens()
    return torch.cat([x.flatten() for x in generation.cache.tensors])
