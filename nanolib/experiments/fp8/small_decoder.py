"""Measure the effect of reduced precision on the loss and matrix products of a small decoder.

nanolib compares losses in pairs. The two models of a pair train with the same seed and text.
"""

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from statistics import fmean

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanolib.config import NanoConfig
from nanolib.measurement import Measurement, Measurements, Provenance, exact
from nanolib.models import create_model, fp8, training
from nanolib.models.attention.reference import relative_error
from nanolib.run.case import Case, Ceilings, over_seeds
from nanolib.stats.intervals import mean_interval

BASE, AGAIN = "bf16", "bf16_again"
TRAINED = (AGAIN, *(f"fp8_{recipe}" for recipe in fp8.RECIPES), *fp8.CONTROLS)
_TENTHS = 10
_RATE = 1e-3
_LEAST_ERROR = 1e-10  # The signal-to-noise ratio of an exact product is finite: 200 dB.
_DIFFERENCE = "loss_difference_from_bf16"


@dataclass(frozen=True)
class ParityCase(Case):
    """Case that trains a small decoder, and compares one recipe with bf16 over several seeds.

    Attributes:
        recipe: FP8 recipe, known-bad control, or `bf16_again`. The initial weights of `bf16_again`
            differ in the last bit from those of bf16.
        margin: Largest difference that counts as equivalent, as a share of the loss.
    """

    supports_ab = False  # The case has no timings that `nano ab` could compare.

    recipe: str
    seeds: int
    first_seed: int
    steps: int
    seq_len: int
    batch_size: int
    d_model: int
    num_layers: int
    margin: float

    def __str__(self) -> str:
        """Return the recipe, seeds and steps."""
        return f"parity {self.recipe.replace('_', ' ')} {self.seeds} seeds {self.steps} steps"

    @property
    def autocast(self) -> torch.dtype | None:
        """Return autocast's dtype. On a CPU, emulated layers round to bf16, which is faster."""
        return None if self.device == "cpu" else torch.bfloat16

    @property
    def casts(self) -> str:
        """Return the name of the casts in `nanolib.models.fp8`, or an empty string for bf16."""
        return "" if self.recipe in (BASE, AGAIN) else self.recipe.removeprefix("fp8_")

    @property
    def is_emulated(self) -> bool:
        """Return whether nanolib emulates the matrix products, as for controls and on a CPU."""
        if not self.casts:
            return self.device == "cpu"
        return bool(fp8.native(self.device)) or self.casts in fp8.CONTROLS

    def measure(self, params, ceilings: Ceilings) -> Measurements:
        """Measure the loss difference from bf16 over the last tenth of the run.

        The two runs of a seed read the same batches in the same order. The learning rate rises over
        the first tenth of the steps and then falls to zero. A constant learning rate would add
        noise between the runs.

        Yields:
            Rows of `loss_difference_from_bf16` (nats per byte) with the verdict in the details, and
            `loss` of the recipe and of bf16. If a loss is not finite, the verdict is `worse`, and
            the row has no number. For casts, rows of `sqnr` (dB) with the scope `LAYER PRODUCT`.
        """
        seeds = range(self.first_seed, self.first_seed + self.seeds)
        bf16 = replace(self, recipe=BASE)
        base, losses = (
            [_last_loss(case, seed, params.corpus) for seed in seeds] for case in (bf16, self)
        )
        provenance = Provenance.EMULATED if self.is_emulated else Provenance.MEASURED
        yield over_seeds("loss", base, BASE, provenance=provenance)
        if self.casts:
            for layer, operands in _operands(bf16, params.corpus).items():
                yield from _error_rows(layer, self.casts, *operands)
        common = {"provenance": provenance, "scope": self.recipe}
        details = {"control": self.recipe in fp8.CONTROLS, "provenance": provenance}
        if lost := sum(not math.isfinite(loss) for loss in losses):
            message = f"the loss became infinite or NaN in {lost} of {self.seeds} seeds"
            details |= {"verdict": "worse", "not_finite": message}
            yield Measurement(_DIFFERENCE, message=message, details=details, **common)
            return
        yield over_seeds("loss", losses, **common)
        differences = [a - b for a, b in zip(losses, base, strict=True)]
        margin = self.margin * fmean(base)
        details |= {"margin_nats": margin, "verdict": parity_verdict(differences, margin)}
        yield over_seeds(_DIFFERENCE, differences, paired=True, details=details, **common)


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
    _, losses = _train(case, seed, corpus)
    return float(losses.double().cpu().tensor_split(_TENTHS)[-1].mean())


def _train(case: ParityCase, seed: int, corpus: str) -> tuple[nn.Module, Tensor]:
    """Train a decoder, and return the decoder and its loss before each step."""
    warm = max(1, case.steps // _TENTHS)

    def rate(step: int) -> float:
        """Return the learning rate of a step."""
        return _RATE * min((step + 1) / warm, (case.steps - step) / (case.steps - warm))

    model, batches = _model(case, seed), _batches(case, seed, corpus)
    return model, training.train(model, batches, rate, autocast=case.autocast, clip=1.0)


def _batches(case: ParityCase, seed: int, corpus: str) -> Iterator[Tensor]:
    """Draw the batches of a training run in order, each int64, shape [batch_size, seq_len + 1]."""
    generator = torch.Generator().manual_seed(seed)
    return training.text_batches(
        training.load_text(corpus),
        case.steps,
        case.batch_size,
        case.seq_len + 1,
        generator,
        case.device,
    )


def _model(case: ParityCase, seed: int) -> nn.Module:
    """Build the decoder of a case, which reads bytes."""
    config = NanoConfig(
        vocab_size=training.TEXT_VOCAB_SIZE,
        d_model=case.d_model,
        num_layers=case.num_layers,
        num_heads=max(1, case.d_model // 32),
        context_length=case.seq_len,
    )
    model = create_model(config, case.device, seed=seed)
    if case.recipe == AGAIN:
        with torch.no_grad():
            for weight in model.parameters():
                weight.copy_(torch.nextafter(weight, torch.full_like(weight, math.inf)))
    if case.casts or case.is_emulated:
        fp8.convert(
            model, case.casts or fp8.BF16, emulate=case.is_emulated, rounded=case.device == "cpu"
        )
    return model


@functools.lru_cache(maxsize=1)
def _operands(case: ParityCase, corpus: str) -> dict[str, list[Tensor]]:
    """Train a decoder in bf16, and return the operands of its linear layers in one more step.

    The result excludes the head. nanolib caches the result, because all recipes use it.

    Returns:
        Name of a layer → its input, its weight and the gradient of its output, float32, shape
        [tokens or features, features] each.
    """
    model, _ = _train(case, case.first_seed, corpus)
    seen = {}

    def note(name: str, layer: nn.Module, args: tuple[Tensor, ...], out: Tensor):
        def keep(gradient: Tensor):
            seen[name] = [
                x.detach().flatten(0, -2).float() for x in (args[0], layer.weight, gradient)
            ]

        out.register_hook(keep)

    for name in fp8.chosen_layers(model):
        model.get_submodule(name).register_forward_hook(functools.partial(note, name))
    batch = islice(_batches(case, case.first_seed, corpus), 1)
    training.train(model, batch, 0.0, autocast=case.autocast)
    return seen


def _error_rows(
    layer: str, casts: str, x: Tensor, weight: Tensor, gradient: Tensor
) -> Measurements:
    """Yield the signal-to-noise ratio of a layer's three products, dB, against float32."""
    x.requires_grad_()
    weight.requires_grad_()
    outs = fp8.EmulatedProduct.apply(x, weight, fp8.recipe_of(casts)), F.linear(x, weight)
    cast, full = ([out.detach(), *torch.autograd.grad(out, (x, weight), gradient)] for out in outs)
    products = ("output", "input_gradient", "weight_gradient")
    for product, found, expected in zip(products, cast, full, strict=True):
        yield exact(
            "sqnr",
            -20 * math.log10(max(relative_error(found, expected), _LEAST_ERROR)),
            scope=f"{layer} {product}",
            method="emulated product against float32",
            provenance=Provenance.EMULATED,
        )
