"""Does training in 8 bits reach the loss of bf16? Pairs of runs of one seed: the same weights, the same text in the same order."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import nn

from nanolib.config import NanoConfig
from nanolib.experiments.model.case import planned_training
from nanolib.measurement import Measurement, Provenance
from nanolib.models import create_model, fp8, text
from nanolib.models.training import train
from nanolib.run.case import Case, Plan
from nanolib.run.rows import over_seeds
from nanolib.stats.intervals import mean_interval

BASE, AGAIN = "bf16", "bf16_again"
# Recipe → the type of its products; the rest are recipes on top of bf16.
_TYPES = {
    BASE: torch.bfloat16,
    AGAIN: torch.bfloat16,
    "float32": torch.float32,
    "float16": torch.float16,
}
TRAINED = (AGAIN, "float32", "float16", *(f"fp8_{recipe}" for recipe in fp8.RECIPES), *fp8.CONTROLS)
TENTHS = 10
_RATE = 1e-3


class SmallDecoderCase(Case):
    """Training of the small decoder: its plan is that of one step, whatever else the case asks."""

    supports_ab: ClassVar[bool] = False  # nothing is timed

    @property
    def config(self) -> NanoConfig:
        """Of the decoder that is trained."""
        return small_decoder(self.d_model, self.num_layers, self.seq_len)

    def plan(self) -> Plan:
        """The peak memory of a training step in float32; casts need some more."""
        shape = (self.seq_len, self.batch_size, self.d_model, self.num_layers)
        # one step of bf16 stands for all cases of this shape
        like = ParityCase(self.device, BASE, 1, 0, 1, *shape, 0.0, ())
        return planned_training(like, self.config, self.batch_size, self.seq_len)

    def batches(self, corpus: str, seed: int) -> Iterator[torch.Tensor]:
        """What it is trained on, in order."""
        generator = torch.Generator().manual_seed(seed)
        shape = (self.steps, self.batch_size, self.seq_len + 1)
        return text.batches(text.load(corpus), *shape, generator, self.device)


@dataclass(frozen=True)
class ParityCase(SmallDecoderCase):
    """One recipe against bf16, over seeds.

    Attributes:
        recipe: `bf16_again` is bf16 with initial weights that differ in their last bit; the rest are types, recipes and controls.
        margin: A difference of this share of the loss counts as none; declared beforehand.
    """

    recipe: str
    seeds: int
    first_seed: int
    steps: int
    seq_len: int
    batch_size: int
    d_model: int
    num_layers: int
    margin: float
    keep: tuple[str, ...]

    def __str__(self) -> str:
        """The recipe, seeds and steps."""
        return f"parity {self.recipe.replace('_', ' ')} {self.seeds} seeds {self.steps} steps"

    @property
    def on_cpu(self) -> bool:
        """Whether the processor trains it."""
        return torch.device(self.device).type == "cpu"

    @property
    def emulated(self) -> bool:
        """Whether its products are emulated.

        8 bits and bf16 on a CPU are, which multiplies float32 faster, and every control.
        """
        if self.recipe in _TYPES:
            return self.on_cpu and _TYPES[self.recipe] is torch.bfloat16
        return bool(fp8.native(self.device)) or self.recipe in fp8.CONTROLS

    def measure(self, params: Any, ceilings: dict[str, float]) -> Iterator[Measurement]:
        """The difference in loss from bf16 over the last tenth of the run, with its verdict.

        The loss is the mean over these steps, of the batches as they are trained on. Both runs of a seed see the same batches in
        one order. The learning rate rises over the first tenth and falls to zero: at a constant rate, chance alone puts more
        between two runs of one seed.

        Returns:
            `parity` (nats per byte) with the verdict in its details, and `loss` of both recipes. A run whose
            loss is not finite makes the recipe worse, without a number.
        """
        seeds = range(self.first_seed, self.first_seed + self.seeds)
        base = [_last_loss(replace(self, recipe=BASE), seed, params.corpus) for seed in seeds]
        recipe = [_last_loss(self, seed, params.corpus) for seed in seeds]
        provenance = Provenance.EMULATED if self.emulated else Provenance.MEASURED
        details = {
            "recipe": self.recipe,
            "margin": self.margin,
            "control": self.recipe in fp8.CONTROLS,
        }
        common = {"provenance": provenance}
        yield over_seeds("loss", base, BASE, **common)
        if lost := sum(not math.isfinite(loss) for loss in recipe):
            message = f"the loss was not finite any more in {lost} of {self.seeds} seeds"
            common |= {"scope": self.recipe, "details": details | {"verdict": "worse"}}
            yield Measurement("loss_difference_from_bf16", message=message, **common)
            return
        yield over_seeds("loss", recipe, self.recipe, **common)
        differences = [a - b for a, b in zip(recipe, base, strict=True)]
        base_loss = sum(base) / len(base)
        margin = self.margin * base_loss
        verdict = parity_verdict(differences, margin)
        details |= {"base_loss": base_loss, "margin_nats": margin, "verdict": verdict}
        yield over_seeds(
            "loss_difference_from_bf16",
            differences,
            self.recipe,
            paired=True,
            details=details,
            **common,
        )


def small_decoder(d_model: int, num_layers: int, seq_len: int) -> NanoConfig:
    """What is trained, for parity and for numerics: a decoder over bytes."""
    heads = max(1, d_model // 32)
    return NanoConfig(
        vocab_size=text.VOCAB_SIZE,
        d_model=d_model,
        num_layers=num_layers,
        num_heads=heads,
        context_length=seq_len,
    )


def parity_verdict(differences: list[float], margin: float) -> str:
    """What is said of differences paired by seed.

    Args:
        differences: Recipe less base, one per seed.
        margin: What counts as none, declared beforehand.

    Returns:
        `equivalent` (the 90 % interval lies within the margin: two one-sided tests at 5 %), `worse` or `better` (the 95 % interval
        leaves zero out, and it is not equivalent), or `inconclusive`.
    """
    low, _, high = mean_interval(differences, 0.90)
    if -margin < low and high < margin:
        return "equivalent"
    low, _, high = mean_interval(differences)
    return "worse" if low > 0 else "better" if high < 0 else "inconclusive"


@functools.lru_cache(maxsize=256)
def _last_loss(case: ParityCase, seed: int, corpus: str) -> float:
    """One training run: the mean loss of the last tenth of its steps. Kept: all recipes share the bf16 runs."""
    dtype = _TYPES.get(case.recipe, torch.bfloat16)
    cast = dtype is not torch.float32 and not (case.emulated and case.on_cpu)
    losses = train(
        _model(case, seed),
        case.batches(corpus, seed),
        lambda step: _RATE * rate_share(step, case.steps),
        autocast=dtype if cast else None,
        clip=1.0,
    )
    return float(losses.double().cpu().tensor_split(TENTHS)[-1].mean())


def rate_share(step: int, steps: int) -> float:
    """The share of the highest learning rate in a step, from 0: it rises over the first tenth and falls to zero after the last."""
    warm = max(1, steps // TENTHS)
    return min((step + 1) / warm, (steps - step) / (steps - warm))


def _model(case: ParityCase, seed: int) -> nn.Module:
    model = create_model(case.config, case.device, seed=seed)
    if case.recipe == AGAIN:
        with torch.no_grad():
            for weight in model.parameters():
                weight.copy_(torch.nextafter(weight, torch.full_like(weight, math.inf)))
    if case.recipe not in _TYPES or case.emulated:
        recipe = fp8.BF16 if case.recipe in (BASE, AGAIN) else case.recipe.removeprefix("fp8_")
        fp8.convert(
            model,
            recipe,
            excluded_modules=case.keep,
            emulate=case.emulated,
            rounded=case.on_cpu,
        )
    return model
