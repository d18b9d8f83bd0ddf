"""Draw one rank's part of a sequence, and attend to the sequence with one algorithm."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from nanolib.models import attention
from nanolib.models.attention.partial import partial_attention
from nanolib.models.attention.ranks import Sharding
from nanolib.models.attention.reference import causal_mask, masked_attention, relative_error
from nanolib.models.attention.ring import ring_attention
from nanolib.models.attention.tree import tree_attention_decode
from nanolib.models.attention.ulysses import ulysses_attention


def draw(case: Any, layout: Sharding, rank: int, seed: int, device: torch.device) -> list[Tensor]:
    """Draw a rank's parts of random tensors, which do not depend on the layout.

    The function draws one head at a time, so no rank needs memory for the whole sequence.

    Returns:
        q, k, v and, for training, the gradient of the output, shape
        [batch, heads, local_len, head_dim] each. In decoding, q has one token on every rank.
    """
    generator = torch.Generator(device).manual_seed(seed)
    like = {"dtype": getattr(torch, case.dtype), "device": device}
    counts = [case.num_heads, case.num_kv_heads, case.num_kv_heads]
    counts += [case.num_heads] if case.phase == "training" else []
    tensors = []
    for heads in counts:
        is_query = case.phase == "decode" and not tensors
        length = 1 if is_query else layout.length(rank)
        part = torch.empty(case.batch_size, heads, length, case.head_dim, **like)
        for head in part.split(1, dim=1):
            shape = (*head.shape[:2], 1 if is_query else case.seq_len, case.head_dim)
            whole = torch.randn(shape, generator=generator, **like)
            head.copy_(whole if is_query else layout.take(whole, rank))
        tensors.append(part)
    if case.phase == "training":
        for part in tensors[:3]:
            part.requires_grad_()
    return tensors


class Share:
    """One rank's part of a sequence, with the call of one algorithm on this part.

    Args:
        case: Case with the phase and the algorithm.
        rank: Number of the rank.
        tensors: The rank's tensors from `draw`.
        whole: Tensors of the whole sequence, or None if no check needs them.

    Attributes:
        tensors: The rank's tensors.
        call: The call to time.
    """

    def __init__(
        self, case: Any, rank: int, tensors: Sequence[Tensor], whole: Sequence[Tensor] | None = None
    ) -> None:
        self._case, self._rank, self._layout, self._whole = case, rank, case.layout, whole
        self.tensors = tensors
        self.call: Callable[[], Any] = self._train
        if case.phase != "training":
            self.call = torch.no_grad()(self._attend)

    def _attend(self, shard: Sequence[Tensor] = (), **more: Any) -> Tensor:
        algorithm, is_decoding = self._case.algorithm, self._case.phase == "decode"
        q, k, v = self.tensors[0], *(shard or self.tensors[1:3])
        if algorithm in ("dense", "math"):  # Only the first rank has keys.
            if self._rank > 0:
                return q[:, :, :0]
            if is_decoding:  # This is faster than the dense kernel if heads share keys.
                return partial_attention(q, k, v)[0].to(q.dtype)
            options = {"backend": "math"} if algorithm == "math" else None
            return attention.attend("dense", q, k, v, causal=True, options=options)
        if is_decoding:
            return tree_attention_decode(q, k, v, algorithm=algorithm, layout=self._layout, **more)
        attend = ulysses_attention if algorithm == "ulysses" else ring_attention
        return attend(q, k, v, layout=self._layout, **more)

    def _train(self) -> Any:
        *inputs, gradient = self.tensors
        return torch.autograd.grad(self._attend(), inputs, gradient, allow_unused=True)

    @torch.no_grad()
    def in_parts(self, timer: Any) -> None:
        """Run the parts one after the other, because overlapping parts have no separate times."""
        case = self._case
        if case.algorithm == "dense":
            with timer.time_block("comp_attention"):
                self._attend()
        elif case.phase == "decode":
            with timer.time_block("comp_shard_kv"):
                whole = self._whole[1:3] if self._whole else ()
                shard = [self._layout.take(x, self._rank) for x in whole]
            self._attend(shard, timer=timer)
        else:
            more = {} if case.algorithm == "ulysses" else {"overlap": False}
            self._attend(timer=timer, **more)

    @torch.no_grad()
    def error(self) -> float:
        """Return the relative error of this rank's output against float64."""
        out = self._attend()
        if not out.numel():
            return 0.0
        n, device = self._case.seq_len, out.device
        if self._case.phase == "decode":
            mask = causal_mask(1, n, device)
        else:
            mask = self._layout.take(causal_mask(n, n, device), self._rank, dim=0)
        keys, values = self._whole[1:3]
        return relative_error(out, masked_attention(self.tensors[0], keys, values, mask))
