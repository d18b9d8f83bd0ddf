"""Measure forward passes and training steps of models in FP8 and other precisions."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch import nn

from nanolib.experiments.model.case import ModelCase, ModelWorkCase
from nanolib.measurement import Measurement, exact
from nanolib.meters.ceilings import rate, tf32_products
from nanolib.models import fp8
from nanolib.models.user import logits_of
from nanolib.run.case import Ceilings, Measuring, Predicted, timed_call_ms
from nanolib.run.memory_plan import Workload, trace
from nanolib.run.peaks_case import no_product, rate_rows

# Dtype of the weights in each precision. TF32 and FP8 change only the dtype of matrix products.
DTYPES = {"float32": "float32", "tf32": "float32", "float16": "float16", "bfloat16": "bfloat16"} | {
    f"fp8_{recipe}": "bfloat16" for recipe in fp8.RECIPES
}
MODES = ("forward", "training_step")


@dataclass(frozen=True)
class SpeedCase(ModelWorkCase):
    """Case of one model in one precision. The plan excludes the memory of casts."""

    VARIES: ClassVar = ("precision",)

    name: str
    preset: str
    overrides: dict[str, Any]
    precision: str
    mode: str
    compiled: bool
    seq_len: int
    batch_size: int
    keep: tuple[str, ...]

    @property
    def is_baseline(self) -> bool:
        """Return whether the other precisions are compared with this case."""
        return self.precision == "bfloat16"

    @property
    def recipe(self) -> str:
        """Return the FP8 recipe, or an empty string for another precision."""
        return self.precision.removeprefix("fp8_") if self.precision.startswith("fp8_") else ""

    @property
    def dtype(self) -> str:
        """Return the dtype of the weights."""
        return DTYPES[self.precision]

    @property
    def model_case(self) -> ModelCase:
        """Return the case of the model notebook that does the same work."""
        mode = "inference" if self.mode == "forward" else "training"
        return ModelCase(*self.shape, mode)

    def __str__(self) -> str:
        """Return the model, the precision and the shape."""
        precision = f"{self.precision}{' compiled' if self.compiled else ''}"
        return f"{self.name} {self.mode} {precision} n={self.seq_len} batch={self.batch_size}"

    def unsupported(self) -> str:
        """Return why this machine cannot run the case, or an empty string."""
        return no_product(product_of(self.precision), self.device) or super().unsupported()

    def predict(self, ceilings: Ceilings | None = None) -> Predicted:
        """Return FLOPs and parameters, and for FP8 the converted share and largest speed-up."""
        found = self.model_case.formulas()  # The dict is empty if nanolib finds no model.
        if self.recipe and found and not self.runs_code:
            built = replace(self.model_case, device="meta").build()
            fp8.convert(built, self.recipe, excluded_modules=self.keep, emulate=True)
            tokens = dict.fromkeys(fp8.linear_layers(built), self.batch_size * self.seq_len)
            row = self.converted_share(built, tokens)
            found |= {
                "converted_share": round(row.estimate, 4),
                "amdahl_bound": round(row.details["amdahl_bound"], 4),
            }
        return found

    def measure(self, params: Any, ceilings: Ceilings) -> Measuring:
        """Measure time, rates and memory, and for FP8 the share of FLOPs in FP8."""
        model = self.model_case.build(params.seed)
        if self.recipe:
            fp8.convert(model, self.recipe, excluded_modules=self.keep, emulate=False)
            ids = self.model_case.random_ids(params.seed)[:, :-1]
            rows = fp8.rows_by_layer(model, lambda: logits_of(model)(ids))
            yield self.converted_share(model, rows)
        optimization = "compile" if self.compiled else "eager"
        case = replace(self.model_case, optimization=optimization)
        step, counted = case.step(params.seed, model), case.counted(run=True)
        call = step.call
        if self.precision == "tf32":
            # The process times other cases too, so each call sets and resets tf32.
            call = tf32_products(True)(call)
        work = Workload(self.mode, call, step.existing)
        timed_call_ms(call)
        timed = yield params.timed(self.device, {self.mode: call})
        latency, flops = timed[self.mode], int(counted.flops)
        details = latency.details | {"parameters": counted.parameters}
        yield replace(latency, details=details)
        yield exact("flops", flops, scope=self.mode)
        # FP8 and bf16 have different peak rates, so `mfu` uses that of the precision.
        yield from rate_rows(latency, flops, product_of(self.precision), ceilings)
        yield rate("tokens_per_second", step.tokens, latency)
        trace(work, self, params)
        for row in case.measure_memory(step):
            # The plan excludes the memory of casts, so it is no prediction for FP8.
            yield replace(row, predicted=None) if self.recipe else row

    def converted_share(self, model: nn.Module, rows: Mapping[str, int]) -> Measurement:
        """Return the share of FLOPs in FP8. The details contain the largest possible speed-up.

        Args:
            model: Converted model.
            rows: Tokens that each linear layer multiplies, by name, as from `fp8.rows_by_layer`.
        """
        audit, layers = fp8.audit(model), fp8.linear_layers(model)
        flops = {
            name: 2 * layer.weight.numel() * rows[name]
            for name, layer in layers.items()
            if audit[name]
        }
        forward = replace(self.model_case, mode="inference").counted(run=True).flops
        share = sum(flops.values()) / forward
        # Eight bits at most halve the time of the converted share.
        bound = 1 / (1 - share / 2)
        kept = [name for name in layers if not flops.get(name)]
        details = {"kept": kept, "amdahl_bound": bound}
        return exact("converted_share", share, method="audit", details=details)


def product_of(precision: str) -> str:
    """Return the dtype of matrix products in a precision, which is `fp8` for FP8 recipes."""
    return "fp8" if precision.startswith("fp8") else precision
