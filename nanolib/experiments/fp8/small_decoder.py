"""Measure the effect of reduced precision on the loss and matrix products of a small decoder.

nanolib compares losses in pairs. The two models of a pair train with the same seed and text.
"""

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from nanolib.config import NanoConfig
from nanolib.measurement import Measurement, Measurements, Provenance, exact
from nanolib.models import create_model, fp8, text
from nanolib.models.attention.reference import relative_error
from nanolib.models.training import train
from nanolib.run.case import Case, Ceilings, over_seeds
from nanolib.stats.intervals import mean_interval

BASE, AGAIN = "bf16", "bf16_again"
# Dtype of the matrix products of each recipe. Recipes that are not in this table use bf16.
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
    """Case that trains the small decoder."""

    supports_ab: ClassVar[bool] = False  # The case has no timings that `nano ab` could compare.

    @property
    def config(self) -> NanoConfig:
        """Return the configuration of the decoder."""
        return small_decoder(self.d_model, self.num_layers, self.seq_len)

    def batches(self, corpus: str, seed: int) -> Iterator[Tensor]:
        """Draw the batches of the training run, in order.

        Args:
            corpus: Text file or folder, or empty for the standard library's sources.
            seed: Seed of the random positions in the text.

        Yields:
            Token ids, int64, shape [batch_size, seq_len + 1], on the case's device.
        """
        generator = torch.Generator().manual_seed(seed)
        shape = (self.steps, self.batch_size, self.seq_len + 1)
        return text.batches(text.load(corpus), *shape, generator, self.device)


@dataclass(frozen=True)
class ParityCase(SmallDecoderCase):
    """Case that compares one recipe with bf16 over several seeds.

    Attributes:
        recipe: Dtype, FP8 recipe, known-bad control, or `bf16_again`. The initial weights of
            `bf16_again` differ in the last bit from those of bf16.
        margin: Largest difference that counts as equivalent, as a share of the loss.
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
        """Return the recipe, seeds and steps."""
        return f"parity {self.recipe.replace('_', ' ')} {self.seeds} seeds {self.steps} steps"

    @property
    def on_cpu(self) -> bool:
        """Return whether the CPU trains the model."""
        return torch.device(self.device).type == "cpu"

    @property
    def emulated(self) -> bool:
        """Return whether nanolib emulates the matrix products, as for controls and FP8 on a CPU."""
        if self.recipe in _TYPES:
            return self.on_cpu and _TYPES[self.recipe] is torch.bfloat16
        return bool(fp8.native(self.device)) or self.recipe in fp8.CONTROLS

    def measure(self, params: Any, ceilings: Ceilings) -> Measurements:
        """Measure the loss difference from bf16 over the last tenth of the run.

        The two runs of a seed read the same batches in the same order. The learning rate rises over
        the first tenth of the steps and then falls to zero. A constant learning rate would add
        noise between the runs.

        Yields:
            Rows of `loss_difference_from_bf16` (nats per byte) with the verdict in the details, and
            `loss` of the recipe and of bf16. If a loss is not finite, the verdict is `worse`, and
            the row has no number.
        """
        seeds = range(self.first_seed, self.first_seed + self.seeds)
        base, recipe = (
            [_last_loss(case, seed, params.corpus) for seed in seeds]
            for case in (replace(self, recipe=BASE), self)
        )
        metric, details = "loss_difference_from_bf16", {"control": self.recipe in fp8.CONTROLS}
        common = {"provenance": Provenance.EMULATED if self.emulated else Provenance.MEASURED}
        yield over_seeds("loss", base, BASE, **common)
        common["scope"] = self.recipe
        if lost := sum(not math.isfinite(loss) for loss in recipe):
            message = f"the loss became infinite or NaN in {lost} of {self.seeds} seeds"
            details["verdict"] = "worse"
            yield Measurement(metric, message=message, details=details, **common)
            return
        yield over_seeds("loss", recipe, **common)
        differences = [a - b for a, b in zip(recipe, base, strict=True)]
        margin = self.margin * fmean(base)
        details |= {"margin_nats": margin, "verdict": parity_verdict(differences, margin)}
        yield over_seeds(metric, differences, paired=True, details=details, **common)


def small_decoder(d_model: int, num_layers: int, seq_len: int) -> NanoConfig:
    """Return the configuration of the small decoder, which reads bytes."""
    heads = max(1, d_model // 32)
    return NanoConfig(
        vocab_size=text.VOCAB_SIZE,
        d_model=d_model,
        num_layers=num_layers,
        num_heads=heads,
        context_length=seq_len,
    )


def parity_verdict(differences: list[float], margin: float) -> str:
    """Return the verdict on differences paired by seed.

    Args:
        differences: Loss of the recipe minus loss of bf16 for each seed, nats per byte.
        margin: Largest difference that counts as equivalent, nats per byte. Choose the margin
            before the run.

    Returns:
        `equivalent` if the 90 % interval is within the margin. This rule is the same as two
        one-sided tests at 5 %. Otherwise, `worse` or `better` if the 95 % interval excludes zero,
        and `inconclusive` if the interval contains zero.
    """
    low, _, high = mean_interval(differences, 0.90)
    if -margin < low and high < margin:
        return "equivalent"
    low, _, high = mean_interval(differences)
    return "worse" if low > 0 else "better" if high < 0 else "inconclusive"


@functools.cache
def _last_loss(case: ParityCase, seed: int, corpus: str) -> float:
    """Train a decoder and return the mean loss of the last tenth of the steps.

    nanolib caches the result, because all recipes are compared with the same bf16 runs.
    """
    dtype = _TYPES.get(case.recipe, torch.bfloat16)
    cast = dtype is not torch.float32 and not (case.emulated and case.on_cpu)
    warm = max(1, case.steps // TENTHS)

    def rate(step: int) -> float:
        """Return the learning rate of a step."""
        return _RATE * min((step + 1) / warm, (case.steps - step) / (case.steps - warm))

    how = {"autocast": dtype if cast else None, "clip": 1.0}
    losses = train(_model(case, seed), case.batches(corpus, seed), rate, **how)
    return float(losses.double().cpu().tensor_split(TENTHS)[-1].mean())


def _model(case: ParityCase, seed: int) -> nn.Module:
    model = create_model(case.config, case.device, seed=seed)
    if case.recipe == AGAIN:
        with torch.no_grad():
            for weight in model.parameters():
                weight.copy_(torch.nextafter(weight, torch.full_like(weight, math.inf)))
    if case.recipe not in _TYPES or case.emulated:
        recipe = fp8.BF16 if case.recipe in (BASE, AGAIN) else case.recipe.removeprefix("fp8_")
        how = {"excluded_modules": case.keep, "emulate": case.emulated, "rounded": case.on_cpu}
        fp8.convert(model, recipe, **how)
    return model


VARIANTS = {
    f"{format} per {granularity}": fp8.Cast(format, granularity)
    for format in fp8.FORMATS
    for granularity in ("tensor", "row")
}


@dataclass(frozen=True)
class NumericsCase(SmallDecoderCase):
    """Case that casts the operands of a trained small decoder, and measures the errors.

    Attributes:
        variant: Name of the cast to measure, a key of `VARIANTS`.
        steps: Number of training steps in bf16.
    """

    variant: str
    steps: int
    seq_len: int
    batch_size: int
    d_model: int
    num_layers: int
    seed: int

    def __str__(self) -> str:
        """Return the name of the cast."""
        return f"numerics {self.variant}"

    def measure(self, params: Any, ceilings: Ceilings) -> Measurements:
        """Measure the error of each product, and the underflow and overflow of each operand.

        Yields:
            Rows of `relative_error` and `sqnr` (dB) with the scope `LAYER PRODUCT`, and `underflow`
            and `overflow` with the scope `LAYER OPERAND`.
        """
        for name, seen in _trained(replace(self, variant=""), params.corpus).items():
            yield from _error_rows(name, seen, VARIANTS[self.variant])


def _error_rows(name: str, seen: dict[str, Tensor], cast: fp8.Cast) -> Measurements:
    x, weight, gradient = seen["input"], seen["weight"], seen["gradient"]
    products = {
        "output": (x, weight.t()),
        "input_gradient": (gradient, weight),
        "weight_gradient": (gradient.t(), x),
    }
    for product, (a, b) in products.items():
        # The product sums over the last dimension of `a` and the first dimension of `b`.
        rounded = fp8.round_trip(a, cast, -1) @ fp8.round_trip(b, cast, 0)
        error = relative_error(rounded, a @ b)
        common = {"scope": f"{name} {product}", "method": "emulated product against float32"}
        yield _emulated("relative_error", error, **common)
        yield _emulated("sqnr", -20 * math.log10(error) if error else 200.0, **common)
    for operand, values in seen.items():
        underflow, overflow = fp8.lost_shares(values, cast)
        common = {"scope": f"{name} {operand}", "method": "counted"}
        yield _emulated("underflow", underflow, **common)
        yield _emulated("overflow", overflow, **common)


_emulated = functools.partial(exact, provenance=Provenance.EMULATED)


@functools.lru_cache(maxsize=4)
def _trained(case: NumericsCase, corpus: str) -> dict[str, dict[str, Tensor]]:
    """Train a decoder in bf16 and return the operands of its linear layers at the last step.

    The result excludes the head. nanolib caches the result, because all variants use it.
    """
    model = create_model(case.config, case.device, seed=case.seed)
    seen = {}
    for name, layer in fp8.linear_layers(model).items():
        if name != "head":
            seen[name] = {}
            layer.register_forward_hook(functools.partial(_note_operands, seen[name]))
    train(model, case.batches(corpus, case.seed), 1e-3, autocast=torch.bfloat16)
    return seen


def _note_operands(
    seen: dict[str, Tensor], layer: nn.Module, args: tuple[Tensor, ...], out: Tensor
) -> None:
    """Store the operands of a linear layer in float32, shape [tokens, features]."""

    def rows(x: Tensor) -> Tensor:
        return x.detach().flatten(0, -2).float()

    seen |= {"input": rows(args[0]), "weight": rows(layer.weight)}
    out.register_hook(lambda gradient: seen.update(gradient=rows(gradient)))
