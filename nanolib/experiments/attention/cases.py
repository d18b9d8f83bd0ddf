"""Define the parameters and the cases of the attention notebook.

A case measures either an attention at one shape, or the loss of a trained decoder after sparse
attention replaces dense attention. Losses are paired by seed: the dense and the sparse model have
the same weights and read the same text.
"""

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from statistics import fmean  # The result of `sum` differs between versions of Python.
from typing import Annotated, Any

import torch
from pydantic import BeforeValidator, Field, ValidationInfo, field_validator, model_validator

from nanolib.config import NanoConfig
from nanolib.experiments.attention.case import AttentionCase
from nanolib.measurement import BadInput, Measurements
from nanolib.meters.machine import resolve_device
from nanolib.models import Transformer, attention, create_model, training
from nanolib.models.attention.dense import flash_attn_version
from nanolib.models.attention.sparse import watched_work
from nanolib.models.user import import_callable
from nanolib.run import case as shared
from nanolib.run.case import (
    Batch,
    Case,
    Ceilings,
    Count,
    Dtypes,
    Grid,
    Length,
    Steps,
    check_heads,
    over_seeds,
)
from nanolib.run.peaks import ceiling_cases

_Attention = Annotated[
    dict[str, Any],
    BeforeValidator(lambda value: {"kind": value} if isinstance(value, str) else value),
]
_HELD_OUT_BATCHES, _BATCH, _RATE = 6, 8, 3e-3


class Params(shared.Params):
    """Parameters of the attention notebook.

    Attributes:
        seq_lens: Sequence lengths, tokens.
        batch_sizes: Sequences per batch.
        attention_types: Attentions to measure, such as `dense`, `{kind: dense, backend: flash}` or
            `{kind: sparse, pattern: window}`. Options that are not set have default values.
        dtypes: Dtypes of q, k and v.
        num_heads: Number of query heads.
        num_kv_heads: Number of key and value heads, a divisor of `num_heads`. 0 means `num_heads`.
        head_dim: Width of a head.
        causal: Whether to mask future tokens.
        backward: Whether to measure the backward pass too.
        cold_cache: Whether to time the forward pass with a cold cache too.
        quality_attentions: Options of the sparse attentions that replace dense attention in a
            trained decoder, such as `{pattern: window, sparsity: 0.9}`, or empty for none.
        quality_seq_len: Sequence length of the trained decoder, tokens.
        quality_seeds: Number of decoders to train, each with a seed for its initial weights.
        quality_steps: Training steps before sparse attention replaces dense attention.
        quality_d_model: Width of the trained decoder.
        quality_layers: Number of layers of the trained decoder.
    """

    NAME = "attention"
    MAIN = (
        "seq_lens",
        "batch_sizes",
        "attention_types",
        "dtypes",
        "num_heads",
        "num_kv_heads",
        "head_dim",
        "causal",
        "backward",
        "quality_attentions",
        "device",
        "budget_s",
        "label",
    )

    seq_lens: Grid[Length] = Field([256, 1024, 2048])
    batch_sizes: Grid[Batch] = Field([1])
    attention_types: Grid[_Attention] = Field(
        [
            {"kind": "dense"},
            {"kind": "sparse", "pattern": "window", "window": 128},
            {"kind": "sparse", "pattern": "random", "sparsity": 0.9},
        ]
    )
    dtypes: Dtypes = Field(["float32"])
    num_heads: Count = 4
    num_kv_heads: int = Field(0, ge=0, le=4096)
    head_dim: Count = 64
    causal: bool = True
    backward: bool = True
    cold_cache: bool = False
    quality_attentions: list[dict[str, Any]] = Field(
        [{"pattern": "window", "sparsity": 0.5, "block_size": 16}]
    )
    quality_seq_len: int = Field(64, ge=16, le=65_536)
    quality_seeds: int = Field(2, ge=2, le=1000)
    quality_steps: Steps = 200
    quality_d_model: int = Field(32, ge=8, multiple_of=8, le=65_536)
    quality_layers: Count = 1

    @field_validator("attention_types", "quality_attentions")
    @classmethod
    def _options_exist(
        cls, values: list[dict[str, Any]], info: ValidationInfo
    ) -> list[dict[str, Any]]:
        is_sparse = info.field_name == "quality_attentions"
        for value in values:
            try:
                attention.parse_options(*(("sparse", value) if is_sparse else _kind(value)))
            except BadInput as error:
                raise ValueError("; ".join(error.lines)) from None
        return values

    _heads_divide = model_validator(mode="after")(check_heads)

    def look(self, cases: Sequence[Case]) -> None:
        """Import the user functions that the parameters name.

        Raises:
            BadInput: A function cannot be imported.
        """
        for parameter in ("attention_types", "quality_attentions"):
            for value in getattr(self, parameter):
                for option in value.keys() & {"call", "mask_mod"}:
                    import_callable(f"{parameter}.{option}", value[option])


def _kind(value: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the name and the options of an attention, with the installed flash-attn version."""
    options = dict(value)
    kind = options.pop("kind", None)
    if kind == "flash_attn" and options.get("version", "auto") == "auto":
        found = flash_attn_version()
        options |= {"version": found} if found else {}
    return kind, options


def cases(params: Params) -> list[Case]:
    """List the cases of peak rates, of each attention at each shape, and of pattern losses."""
    device = resolve_device(params.device)
    found = ceiling_cases(device, params.dtypes, params.budget_s)
    kinds = map(_kind, params.attention_types)
    shapes = product(params.seq_lens, params.batch_sizes, params.dtypes, kinds)
    for *shape, (kind, options) in shapes:
        found.append(
            AttentionCase(
                device,
                kind_name(kind, options),
                kind,
                options,
                *shape,
                params.num_heads,
                params.num_kv_heads or params.num_heads,
                params.head_dim,
                params.causal,
                params.backward,
            )
        )
    for options in params.quality_attentions:
        found.append(
            QualityCase(
                device,
                kind_name("sparse", options),
                options,
                params.quality_seq_len,
                params.quality_seeds,
                params.quality_steps,
                params.quality_d_model,
                params.quality_layers,
            )
        )
    return found


def kind_name(attention_type: str, options: dict[str, Any]) -> str:
    """Return the name of a case, such as `dense (flash)` or `flex window s=0.9 block_size=64`."""
    if attention_type not in ("sparse", "flex"):
        values = " ".join(map(str, options.values()))
        return f"{attention_type} ({values})" if values else attention_type
    words = ["flex"] if attention_type == "flex" else []
    words += [options["backend"]] if options.get("backend", "auto") != "auto" else []
    words.append(attention.parse_options(attention_type, options).pattern)
    labels = {"sparsity": "s={:g}", "block_size": "block_size={}", "seed": "seed={}"}
    for name, value in options.items():
        if value is None or name in ("pattern", "backend"):
            continue
        text = "+".join(map(str, value)) if isinstance(value, list) else value
        words.append(labels.get(name, "{}").format(text))
    return " ".join(words)


@dataclass(frozen=True)
class QualityCase(Case):
    """Case that measures the loss of a small decoder with one sparse attention.

    Attributes:
        name: Name of the attention for people.
        options: Options of the attention `sparse`.
        seq_len: Sequence length, in bytes of text.
        seeds: Number of decoders, each with its own initial weights.
        steps: Training steps of the dense decoder.
        d_model: Width of the decoder.
        num_layers: Number of layers.
    """

    supports_ab = False  # The case has no timings that `nano ab` could compare.

    name: str
    options: dict[str, Any]
    seq_len: int
    seeds: int
    steps: int
    d_model: int
    num_layers: int

    def __str__(self) -> str:
        return f"{self.name} loss, n={self.seq_len}, {self.seeds} seeds"

    def measure(self, params, ceilings: Ceilings) -> Measurements:
        """Measure the loss difference from the dense model on held-out text.

        Yields:
            Rows of `sparsity` of the mask, `loss` of the dense model, and `loss_difference` with
            the scope `replaced`. All rows are means over seeds with intervals. Losses are in nats
            per byte.
        """
        shape = {
            "context_length": self.seq_len,
            "d_model": self.d_model,
            "num_layers": self.num_layers,
            "num_heads": 4,
            "vocab_size": training.TEXT_VOCAB_SIZE,
        }
        sparse = NanoConfig(**shape, attention_type="sparse", attention_options=self.options)
        sparsities, losses, differences = [], [], []
        for seed in range(self.seeds):
            weights, dense_loss = _train_dense(self.device, self.steps, seed, **shape)
            model = create_model(sparse, self.device, seed=0)
            # The dense model has no score layer for the pattern `dca`, so the layer is untrained.
            model.load_state_dict(weights, strict=False)
            with watched_work() as found:
                differences.append(_loss(model) - dense_loss)
            sparsities.append(fmean(work.sparsity for work in found))
            losses.append(dense_loss)
        yield over_seeds("sparsity", sparsities, predicted=self.options.get("sparsity"))
        yield over_seeds("loss", losses, "dense")
        yield over_seeds("loss_difference", differences, "replaced", paired=True)


def _batches(model: Transformer, count: int, seed: int | None) -> Iterator[torch.Tensor]:
    """Draw batches of text: training text for a seed, or held-out text if the seed is None."""
    data = training.load_text("")
    cut = len(data) * 9 // 10
    part = data[cut:] if seed is None else data[:cut]
    generator = torch.Generator().manual_seed(seed or 0)
    return training.text_batches(
        part,
        count,
        _BATCH,
        model.config.context_length + 1,
        generator,
        next(model.parameters()).device,
    )


@torch.no_grad()
def _loss(model: Transformer) -> float:
    """Return the loss on held-out text, nats per byte."""
    held_out = _batches(model, _HELD_OUT_BATCHES, None)
    return fmean(float(training.next_token_loss(model, ids)) for ids in held_out)


@functools.lru_cache(maxsize=64)  # All sparse attentions share the dense decoders.
def _train_dense(
    device: str, steps: int, seed: int, **shape: int
) -> tuple[dict[str, torch.Tensor], float]:
    """Train a dense decoder, and return its weights and its loss on held-out text."""
    model = create_model(NanoConfig(**shape), device, seed=seed)
    training.train(model, _batches(model, steps, seed), _RATE)
    return model.state_dict(), _loss(model)
