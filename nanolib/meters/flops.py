"""FLOPs: formulas in the open, beside torch's own count. A multiply-add is two operations throughout."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop

from nanolib.config import NanoConfig

BACKWARD_FACTOR = 2.0  # two products in the backward pass for each one in the forward
RECOMPUTING_BACKWARD_FACTOR = 2.5  # kernels that compute the scores again: five products for the forward's two


def _flash_for_cpu(query_shape: tuple, key_shape: tuple, value_shape: tuple, *args: object, **kwargs: object) -> int:
    return sdpa_flop(query_shape, key_shape, value_shape)


def count_flops(fn: Callable[[], object]) -> int:
    """FLOPs of one call by `torch.utils.flop_counter`, outside any timing.

    It knows matrix products and SDPA, not element-wise work, and counts causal attention in full. torch leaves out its
    own flash kernel for CPU, which is added here.
    """
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    with FlopCounterMode(display=False, custom_mapping={flash: _flash_for_cpu}) as counter:
        fn()
    return counter.get_total_flops()


def model_flops(
    config: NanoConfig, batch: int, length: int, kept: Callable[[int, int, bool], float], *, position: int = 0
) -> dict[str, int]:
    """FLOPs of a `NanoConfig` model, by part: forward over a sequence, or over what follows a prompt.

    Args:
        config: The model.
        batch: Sequences.
        length: Tokens per sequence; an encoder–decoder's encoder reads the first half of them.
        kept: (q_len, kv_len, causal) → query-key pairs that its attention computes per head (`Work.kept`).
        position: Tokens that came before and are cached; with it only the decoder's work counts.

    Returns:
        Per part, for all layers: `projections` 2·tokens·(2d² + 2d·kv), `attention` 4·batch·heads·kept·head_dim, `mlp`
        2·tokens·(3 or 2)·d·d_ff, `head` 2·tokens·d·vocab; and their `total`.
    """
    d, kv, layers = config.d_model, config.kv_heads * config.head_dim, config.num_layers
    per_pair = 4 * batch * config.num_heads * config.head_dim
    if config.architecture == "encoder_decoder":
        source, target = (0, length) if position else (length // 2, length - length // 2)
        own = target + 1 if position else target  # the prompt's last token has started the decoder
        pairs = kept(source, source, False) if source else 0
        pairs += kept(target, own, True) + target * (source or position)
        projected = batch * ((source + target) * (2 * d * d + 2 * d * kv) + target * 2 * d * d + source * 2 * d * kv)
    else:
        source, target = 0, length
        pairs = kept(length, position + length, True)
        projected = batch * length * (2 * d * d + 2 * d * kv)
    tokens = batch * (source + target)
    parts = {
        "projections": layers * 2 * projected,
        "attention": layers * round(per_pair * pairs),
        "mlp": layers * 2 * tokens * (3 if config.mlp == "swiglu" else 2) * d * config.mlp_width,
        "head": 2 * batch * target * d * config.vocab_size,
    }
    return parts | {"total": sum(parts.values())}
