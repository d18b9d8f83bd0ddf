"""FLOPs: formulas in the open, beside torch's own count. A multiply-add is two operations throughout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop, sdpa_flop

from nanolib.config import NanoConfig

BACKWARD_FACTOR = 2.0  # two products in the backward pass for each one in the forward
RECOMPUTING_BACKWARD_FACTOR = (
    2.5  # kernels that compute the scores again: five products for the forward's two
)


def _attention(query: tuple, key: tuple, value: tuple, *rest: object, **named: object) -> int:
    return sdpa_flop(query, *(_per_query_head(query, each) for each in (key, value)))


def _attention_backward(
    gradient: tuple, query: tuple, key: tuple, value: tuple, *rest: object, **named: object
) -> int:
    return round(BACKWARD_FACTOR * _attention(query, key, value))


def _attention_computed_again(
    gradient: tuple, query: tuple, key: tuple, value: tuple, *rest: object, **named: object
) -> int:
    return sdpa_backward_flop(
        gradient, query, *(_per_query_head(query, each) for each in (key, value))
    )


def _per_query_head(query: tuple, shared: tuple) -> tuple:
    """The shape of keys or values with one head for each of the queries': torch before 2.13 counts no others."""
    return (shared[0], query[1], *shared[2:])


def _grouped(a: tuple, b: tuple, *rest: object, **named: object) -> int:
    """Every row meets one group's matrix; two stacks of matrices are multiplied one by one."""
    return 2 * a[-2] * a[-1] * b[-1] * (a[0] if len(a) == len(b) == 3 else 1)


def _row_times_matrix(a: tuple, b: tuple, *rest: object, **named: object) -> int:
    return 2 * a[0] * (a[1] if len(a) == 2 else 1) * (b[1] if len(b) == 2 else 1)


def _multi_head(
    query: tuple, key: tuple, value: tuple, width: int, *rest: object, **named: object
) -> int:
    batch, queries, keys = query[0], query[1], key[1]
    return batch * (4 * (queries + keys) * width**2 + 4 * queries * keys * width)


def _encoder_layer(x: tuple, width: int, heads: int, *rest: Any, **named: object) -> int:
    inner = rest[11][0]  # rows of the MLP's first weight
    return _multi_head(x, x, x, width) + 4 * x[0] * x[1] * width * inner


def _lstm(x: tuple, inputs: tuple, hidden: tuple, *rest: object, **named: object) -> int:
    return 2 * x[0] * x[1] * (inputs[0] * inputs[1] + hidden[0] * hidden[1])


def _lstm_backward(*shapes: Any, **named: object) -> int:
    return round(BACKWARD_FACTOR * _lstm(*shapes))


# Products that torch's counter takes for nothing, or fails on: heads that share keys, attention on a CPU, a mixture's experts, a
# matrix with a vector, 8 bits, what modules do in one operation for inference, and a recurrent layer on a CPU.
_KERNELS = ("flash", "efficient", "cudnn")
_ADDED: dict[str, Callable[..., int]] = {
    **{f"aten::_scaled_dot_product_{kernel}_attention": _attention for kernel in _KERNELS},
    **{
        f"aten::_scaled_dot_product_{kernel}_attention_backward": _attention_computed_again
        for kernel in _KERNELS
    },
    "aten::_scaled_dot_product_flash_attention_for_cpu": _attention,
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward,
    "aten::_grouped_mm": _grouped,
    "transformers::grouped_mm_fallback": _grouped,
    "aten::mv": _row_times_matrix,
    "aten::dot": _row_times_matrix,
    "aten::_int_mm": _row_times_matrix,
    "aten::_native_multi_head_attention": _multi_head,
    "aten::_transformer_encoder_layer_fwd": _encoder_layer,
    "aten::mkldnn_rnn_layer": _lstm,
    "aten::mkldnn_rnn_layer_backward": _lstm_backward,
}
# An attention that computes its scores again in the backward pass: the work of the model is the same as of one that keeps them.
_AS_MODEL = {
    f"aten::_scaled_dot_product_{kernel}_attention_backward": _attention_backward
    for kernel in _KERNELS
}


def _operations(formulas: dict[str, Callable[..., int]]) -> dict[Any, Callable[..., int]]:
    """Those that exist here: transformers makes its own when a mixture is imported."""
    found = {}
    for name, formula in formulas.items():
        space, _, operation = name.partition("::")
        if (known := getattr(getattr(torch.ops, space), operation, None)) is not None:
            found[known] = formula
    return found


def count_flops(fn: Callable[[], object], *, as_model: bool = False) -> int:
    """FLOPs of one call by `torch.utils.flop_counter`, outside any timing.

    It knows matrix products and SDPA, not element-wise work, and counts attention in full, whatever is masked. Products that
    torch's counter leaves out are added.

    Args:
        fn: What to call.
        as_model: Whether attention's backward pass counts twice its forward one on every device, as a model's formula has it;
            otherwise scores that a kernel computes again count too.
    """
    formulas = _operations(_ADDED | (_AS_MODEL if as_model else {}))
    with FlopCounterMode(display=False, custom_mapping=formulas) as counter:
        fn()
    return counter.get_total_flops()


def model_flops(
    config: NanoConfig,
    batch: int,
    length: int,
    kept: Callable[[int, int], float],
    *,
    position: int = 0,
) -> dict[str, int]:
    """FLOPs of a `NanoConfig` model, by part: forward over a sequence, or over what follows a prompt.

    Args:
        config: The model.
        batch: Sequences.
        length: Tokens per sequence.
        kept: (q_len, kv_len) → query-key pairs that its attention computes per head (`Work.kept`).
        position: Tokens that came before and are cached; their work is done.

    Returns:
        Per part, for all layers: `projections` 2·tokens·(2d² + 2d·kv), `attention` 4·batch·heads·kept·head_dim, `mlp`
        2·tokens·(3 or 2)·d·d_ff, `head` 2·tokens·d·vocab; and their `total`.
    """
    d, kv, layers = config.d_model, config.kv_heads * config.head_dim, config.num_layers
    per_pair = 4 * batch * config.num_heads * config.head_dim
    tokens = batch * length
    parts = {
        "projections": layers * 2 * tokens * (2 * d * d + 2 * d * kv),
        "attention": layers * round(per_pair * kept(length, position + length)),
        "mlp": layers * 2 * tokens * (3 if config.mlp == "swiglu" else 2) * d * config.mlp_width,
        "head": 2 * tokens * d * config.vocab_size,
    }
    return parts | {"total": sum(parts.values())}
