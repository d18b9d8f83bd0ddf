"""Inputs of attention, references for them, and when the two agree."""

import torch

from nanolib.models.attention.reference import relative_error
from nanolib.models.attention.sparse import choose_mask

TOLERANCE = 1e-5
# Options that a pattern requires; all others have defaults.
REQUIRED = {
    "document": {"document_lengths": [7, 30, 1]},
    "own": {"mask_mod": "tests.models.inputs:even_distance"},
}


def even_distance(b, h, q_idx, kv_idx):
    """A user's mask: every second key for even heads, every third for odd heads."""
    return (q_idx - kv_idx) % (2 + h % 2) == 0


def from_the_20th(b, h, q_idx, kv_idx):
    """A user's mask: the first queries see no key."""
    return (q_idx >= 20) & (kv_idx <= q_idx)


def drawn(b, h, q_idx, kv_idx):
    """A user's mask that draws its table in each call, always the same one."""
    table = torch.rand(99, 99, generator=torch.Generator().manual_seed(0)) > 0.5
    return table[q_idx, kv_idx] | (q_idx == kv_idx)


def everything(b, h, q_idx, kv_idx):
    """A user's mask that keeps all pairs, without a tensor."""
    return True


def only_the_future(b, h, q_idx, kv_idx):
    """A user's mask that keeps no pair under causality."""
    return kv_idx > q_idx


def document_per_sequence(b, h, q_idx, kv_idx):
    """A user's mask: the second sequence has another document, which only the last head sees."""
    return q_idx // 25 == (kv_idx + 5 * b * (h == 3)) // 25


def strided_attention(q, k, v, causal):
    """A user's attention."""
    return torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=causal, enable_gqa=True
    )


def returns_nothing(q, k, v, causal):
    """A user's attention that forgets to return its output."""


def returns_float64(q, k, v, causal):
    return q.double()


def returns_nan(q, k, v, causal):
    return q * float("nan")


def integers(b, h, q_idx, kv_idx):
    """A mask of zeros and ones instead of booleans."""
    return (q_idx >= kv_idx).int()


def qkv(batch, heads, kv_heads, q_len, kv_len, head_dim=16, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def draw(h, n):
        return torch.randn(batch, h, n, head_dim, generator=generator, requires_grad=True)

    return draw(heads, q_len), draw(kv_heads, kv_len), draw(kv_heads, kv_len)


def agrees(out, reference, inputs=()):
    """Whether the outputs are the same, and if inputs are given also their gradients."""
    errors = [relative_error(out.detach(), reference.detach())]
    if inputs:
        gradient = torch.randn(out.shape, generator=torch.Generator().manual_seed(9))
        ours = torch.autograd.grad(out, inputs, gradient)
        theirs = torch.autograd.grad(reference, inputs, gradient.double())
        # All gradients as one: if a query sees a single key, those of q and k are zero but for
        # rounding.
        together = (torch.cat([x.double().flatten() for x in all_of]) for all_of in (ours, theirs))
        errors.append(relative_error(*together))
    return max(errors) < TOLERANCE


def masked_by(inputs, causal, options):
    """The mask as one tensor, bool [batch or 1, heads or 1, q_len, kv_len]; and itself."""
    mask = choose_mask(*inputs[:2], causal=causal, options=options)
    batch, heads = (1, 1) if mask.is_shared else inputs[0].shape[:2]
    rows = torch.arange(mask.q_len)
    dense = [mask.elements(b, h, rows) for b in range(batch) for h in range(heads)]
    return torch.stack(dense).unflatten(0, (batch, heads)), mask


def kept_tiles(elements, tile):
    """Tiles with a kept pair, and tiles that are kept whole."""
    q_len, kv_len = elements.shape[-2:]
    padded = torch.nn.functional.pad(elements, (0, -kv_len % tile, 0, -q_len % tile))
    pairs = padded.unflatten(3, (-1, tile)).unflatten(2, (-1, tile)).sum(dim=(3, 5))
    return pairs > 0, pairs == tile * tile
