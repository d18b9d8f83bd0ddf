"""The calls that a model's case consists of: a forward pass, a training step, a prompt with its tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from nanolib.config import NanoConfig
from nanolib.measurement import Held, Unsupported, exact
from nanolib.meters.ceilings import rate
from nanolib.meters.flops import count_flops
from nanolib.models import create_model
from nanolib.models.attention.reference import relative_error
from nanolib.models.generation import generation_of
from nanolib.models.optimise import is_compiled, optimise
from nanolib.models.transformer import WITHOUT_LOSS, next_token_loss
from nanolib.models.user import logits_of, predicts_tokens
from nanolib.run.case import Case, Measuring, Plan
from nanolib.run.memory_plan import Workload, planned_by_depth
from nanolib.run.peaks_case import rate_rows
from nanolib.run.rows import compile_row, first_call_ms


def held(model: nn.Module) -> tuple[torch.Tensor, ...]:
    """What a model holds whatever it does: its weights, and tables such as those of positions."""
    return (*model.parameters(), *model.buffers())


class Inferring:
    """A forward pass without gradients.

    Args:
        model: Is put into evaluation mode.
        ids: int64, shape [batch, length].
        optimisation: A key of `OPTIMISATIONS`.
    """

    def __init__(self, model: nn.Module, ids: torch.Tensor, optimisation: str) -> None:
        self.model, self.ids = model.eval(), ids
        self._eager = logits_of(model)
        self._forward = optimise(optimisation, model, self._eager, ids)

    @torch.no_grad()  # torchao's FP8 layers by rows fail under inference_mode
    def forward(self) -> torch.Tensor:
        """Logits."""
        return self._forward(self.ids)

    @torch.no_grad()
    def eager(self) -> torch.Tensor:
        """Logits without the optimisation."""
        return self._eager(self.ids)

    def difference(self) -> float:
        """Relative error of the logits against the eager ones."""
        return relative_error(self.forward(), self.eager())

    def measure(
        self, case: Any, params: Any, predicted: dict[str, Any], ceilings: dict[str, float]
    ) -> Measuring:
        """Work, latency, rates, and how far the result lies from the eager one."""
        flops = int(predicted["flops"])
        first_ms = first_call_ms(self.forward)
        if not case.own:
            yield exact("flops", flops, scope="inference")
        counted = {} if case.own else {"predicted": flops}
        yield exact(
            "flops", count_flops(self.eager), scope="inference", method="flop_counter", **counted
        )
        yield exact("bytes", predicted["bytes"], scope="inference")
        timed = yield params.timed(case.device, {"inference": self.forward})
        latency = dataclasses.replace(timed["inference"], predicted=predicted.get("latency"))
        yield latency
        yield from rate_rows(latency, flops, case.dtype, ceilings)
        yield rate("tokens_per_second", self.ids.numel(), latency)
        if case.optimisation != "eager" and isinstance(self.eager(), torch.Tensor):
            yield exact("relative_error", self.difference(), scope="against_eager", method="logits")
        if is_compiled(case.optimisation):
            yield compile_row(first_ms, latency.estimate)

    def workloads(self) -> Iterator[Workload]:
        """The forward pass."""
        yield Workload.of_kinds(
            "inference",
            self.forward,
            lambda: {Held.WEIGHTS: held(self.model), Held.INPUTS: [self.ids]},
        )


def check_loss(model: nn.Module) -> None:
    """Refuse a model that predicts no tokens where a loss is wanted.

    Raises:
        Unsupported: It is one.
    """
    if not predicts_tokens(model):
        raise Unsupported(
            f"{type(model).__name__} gives no logits of tokens; leave the loss out: {WITHOUT_LOSS}"
        )
    if not any(weight.requires_grad for weight in model.parameters()):
        raise Unsupported(
            f"{type(model).__name__} has no weight that learns; leave the loss out: {WITHOUT_LOSS}"
        )
    if complex_ := next(
        (name for name, weight in model.named_parameters() if weight.is_complex()), ""
    ):
        raise Unsupported(
            f"{type(model).__name__}.{complex_} is complex, and fused AdamW takes real weights; keep it as pairs of them "
            f"(torch.view_as_real), or leave the loss out: {WITHOUT_LOSS}"
        )


def planned_training(case: Case, config: NanoConfig, batch_size: int, seq_len: int) -> Plan:
    """The peak memory of a training step of any config's model, on a case's device."""

    def at(depth: int) -> tuple[nn.Module, Iterator[Workload]]:
        model = create_model(config.model_copy(update={"num_layers": depth}), case.device)
        ids = torch.zeros(batch_size, seq_len + 1, dtype=torch.int64, device=case.device)
        return model, Training(model, ids, "eager", 1e-3).workloads()

    return planned_by_depth(case, config.num_layers, at)


def _sgd(
    weights: Iterable[nn.Parameter], rate: float, momentum: float = 0.0
) -> torch.optim.Optimizer:
    weights = list(weights)
    # on tensors without data torch runs its fused kernel on real ones in their place; one weight after the other holds as much
    fused = not any(isinstance(weight, torch._subclasses.FakeTensor) for weight in weights)
    return torch.optim.SGD(weights, lr=rate, momentum=momentum, fused=fused, foreach=False)


# Name → (weights, learning rate) → the optimizer.
OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter], float], torch.optim.Optimizer]] = {
    "adamw": lambda weights, rate: torch.optim.AdamW(weights, lr=rate, fused=True),
    "sgd": _sgd,
    "momentum": lambda weights, rate: _sgd(weights, rate, 0.9),
}


class Training:
    """Forward, backward and a step of the optimizer; with fp16 autocast the loss is scaled.

    Args:
        model: Is put into training mode.
        ids: int64, shape [batch, length + 1].
        optimisation: A key of `OPTIMISATIONS`.
        learning_rate: Of the optimizer.
        optimizer: A key of `OPTIMIZERS`.
    """

    def __init__(
        self,
        model: nn.Module,
        ids: torch.Tensor,
        optimisation: str,
        learning_rate: float,
        optimizer: str = "adamw",
    ) -> None:
        check_loss(model)
        self.model, self.ids = model.train(), ids
        self._eager = logits_of(model)
        self._forward = optimise(optimisation, model, self._eager, ids[:, :-1])
        self._optimizer = OPTIMIZERS[optimizer](model.parameters(), learning_rate)
        # a scaler looks at its tensors' values, which a plan has not
        scaled = optimisation == "autocast_float16" and not isinstance(
            ids, torch._subclasses.FakeTensor
        )
        self._scaler = torch.amp.GradScaler(ids.device.type, enabled=scaled)
        self._loss = torch.zeros(())
        self.phases: dict[str, Callable[[], object]] = {
            "forward": self.forward,
            "backward": self.backward,
            "optimizer_step": self.optimizer_step,
        }

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

    def __call__(self) -> None:
        """All phases."""
        for phase in self.phases.values():
            phase()

    def gradient(self) -> torch.Tensor:
        """Of all weights as one vector; it leaves none behind."""
        return self._gradient(self._forward)

    def _gradient(self, forward: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        weights = [p for p in self.model.parameters() if p.requires_grad]
        found = torch.autograd.grad(next_token_loss(forward, self.ids), weights)
        return torch.cat([gradient.flatten() for gradient in found])

    def difference(self) -> float:
        """Relative error of the gradient against the eager one, which checkpoints nothing."""
        found, checkpointing = self.gradient(), getattr(self.model, "checkpointing", None)
        if checkpointing:
            self.model.checkpointing = False
        eager = self._gradient(self._eager)
        if checkpointing:
            self.model.checkpointing = True
        return relative_error(found, eager)

    def measure(
        self, case: Any, params: Any, predicted: dict[str, Any], ceilings: dict[str, float]
    ) -> Measuring:
        """Work, the times of its phases, rates, and how far the gradient lies from the eager one."""
        flops = int(predicted["flops"])
        yield exact("flops", flops, scope="training_step")
        yield exact("bytes", predicted["bytes"], scope="training_step")
        if case.optimisation != "eager":  # before the first step changes the weights
            first_ms, later_ms = (first_call_ms(self.gradient) for _ in range(2))
            if is_compiled(case.optimisation):
                yield compile_row(first_ms, later_ms)
            yield exact(
                "relative_error", self.difference(), scope="against_eager", method="gradient"
            )
        timed = yield params.timed(case.device, self.phases, total="training_step")
        total = dataclasses.replace(timed.pop("training_step"), predicted=predicted.get("latency"))
        yield from timed.values()
        yield total
        yield from rate_rows(total, flops, case.dtype, ceilings)
        yield rate("tokens_per_second", self.ids[:, :-1].numel(), total)

    def _states(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Each weight with a state of its optimizer."""
        states = [(w, v) for w, state in self._optimizer.state.items() for v in state.values()]
        return [(w, v) for w, v in states if isinstance(v, torch.Tensor)]

    def workloads(self) -> Iterator[Workload]:
        """The whole step."""

        def kinds() -> dict[str, Iterable[torch.Tensor]]:
            return {
                Held.WEIGHTS: held(self.model),
                Held.STATES: [state for _, state in self._states()],
                Held.INPUTS: [self.ids],
            }

        yield Workload.of_kinds(
            "training_step",
            self,
            kinds,
            first=lambda: self._optimizer.state or self(),
            phases=self.phases,
            owners=lambda: {id(state): weight for weight, state in self._states()},
        )


class Generating:
    """A prompt read at once, then token by token.

    Args:
        model: Is put into evaluation mode.
        prompt: int64, shape [batch, length].
        new_tokens: After so many it goes back to the end of the prompt.
        optimisation: `eager` or `cuda_graph`.
    """

    def __init__(
        self, model: nn.Module, prompt: torch.Tensor, new_tokens: int, optimisation: str = "eager"
    ) -> None:
        self.model = model.eval()
        self.generation = generation_of(
            self.model, prompt, new_tokens, optimisation == "cuda_graph"
        )

    @torch.no_grad()
    def difference(self) -> float:
        """Relative error of the cache after all tokens against the eager one."""
        caches = []
        for one in (
            self.generation,
            generation_of(self.model, self.generation.prompt, self.generation.new_tokens),
        ):
            one.all_tokens()
            caches.append(torch.cat([x.flatten() for x in one.cache.tensors]))
        return relative_error(*caches)

    def measure(
        self, case: Any, params: Any, predicted: dict[str, Any], ceilings: dict[str, float]
    ) -> Measuring:
        """Time to the first token (the prompt read), then time per token over the cache that grows and starts over."""
        if (
            case.optimisation != "eager"
        ):  # by which every token's graph is captured before it is timed
            yield exact("relative_error", self.difference(), scope="against_eager", method="cache")
        timed = yield params.timed(case.device, {"prefill": self.generation.prefill})
        yield timed["prefill"]
        yield rate("tokens_per_second", self.generation.prompt.numel(), timed["prefill"])
        yield exact(
            "flops",
            int(predicted["flops"]),
            scope="decode",
            method="flop_counter" if case.own else "formula",
        )
        yield exact("bytes", predicted["bytes"], scope="decode")
        self.generation.all_tokens()
        timed = yield params.timed(case.device, {"decode": self.generation.decode})
        each = dataclasses.replace(timed["decode"], predicted=predicted.get("latency"))
        yield each
        yield from rate_rows(each, predicted["flops"], case.dtype, ceilings)
        yield rate("tokens_per_second", case.batch_size, each)

    def workloads(self) -> Iterator[Workload]:
        """Reading the prompt, and one token after it."""

        def kinds() -> dict[str, list[torch.Tensor]]:
            *cache, prompt, token = self.generation.tensors
            return {
                Held.WEIGHTS: [*held(self.model)],
                Held.CACHE: cache,
                Held.INPUTS: [prompt, token],
            }

        prefill, decode = self.generation.prefill, self.generation.decode
        yield Workload.of_kinds("prefill", prefill, kinds, first=self._unread)
        yield Workload.of_kinds("decode", decode, kinds, first=self._first)

    def _unread(self) -> None:
        """What a prompt finds that is read again: masks are kept, the cache is its own to make."""
        self.generation.prefill()
        self.generation.forget()

    def _first(self) -> None:
        """The prompt and one token: a later token's memory may depend on how full the cache is."""
        self.generation.prefill()
        self.generation.decode()
