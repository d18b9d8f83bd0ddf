"""One attention kind on one shape: its work, its name, and what of it is called."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from nanolib.models import attention
from nanolib.run.params import Case
from nanolib.run.workload import (
    UNCOUNTED,
    Plan,
    Workload,
    planned,
)


@dataclass(frozen=True)
class AttentionCase(Case):
    """One attention kind on one shape; `name` is what charts call the kind."""

    name: str
    attention_type: str
    options: dict[str, Any]
    seq_len: int
    batch_size: int
    dtype: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    causal: bool
    backward: bool

    @property
    def masked(self) -> bool:
        """Whether the kind has a sparse mask."""
        return self.attention_type in ("sparse", "flex")

    @property
    def moved(self) -> int:
        """Bytes of q, k, v and the output, each once."""
        item = getattr(torch, self.dtype).itemsize
        row = self.batch_size * self.seq_len * self.head_dim * item
        return row * (2 * self.num_heads + 2 * self.num_kv_heads)

    @property
    def work(self) -> attention.Work | None:
        """What the kind keeps; None where that depends on the input."""
        n = self.seq_len
        return attention.work(self.attention_type, n, n, causal=self.causal, options=self.options)

    def __str__(self) -> str:
        """The kind and the shape."""
        return f"{self.name} n={self.seq_len} batch={self.batch_size} {self.dtype}"


def kind_name(attention_type: str, options: dict[str, Any]) -> str:
    """How charts and tables call a kind: `dense (flash)`, `window 256`, `local_global 256+32`, `window s=0.9`."""
    if attention_type not in ("sparse", "flex"):
        return attention_type + (f" ({options['backend']})" if "backend" in options else "")
    parsed = attention.parse_options(attention_type, options)
    prefix = "flex " if attention_type == "flex" else ""
    if parsed.sparsity is not None:
        return f"{prefix}{parsed.pattern} s={parsed.sparsity:g}"
    sizes = {
        "local_global": (parsed.window, parsed.global_tokens),
        "bigbird": (parsed.window, parsed.global_tokens, parsed.random_tokens),
        "dca": (parsed.window, parsed.global_tokens, parsed.random_tokens),
        "random": (parsed.random_tokens,),
        "threshold": (parsed.mass,),
    }.get(parsed.pattern, (parsed.window,))
    return f"{prefix}{parsed.pattern} {'+'.join(f'{size:g}' for size in sizes)}"


def plan(case: Case) -> Plan:
    """The peak memory of a case, counted without running it; none where the mask follows the input, or a kernel is compiled."""
    if not isinstance(case, AttentionCase):
        return Plan()
    if case.attention_type == "flex":
        return Plan(reason=UNCOUNTED)
    if case.work is None:
        return Plan(reason="how much is kept depends on the input")

    def workloads() -> list[Workload]:
        shapes = [case.num_heads, case.num_kv_heads, case.num_kv_heads]
        like = {"dtype": getattr(torch, case.dtype), "device": case.device}
        inputs = (torch.empty(case.batch_size, heads, case.seq_len, case.head_dim, **like) for heads in shapes)
        return list(workloads_of(case, *inputs))

    return planned(case, workloads)


def workloads_of(case: AttentionCase, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Iterator[Workload]:
    """Forward alone, without a graph; and forward with backward."""
    inputs = (q, k, v)

    def attend() -> torch.Tensor:
        return attention.attend(case.attention_type, *inputs, causal=case.causal, options=case.options)

    def forward() -> torch.Tensor:
        with torch.no_grad():
            return attend()

    yield Workload("forward", forward, lambda: inputs, keeps=False)
    if case.backward:
        gradient = torch.empty_like(q)

        def both() -> tuple[torch.Tensor, ...]:
            for x in inputs:
                x.requires_grad_()
            return torch.autograd.grad(attend(), inputs, gradient)

        yield Workload("forward_backward", both, lambda: (*inputs, gradient), keeps=False)


def keeps_scores(case: AttentionCase) -> bool:
    """The math backend keeps the weights for the backward pass; all others compute the scores again."""
    return case.attention_type == "dense" and case.options.get("backend") == "math"


def inputs_of(case: AttentionCase, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Random q, k, v, drawn afresh for the case."""
    generator = torch.Generator().manual_seed((seed + int(case.case_id, 16)) % 2**63)

    def draw(heads: int) -> torch.Tensor:
        x = torch.randn(case.batch_size, heads, case.seq_len, case.head_dim, generator=generator)
        return x.to(case.device, getattr(torch, case.dtype))

    return draw(case.num_heads), draw(case.num_kv_heads), draw(case.num_kv_heads)
