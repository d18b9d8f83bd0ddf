"""Define the parameters and the cases of the attention notebook."""

from collections.abc import Sequence
from itertools import product
from typing import Annotated, Any, ClassVar, Self

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator, model_validator

from nanolib.experiments.attention.case import AttentionCase
from nanolib.experiments.attention.quality import QualityCase
from nanolib.measurement import BadInput
from nanolib.meters.machine import resolve_device
from nanolib.models import attention
from nanolib.models.attention.dense import flash_attn_version
from nanolib.models.user import imported
from nanolib.run import params as shared
from nanolib.run.case import Case
from nanolib.run.params import Batch, Count, Dtypes, Grid, Length, Steps
from nanolib.run.peaks_case import ceiling_cases

_Attention = Annotated[
    dict[str, Any],
    BeforeValidator(lambda value: {"kind": value} if isinstance(value, str) else value),
]


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

    NAME: ClassVar[str] = "attention"
    MAIN: ClassVar = (
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

    @model_validator(mode="after")
    def _heads_divide(self) -> Self:
        if self.num_kv_heads and self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_kv_heads: {self.num_kv_heads} does not divide num_heads {self.num_heads}; "
                "choose a divisor"
            )
        return self

    def look(self, cases: Sequence[Case]) -> None:
        """Import the user functions that the parameters name.

        Raises:
            BadInput: A function cannot be imported.
        """
        for parameter in ("attention_types", "quality_attentions"):
            for value in getattr(self, parameter):
                for option in value.keys() & {"call", "mask_mod"}:
                    imported(f"{parameter}.{option}", value[option])


def _kind(value: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the name and the options of an attention, with the installed flash-attn version."""
    options = {name: option for name, option in value.items() if name != "kind"}
    kind = value.get("kind")
    if kind == "flash_attn" and options.get("version", "auto") == "auto":
        found = flash_attn_version()
        options |= {"version": found} if found else {}
    return kind, options


def cases(params: Params) -> list[Case]:
    """List the cases of peak rates, of each attention at each shape, and of pattern losses."""
    device = resolve_device(params.device)
    kv_heads = params.num_kv_heads or params.num_heads
    rest = (params.num_heads, kv_heads, params.head_dim, params.causal, params.backward)
    found = ceiling_cases(device, params.dtypes, params.budget_s)
    kinds = [_kind(value) for value in params.attention_types]
    shapes = product(params.seq_lens, params.batch_sizes, params.dtypes, kinds)
    for seq_len, batch_size, dtype, (kind, options) in shapes:
        named = (device, kind_name(kind, options), kind, options)
        found.append(AttentionCase(*named, seq_len, batch_size, dtype, *rest))
    decoder = (params.quality_seq_len, params.quality_seeds, params.quality_steps)
    decoder += (params.quality_d_model, params.quality_layers)
    for options in params.quality_attentions:
        found.append(QualityCase(device, kind_name("sparse", options), options, *decoder))
    return found


def kind_name(attention_type: str, options: dict[str, Any]) -> str:
    """Return the name of a case, such as `dense (flash)` or `flex window s=0.9 block_size=64`."""
    if attention_type not in ("sparse", "flex"):
        values = " ".join(map(str, options.values()))
        return f"{attention_type} ({values})" if values else attention_type
    words = ["flex"] if attention_type == "flex" else []
    words += [options["backend"]] if options.get("backend", "auto") != "auto" else []
    words.append(attention.parse_options(attention_type, options).pattern)
    for name, value in options.items():
        if value is None or name in ("pattern", "backend"):
            continue
        if name == "sparsity":
            words.append(f"s={value:g}")
        elif name in ("block_size", "seed"):
            words.append(f"{name}={value}")
        else:
            words.append("+".join(map(str, value if isinstance(value, list) else [value])))
    return " ".join(words)
