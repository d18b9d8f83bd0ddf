"""Define the config of a model, and the names of presets, attentions and patterns."""

from typing import Annotated, Any, Literal, Self

import pydantic

from nanolib.measurement import BadInput
from nanolib.params import StrictModel

ATTENTION_KINDS = {
    "dense": "scaled_dot_product_attention with the backends math, flash, efficient and cudnn",
    "flash_attn": "the flash-attn package, if it is installed (CUDA)",
    "flex": "compiled FlexAttention with a pattern",
    "sparse": "kernels that compute only the tiles that a pattern keeps",
    "own": "your own function (call: package.module:function)",
}
# If attention is causal, each pattern also leaves out the keys after the query.
ATTENTION_PATTERNS = {
    "window": "attends to the nearest keys",
    "local_global": "attends to the nearest keys and the first global_tokens keys",
    "strided": "attends to the query's tile and every n-th tile before and after",
    "block": "attends to the query's chunk of window tokens",
    "random": "attends to the query's tile and random tiles",
    "bigbird": "attends to the nearest keys, the first global_tokens keys, and random tiles",
    "document": "attends to the keys of the query's packed document",
    "prefix_lm": "attends to all earlier keys, and to the whole prefix",
    "own": "your own mask (mask_mod: package.module:function)",
    "top_k": "attends to the tiles with the highest estimated scores",
    "threshold": "attends to the fewest tiles that cover a share (mass) of the estimated attention",
    "dca": "attends to the nearest keys, keys with a high learned score, and random keys",
}

DTYPES = ("float32", "bfloat16", "float16", "float64")
Size = Annotated[int, pydantic.Field(gt=0, le=16_777_216)]


class NanoConfig(StrictModel):
    """The shape of a transformer.

    nanolib checks each assignment. For example, `config.attention_type = "sparse"` works. A bad
    value raises `BadInput` and changes nothing.

    Attributes:
        vocab_size: Number of tokens in the vocabulary.
        context_length: Length of the longest sequence, in tokens.
        d_model: Width of the residual stream.
        num_layers: Number of transformer blocks.
        num_heads: Number of query heads, a divisor of `d_model`. RoPE needs an even `head_dim`.
        num_kv_heads: Number of key and value heads, a divisor of `num_heads`. None means
            `num_heads`.
        d_ff: Inner width of the MLP. None means a width of 4 · d_model.
        norm: Normalization, always `rmsnorm`.
        mlp: Design of the MLP, `swiglu` with three matrices or `gelu` with two matrices.
        positional: Positional encoding, always `rope`.
        tie_embeddings: Whether the output head uses the weights of the embedding.
        attention_type: Name of an attention in `ATTENTION_KINDS`.
        attention_options: Options of the attention. The module of each attention defines them.
        dtype: Dtype of the weights.

    Example:
        >>> config = NanoConfig.from_preset("decoder_tiny", num_layers=2, attention_type="sparse")
        >>> config.d_model, config.num_layers
        (512, 2)
        >>> config.attention_type = "spares"
        Traceback (most recent call last):
        nanolib.measurement.BadInput: config.attention_type: Input should be 'dense', ...
    """

    NAME = "config"

    vocab_size: Size = 50257
    context_length: Size = 1024
    d_model: Size = 512
    num_layers: int = pydantic.Field(6, gt=0, le=1000)
    num_heads: Size = 8
    num_kv_heads: Size | None = None
    d_ff: Size | None = None
    norm: Literal["rmsnorm"] = "rmsnorm"
    mlp: Literal["swiglu", "gelu"] = "swiglu"
    positional: Literal["rope"] = "rope"
    tie_embeddings: bool = True
    attention_type: Literal[tuple(ATTENTION_KINDS)] = "dense"
    attention_options: dict[str, Any] = pydantic.Field(default_factory=dict)
    dtype: Literal[DTYPES] = "float32"

    @pydantic.model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.d_model % self.num_heads:
            raise ValueError(
                f"num_heads: {self.num_heads} does not divide d_model {self.d_model}; "
                "choose a divisor of d_model"
            )
        if self.head_dim % 2:
            raise ValueError(
                f"num_heads: {self.num_heads} gives head_dim {self.head_dim}, but RoPE needs an "
                "even head_dim; choose another num_heads"
            )
        if self.num_heads % self.kv_heads:
            raise ValueError(
                f"num_kv_heads: {self.num_kv_heads} does not divide num_heads {self.num_heads}; "
                "choose a divisor of num_heads"
            )
        return self

    @property
    def head_dim(self) -> int:
        """Return the width of one head."""
        return self.d_model // self.num_heads

    @property
    def kv_heads(self) -> int:
        """Return the number of key and value heads, which is `num_heads` by default."""
        return self.num_kv_heads or self.num_heads

    @property
    def mlp_width(self) -> int:
        """Return the inner width of the MLP, which is 4 · d_model by default."""
        return self.d_ff or 4 * self.d_model

    @property
    def scores_tokens(self) -> bool:
        """Return whether the attention chooses keys by a learned score of each token."""
        pattern = self.attention_options.get("pattern")
        return self.attention_type in ("sparse", "flex") and pattern == "dca"

    @property
    def parameter_count(self) -> int:
        """Return the number of weights of the model that `create_model` builds."""
        d, kv = self.d_model, self.kv_heads * self.head_dim
        embeddings = self.vocab_size * d * (1 if self.tie_embeddings else 2)
        mlp = (3 if self.mlp == "swiglu" else 2) * d * self.mlp_width
        block = 2 * d * d + 2 * d * kv + mlp + d * self.scores_tokens + 2 * d
        return embeddings + self.num_layers * block + d

    def decoded_parameters(self, batch_size: int) -> int:
        """Return the number of weights that a model reads to decode one token per sequence.

        From an untied embedding, the model reads only one row per token.

        Args:
            batch_size: Number of sequences.
        """
        unread = 0 if self.tie_embeddings else max(0, self.vocab_size - batch_size) * self.d_model
        return self.parameter_count - unread

    @classmethod
    def from_preset(cls, name: str, /, **changes) -> Self:
        """Return the config of a preset, with some fields changed.

        Args:
            name: Name of a preset in `PRESETS`.
            changes: New values of some fields.

        Raises:
            BadInput: The preset does not exist, or a value is not valid.
        """
        if name not in PRESETS:
            raise BadInput(f"preset: {name!r} is not known; use one of {', '.join(PRESETS)}")
        return cls(**PRESETS[name] | changes)


_SIZES = ("d_model", "num_layers", "num_heads", "context_length", "vocab_size")


def _preset(*sizes: int, **more):
    return dict(zip(_SIZES, sizes, strict=True)) | more


def _sparse(window: int, global_tokens: int, random_tokens: int):
    """Return a preset's options for all patterns. Each pattern uses only its own options."""
    return {
        "attention_options": {
            "window": window,
            "global_tokens": global_tokens,
            "random_tokens": random_tokens,
        }
    }


_UNTIED = {"tie_embeddings": False}
_GELU = {"mlp": "gelu"}

PRESETS: dict[str, dict[str, Any]] = {
    # A training step of these 5.2 million weights takes a tenth of a second on two CPU cores.
    "decoder_nano": _preset(256, 4, 4, 1024, 4096, **_sparse(128, 16, 8)),
    "decoder_tiny": _preset(512, 6, 8, 1024, 50257, **_sparse(256, 32, 16)),
    "decoder_small": _preset(768, 12, 12, 2048, 50257, **_sparse(512, 64, 32)),
    "decoder_medium": _preset(1024, 24, 16, 4096, 50257, **_sparse(1024, 128, 64)),
    # The next five sizes are from assignment 2 of Stanford's CS336 in 2025. A later handout uses
    # the name `xl` for the size of `2.7B`.
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
