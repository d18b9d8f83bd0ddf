"""The config of a model, the presets, and the names of attention kinds and patterns."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

import pydantic

from nanolib.measurement import BadInput
from nanolib.params import StrictModel

ATTENTION_KINDS = {
    "dense": "scaled_dot_product_attention; backends math, flash, efficient, cudnn",
    "flash_attn": "the flash-attn package, if it is installed (CUDA)",
    "flex": "compiled FlexAttention over a pattern",
    "sparse": "computes only the tiles that a pattern keeps",
    "own": "a function of yours: call: package.module:function",
}
ATTENTION_PATTERNS = {  # what a query sees, before causality
    "window": "the nearest keys",
    "local_global": "the nearest keys and the first global_tokens",
    "strided": "its own tile and every n-th tile from it",
    "block": "its own chunk of window tokens",
    "random": "its own tile and random tiles",
    "bigbird": "the nearest keys, the first global_tokens, and random tiles",
    "document": "the keys of its own packed document",
    "prefix_lm": "the keys before it, and all of the prefix",
    "own": "a mask_mod of yours: mask_mod: package.module:function",
    "top_k": "the tiles with the highest estimated scores",
    "threshold": "the tiles that hold a share (mass) of the estimated attention",
    "dca": "the nearest keys, globals chosen by a learned score, and random keys",
}

DTYPES = ("float32", "bfloat16", "float16", "float64")
Size = Annotated[int, pydantic.Field(gt=0, le=16_777_216)]


class NanoConfig(StrictModel):
    """A transformer.

    Assignment is validated: `config.attention_type = "sparse"` works, a bad value raises `BadInput`
    and changes nothing.

    Attributes:
        vocab_size: Rows of the embedding.
        context_length: The longest sequence, tokens.
        d_model: Width of the residual stream.
        num_layers: Blocks.
        num_heads: Query heads; `d_model / num_heads` must be whole and even (RoPE turns pairs).
        num_kv_heads: Key and value heads; divides `num_heads`; None means as many.
        d_ff: Inner width of the MLP; None means 4 · d_model.
        norm: Kind of normalization.
        mlp: `swiglu` (three matrices) or `gelu` (two).
        positional: `rope`, or `none`.
        tie_embeddings: Whether the output head shares the embedding's weights.
        attention_type: One of `ATTENTION_KINDS`.
        attention_options: The options of that kind; see its module.
        dtype: Type of the weights.

    Example:
        >>> config = NanoConfig.from_preset("decoder_tiny", num_layers=2, attention_type="sparse")
        >>> config.d_model, config.num_layers
        (512, 2)
        >>> config.attention_type = "spares"
        Traceback (most recent call last):
        nanolib.measurement.BadInput: config.attention_type: 'spares' is not a known ...
    """

    NAME: ClassVar[str] = "config"

    vocab_size: int = pydantic.Field(50257, gt=0, le=10_000_000)
    context_length: int = pydantic.Field(1024, gt=0, le=16_777_216)
    d_model: int = pydantic.Field(512, gt=0, le=1_048_576)
    num_layers: int = pydantic.Field(6, gt=0, le=1000)
    num_heads: int = pydantic.Field(8, gt=0, le=65_536)
    num_kv_heads: Size | None = None
    d_ff: Size | None = None
    norm: Literal["rmsnorm"] = "rmsnorm"
    mlp: Literal["swiglu", "gelu"] = "swiglu"
    positional: Literal["rope", "none"] = "rope"
    tie_embeddings: bool = True
    attention_type: str = "dense"
    attention_options: dict[str, Any] = pydantic.Field(default_factory=dict)
    dtype: Literal[DTYPES] = "float32"

    @pydantic.field_validator("attention_type")
    @classmethod
    def _known_kind(cls, value: str) -> str:
        if value not in ATTENTION_KINDS:
            raise ValueError(
                f"{value!r} is not a known attention kind; use one of {', '.join(ATTENTION_KINDS)}"
            )
        return value

    @pydantic.model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.d_model % self.num_heads:
            raise ValueError(
                f"num_heads: {self.num_heads} does not divide d_model {self.d_model}; "
                "choose heads that divide it"
            )
        if self.positional == "rope" and self.head_dim % 2:
            raise ValueError(
                f"num_heads: {self.num_heads} gives an odd head_dim {self.head_dim}, "
                "which RoPE cannot turn; choose heads that give an even one"
            )
        if self.num_heads % self.kv_heads:
            raise ValueError(
                f"num_kv_heads: {self.num_kv_heads} does not divide num_heads {self.num_heads}; "
                "choose a divisor of the heads"
            )
        return self

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.d_model // self.num_heads

    @property
    def kv_heads(self) -> int:
        """Key and value heads: `num_kv_heads`, or as many as there are query heads."""
        return self.num_kv_heads or self.num_heads

    @property
    def mlp_width(self) -> int:
        """Inner width of the MLP: `d_ff`, or 4 · d_model."""
        return self.d_ff or 4 * self.d_model

    @property
    def parameter_count(self) -> int:
        """The number of weights that `create_model` makes, from the shapes."""
        d, kv = self.d_model, self.kv_heads * self.head_dim
        embeddings = self.vocab_size * d * (1 if self.tie_embeddings else 2)
        mlp = (3 if self.mlp == "swiglu" else 2) * d * self.mlp_width
        sparse = self.attention_type in ("sparse", "flex")
        score = d if sparse and self.attention_options.get("pattern") == "dca" else 0
        block = 2 * d * d + 2 * d * kv + mlp + score + 2 * d
        return embeddings + self.num_layers * block + d

    def decoded_parameters(self, batch_size: int) -> int:
        """Count the weights that are read for one token of each sequence, after the prompt.

        Of an untied embedding only the rows of the tokens are read.
        """
        unread = 0 if self.tie_embeddings else max(0, self.vocab_size - batch_size) * self.d_model
        return self.parameter_count - unread

    @classmethod
    def from_preset(cls, name: str, /, **changes: Any) -> NanoConfig:
        """Take the preset `name` with `changes`.

        Raises:
            BadInput: No such preset, or a change that does not fit.
        """
        if name not in PRESETS:
            raise BadInput(f"preset: {name!r} is not known; use one of {', '.join(PRESETS)}")
        return cls(**PRESETS[name] | changes)


def _preset(
    d_model: int, num_layers: int, num_heads: int, context: int, vocab_size: int, **more: Any
) -> dict[str, Any]:
    return {
        "d_model": d_model,
        "num_layers": num_layers,
        "num_heads": num_heads,
        "context_length": context,
        "vocab_size": vocab_size,
        **more,
    }


def _sparse(window: int, global_tokens: int, random_tokens: int) -> dict[str, Any]:
    """Return the sizes of a preset's patterns, of which each pattern takes those that it has."""
    options = {"window": window, "global_tokens": global_tokens, "random_tokens": random_tokens}
    return {"attention_options": options}


_UNTIED = {"tie_embeddings": False}
_GELU = {"mlp": "gelu"}

PRESETS: dict[str, dict[str, Any]] = {
    # 4.2 million weights: two CPU cores train a step in a tenth of a second.
    "decoder_nano": _preset(256, 4, 4, 1024, 4096, **_sparse(128, 16, 8)),
    "decoder_tiny": _preset(512, 6, 8, 1024, 50257, **_sparse(256, 32, 16)),
    "decoder_small": _preset(768, 12, 12, 2048, 50257, **_sparse(512, 64, 32)),
    "decoder_medium": _preset(1024, 24, 16, 4096, 50257, **_sparse(1024, 128, 64)),
    # The next five are the sizes of assignment 2 of Stanford's CS336 in 2025. Its later handout
    # gives the name `xl` to 2.7B's size.
    "small": _preset(768, 12, 12, 512, 10000, d_ff=3072, **_UNTIED),
    "medium": _preset(1024, 24, 16, 512, 10000, d_ff=4096, **_UNTIED),
    "large": _preset(1280, 36, 20, 512, 10000, d_ff=5120, **_UNTIED),
    "xl": _preset(1600, 48, 25, 512, 10000, d_ff=6400, **_UNTIED),
    "2.7B": _preset(2560, 32, 32, 512, 10000, d_ff=10240, **_UNTIED),
    "gpt_125M": _preset(768, 12, 12, 2048, 50304, **_GELU),
    "gpt_350M": _preset(1024, 24, 16, 2048, 50304, **_GELU),
    "gpt_1.3B": _preset(2048, 24, 16, 2048, 50304, **_GELU),
    "gpt_6.7B": _preset(4096, 32, 32, 2048, 50304, **_GELU),
}
