"""A model trained on real text for some steps: its loss."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import torch

from nanolib.experiments.model.case import ModelCase
from nanolib.experiments.model.shaped_case import ShapedCase
from nanolib.experiments.model.steps import check_loss
from nanolib.measurement import Measurement
from nanolib.models import text
from nanolib.models.training import train
from nanolib.models.user import missing
from nanolib.run.case import Plan


@dataclass(frozen=True)
class LossCase(ShapedCase):
    """A model trained on real text for some steps."""

    supports_ab: ClassVar[bool] = False  # nothing is timed

    steps: int
    learning_rate: float
    corpus: str

    def __str__(self) -> str:
        """Preset and steps."""
        return f"{self.name} loss over {self.steps} steps"

    def unsupported(self) -> str:
        """Why it cannot be built here."""
        return missing(self.preset) if self.own and not self.runs_code else ""

    @property
    def model_case(self) -> ModelCase:
        """The training step of the same model at the same shape."""
        shape = (getattr(self, field.name) for field in fields(ShapedCase))
        return ModelCase(*shape, "training")

    def plan(self) -> Plan:
        """The peak memory of a training step of the same model."""
        return self.model_case.plan()

    def measure(self, params: Any, ceilings: dict[str, float]) -> Iterator[Measurement]:
        """The loss before each step; the estimate is the mean of the last tenth of them."""
        model = self.build(params.seed)
        check_loss(model)
        generator = torch.Generator().manual_seed(params.seed)
        shape = (self.steps, self.batch_size, self.seq_len + 1)
        batches = text.batches(text.load(self.corpus), *shape, generator, self.device)
        losses = train(model, batches, self.learning_rate).tolist()
        finite = [*itertools.takewhile(math.isfinite, losses)]
        if finite:
            last = finite[-max(1, len(finite) // 10) :]
            yield Measurement(
                "loss",
                sum(last) / len(last),
                n=len(last),
                samples=tuple(finite),
                method="byte text, AdamW",
                scope="training",
                message=f"mean over the last {len(last)} of {len(finite)} steps; one seed, so no interval",
            )
        if len(finite) < self.steps:
            raise ArithmeticError(
                f"the loss is not finite from step {len(finite) + 1} of {self.steps} on; "
                "lower learning_rate, or take float32"
            )
