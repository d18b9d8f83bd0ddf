"""Define the parameters and cases of the FP8 notebook."""

from typing import ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from nanolib.config import NanoConfig
from nanolib.experiments.fp8.small_decoder import TRAINED, ParityCase
from nanolib.experiments.fp8.speed import DTYPES, MODES, SpeedCase, product_of
from nanolib.experiments.model.cases import OwnModelParams, model_name
from nanolib.meters.machine import resolve_device
from nanolib.models import create_model, fp8
from nanolib.run.case import Case
from nanolib.run.params import Batch, Count, Length, Preset, known_corpus
from nanolib.run.peaks_case import ceiling_cases, no_product


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

    NAME: ClassVar[str] = "fp8"
    CHOSEN: ClassVar = {"dtype": "precisions"}
    MAIN: ClassVar = (
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
    LENGTHS: ClassVar[str] = "seq_len"

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

    _corpus = field_validator("corpus")(known_corpus)

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
    shape = (params.seq_len, params.batch_size, tuple(params.excluded_modules))
    speed = [
        SpeedCase(device, model_name(*model), *model, precision, mode, compiled, *shape)
        for model in params.models()
        for mode in params.modes
        for compiled in params.compiled
        for precision in params.precisions
    ]
    products = dict.fromkeys(product_of(case.precision) for case in speed)
    possible = [name for name in products if not no_product(name, device)]
    ceilings = ceiling_cases(device, possible, params.budget_s) if possible else []
    small = (params.train_seq_len, params.train_batch_size, params.d_model, params.num_layers)
    runs = (params.parity_seeds, params.seed, params.parity_steps, *small, params.parity_margin)
    parity = [ParityCase(device, recipe, *runs) for recipe in params.parity_recipes]
    return [*ceilings, *speed, *parity]
