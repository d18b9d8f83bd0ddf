"""Draw one rank's part of a sequence, and attend to the sequence with one algorithm."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nanolib.models import attention
from nanolib.models.attention.partial import partial_attention
from nanolib.models.attention.ranks import Sharding
from nanolib.models.attention.reference import causal_mask, masked_attention, relative_error
from nanolib.models.attention.sequence import ring_attention, ulysses_attention
from nanolib.models.attention.tree import tree_attention_decode


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
        length, total = (1, 1) if is_query else (layout.length(rank), case.seq_len)
        part = torch.empty(case.batch_size, heads, length, case.head_dim, **like)
        for head in part.split(1, dim=1):
            shape = (case.batch_size, 1, total, case.head_dim)
            whole = torch.randn(shape, generator=generator, **like)
            head.copy_(whole if is_query else layout.take(whole, rank))
        tensors.append(part)
    if case.phase == "training":
        for part in tensors[:3]:
            part.requires_grad_()
    return tensors


@dataclass(frozen=True)
class Share:
    """One rank's part of a sequence, with the calls of one algorithm on this part.

    Attributes:
        case: Case with the phase and the algorithm.
        rank: Number of the rank.
        tensors: The rank's tensors from `draw`.
        whole: Tensors of the whole sequence, or nothing if no check needs them.
    """

    case: Any
    rank: int
    tensors: Sequence[Tensor]
    whole: Sequence[Tensor] = ()

    def call(self) -> Any:
        """Run the call whose time and memory nanolib measures."""
        if self.case.phase == "training":
            *inputs, gradient = self.tensors
            return torch.autograd.grad(self._attend(), inputs, gradient, allow_unused=True)
        with torch.no_grad():
            return self._attend()

    def _attend(self, shard: Sequence[Tensor] = (), **more: Any) -> Tensor:
        algorithm, is_decoding = self.case.algorithm, self.case.phase == "decode"
        q, k, v = self.tensors[0], *(shard or self.tensors[1:3])
        if algorithm in ("dense", "math"):  # Only the first rank has keys.
            if self.rank > 0:
                return q[:, :, :0]
            if is_decoding:  # This is faster than the dense kernel if heads share keys.
                return partial_attention(q, k, v)[0].to(q.dtype)
            options = {"backend": "math"} if algorithm == "math" else None
            return attention.attend("dense", q, k, v, causal=True, options=options)
        more["layout"] = self.case.layout
        if is_decoding:
            return tree_attention_decode(q, k, v, algorithm=algorithm, **more)
        attend = ulysses_attention if algorithm == "ulysses" else ring_attention
        return attend(q, k, v, **more)

    @torch.no_grad()
    def in_parts(self, timer: Any) -> None:
        """Run the parts one after the other, because overlapping parts have no separate times."""
        case = self.case
        if case.algorithm == "dense":
            with timer.time_block("comp_attention"):
                self._attend()
        elif case.phase == "decode":
            with timer.time_block("comp_shard_kv"):
                shard = [case.layout.take(x, self.rank) for x in self.whole[1:3]]
            self._attend(shard, timer=timer)
        else:
            more = {} if case.algorithm == "ulysses" else {"overlap": False}
            self._attend(timer=timer, **more)

    def error(self) -> float:
        """Return the relative error of this rank's output against float64."""
        with torch.no_grad():
            out = self._attend()
        if not out.numel():
            return 0.0
        n, device = self.case.seq_len, out.device
        if self.case.phase == "decode":
            mask = causal_mask(1, n, device)
        else:
            mask = self.case.layout.take(causal_mask(n, n, device), self.rank, dim=0)
        q, *keys = self.tensors[0].detach(), *self.whole[1:3]
        return relative_error(out, masked_attention(q, *keys, mask))
