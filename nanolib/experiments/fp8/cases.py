"""Define the parameters and cases of the FP8 notebook, and the case that measures speed."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator
from torch import nn

from nanolib.config import NanoConfig
from nanolib.experiments.fp8.small_decoder import TRAINED, ParityCase
from nanolib.experiments.model.case import ModelCase, ModelWorkCase
from nanolib.experiments.model.cases import OwnModelParams, model_name
from nanolib.measurement import Measurement, exact
from nanolib.meters.latency import timed_call_ms
from nanolib.meters.machine import resolve_device
from nanolib.models import create_model, fp8, training
from nanolib.models.user import logits_of
from nanolib.run.case import Batch, Case, Ceilings, Count, Length, Measuring, Predicted, Preset
from nanolib.run.memory_plan import Workload, trace
from nanolib.run.peaks import ceiling_cases, no_product, rate, rate_rows, tf32_products

# Dtype of the weights in each precision. TF32 and FP8 change only the dtype of matrix products.
DTYPES = {"float32": "float32", "tf32": "float32", "float16": "float16", "bfloat16": "bfloat16"} | {
    f"fp8_{recipe}": "bfloat16" for recipe in fp8.RECIPES
}
MODES = ("forward", "training_step")


class Params(OwnModelParams):
    """Parameters of the FP8 notebook.

    Attributes:
        presets: Names in `nanolib.PRESETS` of the models whose speed is measured.
        overrides: Fields of `NanoConfig` that differ from the preset.
        model: Your own model instead of the presets, as `package.module:build` or
            `hf:LlamaForCausalLM` (extra `hf`). The loss still needs the small decoder.
        model_options: Arguments of your model's function, or of the class's configuration.
        precisions: Precisions to measure: `float32`, `tf32`, `float16`, `bfloat16`,
            `fp8_tensorwise`, `fp8_rowwise`, `fp8_rowwise_with_gw_hp`.
        modes: Calls to time, `forward` or `training_step`.
        compiled: Whether to compile the models: `[false]`, `[true]` or both.
        seq_len: Tokens per sequence in the speed measurements.
        batch_size: Sequences per batch in the speed measurements.
        excluded_modules: Names of linear layers to keep in high precision when speed is measured.
            `*` and `?` are wildcards.
        parity_recipes: Recipes and known-bad controls whose loss is compared with bf16 and whose
            error is measured, or empty for none.
        parity_seeds: Number of pairs of training runs per recipe. The first seed is `seed`.
        parity_steps: Training steps of each run. Fewer than 200 steps give no verdict on the loss.
        parity_margin: Largest loss difference that counts as equivalent, as a share of the loss.
        d_model: Width of the small decoder for loss and error.
        num_layers: Number of layers of the small decoder.
        train_seq_len: Sequence length of the small decoder, bytes.
        train_batch_size: Sequences per batch of the small decoder.
        corpus: Text file or folder to read, or empty for the sources of Python's standard library.
    """

    NAME = "fp8"
    CHOSEN: ClassVar = {"dtype": "precisions"}
    MAIN = (
        "presets",
        "model",
        "model_options",
        "overrides",
        "precisions",
        "modes",
        "seq_len",
        "batch_size",
        "parity_recipes",
        "parity_seeds",
        "parity_steps",
        "device",
        "budget_s",
        "label",
    )
    LENGTHS = "seq_len"

    presets: list[Preset] = Field(["decoder_nano"])
    precisions: list[Literal[tuple(DTYPES)]] = Field(["float32", "bfloat16", "fp8_tensorwise"])  # type: ignore[valid-type]
    modes: list[Literal[MODES]] = Field(["training_step"])  # type: ignore[valid-type]
    compiled: list[bool] = Field([False])
    seq_len: Length = 64
    batch_size: Batch = 1
    excluded_modules: list[str] = Field(["*head"], max_length=64)
    parity_recipes: list[Literal[TRAINED]] = Field(
        ["bf16_again", "fp8_tensorwise", "scale_off_by_1024"]
    )  # type: ignore[valid-type]
    parity_seeds: int = Field(5, ge=2, le=1000)
    parity_steps: int = Field(200, ge=10, le=10_000_000)
    parity_margin: float = Field(0.0025, gt=0, lt=1)
    d_model: int = Field(32, gt=0, multiple_of=32, le=16_384)
    num_layers: Count = 1
    train_seq_len: Length = 32
    train_batch_size: Batch = 4
    corpus: str = Field("", max_length=4096)

    @field_validator("corpus")
    @classmethod
    def _can_be_read(cls, corpus: str) -> str:
        training.load_text(corpus, max_bytes=2)
        return corpus

    @model_validator(mode="after")
    def _casts_fit(self) -> Self:
        """Check that `excluded_modules` matches layers of the presets that run in FP8."""
        if self.model or not any(name.startswith("fp8_") for name in self.precisions):
            return self
        for preset in self.presets:
            config = NanoConfig.from_preset(preset, **self.overrides)
            fp8.chosen_layers(create_model(config, "meta"), self.excluded_modules)
        return self


def cases(params: Params) -> list[Case]:
    """List the cases of peak rates, of speed in each precision, and of loss in each recipe."""
    device = resolve_device(params.device)
    speed = [
        SpeedCase(
            device,
            model_name(*model),
            *model,
            params.seq_len,
            params.batch_size,
            precision,
            mode,
            compiled,
            tuple(params.excluded_modules),
        )
        for model in params.models()
        for mode in params.modes
        for compiled in params.compiled
        for precision in params.precisions
    ]
    products = dict.fromkeys(case.product for case in speed)
    possible = [name for name in products if not no_product(name, device)]
    ceilings = ceiling_cases(device, possible, params.budget_s) if possible else []
    parity = [
        ParityCase(
            device,
            recipe,
            params.parity_seeds,
            params.seed,
            params.parity_steps,
            params.train_seq_len,
            params.train_batch_size,
            params.d_model,
            params.num_layers,
            params.parity_margin,
        )
        for recipe in params.parity_recipes
    ]
    return [*ceilings, *speed, *parity]


@dataclass(frozen=True)
class SpeedCase(ModelWorkCase):
    """Case of one model in one precision. The plan excludes the memory of casts."""

    VARIES = ("precision",)

    precision: str
    mode: str
    compiled: bool
    keep: tuple[str, ...]

    @property
    def is_baseline(self) -> bool:
        """Return whether the other precisions are compared with this case."""
        return self.precision == "bfloat16"

    @property
    def recipe(self) -> str:
        """Return the FP8 recipe, or an empty string for another precision."""
        return self.precision.partition("fp8_")[2]

    @property
    def product(self) -> str:
        """Return the dtype of the matrix products, which is `fp8` for FP8 recipes."""
        return "fp8" if self.recipe else self.precision

    @property
    def dtype(self) -> str:
        """Return the dtype of the weights."""
        return DTYPES[self.precision]

    @property
    def model_case(self) -> ModelCase:
        """Return the case of the model notebook that does the same work."""
        mode = "inference" if self.mode == "forward" else "training"
        return ModelCase(*self.shape, mode, "compile" if self.compiled else "eager")

    def __str__(self) -> str:
        """Return the model, the precision and the shape."""
        precision = f"{self.precision}{' compiled' if self.compiled else ''}"
        return f"{self.name} {self.mode} {precision} n={self.seq_len} batch={self.batch_size}"

    def unsupported_reason(self) -> str:
        """Return why this machine cannot run the case, or an empty string."""
        return no_product(self.product, self.device) or super().unsupported_reason()

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

    def measure(self, params, ceilings: Ceilings) -> Measuring:
        """Measure time, rates and memory, and for FP8 the share of FLOPs in FP8."""
        model = self.model_case.build(params.seed)
        if self.recipe:
            fp8.convert(model, self.recipe, excluded_modules=self.keep, emulate=False)
            ids = self.model_case.random_ids(params.seed)[:, :-1]
            rows = fp8.rows_by_layer(model, lambda: logits_of(model)(ids))
            yield self.converted_share(model, rows)
        step = self.model_case.step(params.seed, model)
        counted = self.model_case.count_work(run=True)
        call = step.call
        if self.precision == "tf32":
            # The process times other cases too, so each call sets and resets tf32.
            call = tf32_products(True)(call)
        timed_call_ms(call)
        timed = yield params.timing(self.device, {self.mode: call})
        latency, flops = timed[self.mode], int(counted.flops)
        latency.details["parameters"] = counted.parameters
        yield latency
        yield exact("flops", flops, scope=self.mode)
        # FP8 and bf16 have different peak rates, so `mfu` uses that of the precision.
        yield from rate_rows(latency, flops, self.product, ceilings)
        yield rate("tokens_per_second", step.tokens, latency)
        trace(Workload(self.mode, call), self, params)
        for row in self.model_case.measure_memory(step):
            # The plan excludes the memory of casts, so it is no prediction for FP8.
            yield replace(row, predicted=None) if self.recipe else row

    def converted_share(self, model: nn.Module, rows: Mapping[str, int]) -> Measurement:
        """Return the share of FLOPs in FP8. The details contain the largest possible speed-up.

        Args:
            model: Converted model.
            rows: Tokens that each linear layer multiplies, by name, as from `fp8.rows_by_layer`.
        """
        audit = fp8.audit(model)
        flops = {
            name: 2 * layer.weight.numel() * rows[name] if audit[name] else 0
            for name, layer in fp8.linear_layers(model).items()
        }
        forward = replace(self.model_case, mode="inference").count_work(run=True).flops
        share = sum(flops.values()) / forward
        details = {
            "kept": [name for name, count in flops.items() if not count],
            # Eight bits at most halve the time of the converted share.
            "amdahl_bound": 1 / (1 - share / 2),
        }
        return exact("converted_share", share, method="audit", details=details)
