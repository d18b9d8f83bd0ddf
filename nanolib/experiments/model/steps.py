"""The calls that a model's case consists of: a forward pass, a training step, a prompt with its tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

import torch
from torch import nn

from nanolib.measurement import Unsupported
from nanolib.models.attention.reference import relative_error
from nanolib.models.generation import generation_of
from nanolib.models.onednn_linear import with_onednn
from nanolib.models.optimise import optimise
from nanolib.models.transformer import next_token_loss
from nanolib.models.user import logits_of, predicts_tokens
from nanolib.run.workload import Workload


class Step(Protocol):
    """What one mode of a model does."""

    def workloads(self) -> Iterator[Workload]:
        """Its calls, each with what is there before it."""
        ...


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

    @torch.inference_mode()
    def forward(self) -> torch.Tensor:
        """Logits."""
        return self._forward(self.ids)

    @torch.inference_mode()
    def eager(self) -> torch.Tensor:
        """Logits without the optimisation."""
        return self._eager(self.ids)

    def difference(self) -> float:
        """Relative error of the logits against the eager ones."""
        return relative_error(self.forward(), self.eager())

    def workloads(self) -> Iterator[Workload]:
        """The forward pass."""
        yield Workload("inference", self.forward, lambda: (*held(self.model), self.ids), keeps=False)


def check_loss(model: nn.Module) -> None:
    """Refuse a model that predicts no tokens where a loss is wanted.

    Raises:
        Unsupported: It is one.
    """
    if not predicts_tokens(model):
        raise Unsupported(f"{type(model).__name__} gives no logits of tokens; set train to false and loss_steps to 0")


class Training:
    """Forward, backward and a step of AdamW; with fp16 autocast the loss is scaled.

    Args:
        model: Is put into training mode.
        ids: int64, shape [batch, length + 1].
        optimisation: A key of `OPTIMISATIONS`.
        learning_rate: Of AdamW.
    """

    def __init__(self, model: nn.Module, ids: torch.Tensor, optimisation: str, learning_rate: float) -> None:
        check_loss(model)
        self.model, self.ids = model.train(), ids
        self._eager = logits_of(model)
        self._forward = optimise(optimisation, model, self._eager, ids[:, :-1])
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, fused=True)
        # a scaler looks at its tensors' values, which a plan has not
        scaled = optimisation == "autocast_float16" and not isinstance(ids, torch._subclasses.FakeTensor)
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
        loss = next_token_loss(forward, self.ids)
        weights = [p for p in self.model.parameters() if p.requires_grad]
        return torch.cat([g.flatten() for g in torch.autograd.grad(loss, weights)])

    def difference(self) -> float:
        """Relative error of the gradient against the eager one."""
        found = self.gradient()
        checkpointing = getattr(self.model, "checkpointing", None)
        if checkpointing:
            self.model.checkpointing = False
        eager = self._gradient(self._eager)
        if checkpointing:
            self.model.checkpointing = True
        return relative_error(found, eager)

    def _states(self) -> list[torch.Tensor]:
        return [v for state in self._optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor)]

    def workloads(self) -> Iterator[Workload]:
        """The whole step."""
        yield Workload("training_step", self, lambda: (*held(self.model), *self._states(), self.ids))


class Generating:
    """A prompt read at once, then token by token.

    Args:
        model: Is put into evaluation mode.
        prompt: int64, shape [batch, length].
        new_tokens: After so many it goes back to the end of the prompt.
        optimisation: `eager` or `onednn`.
    """

    def __init__(self, model: nn.Module, prompt: torch.Tensor, new_tokens: int, optimisation: str = "eager") -> None:
        self.model = model.eval()
        self._used = with_onednn(model, prompt) if optimisation == "onednn" else model
        self.generation = generation_of(self._used, prompt, new_tokens)

    @torch.inference_mode()
    def difference(self) -> float:
        """Relative error of the prompt's logits against the eager ones."""
        prompt = self.generation.prompt
        return relative_error(logits_of(self._used)(prompt), logits_of(self.model)(prompt))

    def workloads(self) -> Iterator[Workload]:
        """Reading the prompt, and one token after it."""

        def existing() -> tuple[torch.Tensor, ...]:
            return (*held(self.model), *self.generation.tensors)

        yield Workload("prefill", self.generation.prefill, existing)
        yield Workload("decode", self.generation.decode, existing)
