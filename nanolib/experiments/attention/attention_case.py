"""One attention kind on one shape: its name, its work, and how its time, memory and error are measured."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from nanolib.measurement import FLAG_TEXT, Flag, Measurement, Unsupported, exact
from nanolib.meters import measure
from nanolib.meters.flops import BACKWARD_FACTOR, RECOMPUTING_BACKWARD_FACTOR, count_flops
from nanolib.models import attention
from nanolib.models.attention import flex
from nanolib.models.attention.block_mask import BlockMask
from nanolib.models.attention.dynamic import CHOOSERS
from nanolib.models.attention.reference import causal_mask, masked_attention, relative_error
from nanolib.models.attention.sparse import choose_mask, forget_masks
from nanolib.run.case import Case, Measuring, Plan
from nanolib.run.ceilings import rate_rows, roofline_ms
from nanolib.run.workload import (
    UNCOUNTED,
    Workload,
    compile_row,
    first_call_ms,
    memory_rows,
    planned,
    trace,
)

_ERROR_ROWS = 128  # queries compared with float64: enough to find a wrong tile, few enough for a long sequence


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
    def compiled(self) -> bool:
        """Whether FlexAttention computes it: always for `flex`, and for `sparse` on CUDA."""
        if self.attention_type != "sparse":
            return self.attention_type == "flex"
        block_size = attention.parse_options("sparse", self.options).block_size
        dtype = getattr(torch, self.dtype)
        return flex.computes_sparse(self.device, dtype, self.head_dim, self.seq_len, block_size)

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

    @property
    def keeps_scores(self) -> bool:
        """The math backend keeps the weights for the backward pass; all others compute the scores again."""
        return self.attention_type == "dense" and self.options.get("backend") == "math"

    def inputs(self, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Random q, k, v, drawn afresh for the case."""
        generator = torch.Generator().manual_seed((seed + int(self.case_id, 16)) % 2**63)

        def draw(heads: int) -> torch.Tensor:
            x = torch.randn(
                self.batch_size, heads, self.seq_len, self.head_dim, generator=generator
            )
            return x.to(self.device, getattr(torch, self.dtype))

        return draw(self.num_heads), draw(self.num_kv_heads), draw(self.num_kv_heads)

    def workloads(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Iterator[Workload]:
        """Forward alone, without a graph; and forward with backward."""
        inputs = (q, k, v)

        def attend() -> torch.Tensor:
            return attention.attend(
                self.attention_type, *inputs, causal=self.causal, options=self.options
            )

        def forward() -> torch.Tensor:
            with torch.no_grad():
                return attend()

        yield Workload("forward", forward, lambda: inputs)
        if self.backward:
            gradient = torch.empty_like(q)

            def both() -> tuple[torch.Tensor, ...]:
                for x in inputs:
                    x.requires_grad_()
                return torch.autograd.grad(attend(), inputs, gradient)

            yield Workload("forward_backward", both, lambda: (*inputs, gradient))

    def plan(self) -> Plan:
        """The peak memory of a case, counted without running it; none where the mask follows the input, or a CPU compiles."""
        if self.attention_type == "flex" and not self.device.startswith("cuda"):
            return Plan(reason=UNCOUNTED)
        if self.work is None:
            return Plan(reason="how much is kept depends on the input")

        def workloads() -> list[Workload]:
            shapes = [self.num_heads, self.num_kv_heads, self.num_kv_heads]
            like = {"dtype": getattr(torch, self.dtype), "device": self.device}
            inputs = (
                torch.empty(self.batch_size, heads, self.seq_len, self.head_dim, **like)
                for heads in shapes
            )
            return list(self.workloads(*inputs))

        return planned(self, workloads)

    def formulas(self, ceilings: dict[str, float] | None = None) -> dict[str, float | str]:
        """What formulas say before anything runs, without planning its memory.

        Args:
            ceilings: As `roofline_ms` takes them; without them no time is predicted.

        Returns:
            `bytes` (q, k, v and out once); unless the pattern follows the input, `flops`
            (FLOP, forward), `sparsity`, `block_sparsity`, and `latency` (ms, roofline) where
            the ceilings are known.
        """
        moved = self.moved
        predicted: dict[str, float | str] = {"bytes": moved}
        work = self.work
        if work is None:  # how much is kept depends on the input: there is nothing to predict from
            return predicted
        flops = work.flops(self.batch_size, self.num_heads, self.head_dim)
        predicted |= {
            "flops": flops,
            "sparsity": work.sparsity,
            "block_sparsity": work.block_sparsity,
        }
        if (latency := roofline_ms(flops, moved, self.dtype, ceilings or {})) is not None:
            predicted["latency"] = latency
        return predicted

    def unsupported(self) -> str:
        """Why this machine cannot run it, found by a call on a few tokens; of what is compiled, by asking."""
        if self.attention_type == "flex":
            return flex.unsupported(self.device, self.backward)
        few = replace(self, seq_len=16, batch_size=1)
        try:
            with torch.set_grad_enabled(self.backward):
                inputs = tuple(x.requires_grad_(self.backward) for x in few.inputs(0))
                attention.attend(
                    self.attention_type, *inputs, causal=self.causal, options=self.options
                )
        except Unsupported as error:
            return str(error)
        return ""

    @property
    def group(self) -> str:
        """See `Case.group`: all kinds on one shape."""
        shape = (
            self.seq_len,
            self.batch_size,
            self.dtype,
            self.num_heads,
            self.num_kv_heads,
            self.head_dim,
        )
        return " ".join(map(str, (self.device, *shape, self.causal, self.backward)))

    @property
    def title(self) -> str:
        """See `Case.title`."""
        return self.name

    @property
    def is_baseline(self) -> bool:
        """See `Case.is_baseline`: every dense kernel."""
        return not self.masked

    def measure(self, params: Any, ceilings: dict[str, float]) -> Measuring:
        """Its work, memory and error, and in turns with the other kinds on its shape its latency, with its rates."""
        predicted = self.predict(ceilings)
        q, k, v = self.inputs(params.seed)
        workloads = {work.scope: work for work in self.workloads(q, k, v)}
        timing = params.timing(self.device)
        mask = None
        if self.masked:
            options = attention.parse_options(self.attention_type, self.options)
            mask = choose_mask(q, k, causal=self.causal, options=options)
            few = timing | {
                "budget_s": params.budget_s / 4
            }  # it is paid once, or hides behind the attention
            make = flex.mask_of if self.compiled else choose_mask

            def build() -> None:
                forget_masks()
                make(q, k, causal=self.causal, options=options)

            built = measure(build, scope="mask", **few)
            kept = (
                options.pattern not in CHOOSERS
            )  # otherwise each call chooses it anew, within the forward's own time
            yield replace(built, details=built.details | {"kept": kept})
        forward = workloads["forward"].call
        first_ms = first_call_ms(forward) if self.compiled else 0.0  # nothing else is compiled
        out = forward()
        yield self._error(out, q, k, v, mask)
        if mask is not None:
            yield from self._against_dense(out, q, k, v)
        work = mask.work if mask is not None else self.work
        flops = work.flops(self.batch_size, self.num_heads, self.head_dim)
        yield from self._sparsity(work, mask)
        yield exact(
            "block_sparsity", work.block_sparsity, method="mask", message=self._other_tile(mask)
        )
        yield exact("flops", flops, scope="forward")
        # the counter knows torch's own operations, not what others compile
        if not self.compiled and self.attention_type != "flash_attn":
            yield exact(
                "flops",
                count_flops(forward),
                scope="forward",
                method="flop_counter",
                predicted=flops,
            )
        yield exact("bytes", self.moved, scope="forward")
        yield from self._peaks(workloads["forward"], params)
        timed = yield params.timed(self.device, {"forward": forward})
        latency = replace(timed["forward"], predicted=predicted.get("latency"))
        yield latency
        if self.compiled:
            yield compile_row(first_ms, latency.estimate)
        yield from rate_rows(latency, flops, self.dtype, ceilings)
        if params.cold:
            yield measure(
                forward,
                scope="forward, cold",
                cold=True,
                predicted=predicted.get("latency"),
                **timing,
            )
        if self.backward:
            yield from self._peaks(workloads["forward_backward"], params)
            yield from self._measure_backward(params, (q, k, v), flops, ceilings)

    def _peaks(self, work: Workload, params: Any) -> Iterator[Measurement]:
        """Its peak memory; of what is compiled after a first call, which compiles."""
        if self.compiled:
            work.call()
        trace(work, self, params)
        counted = not self.compiled or self.device.startswith("cuda")
        yield from memory_rows(work, self.device, self.plan(), counted)

    def _sparsity(self, work: attention.Work, mask: BlockMask | None) -> Iterator[Measurement]:
        """What the mask removes, beside what was asked for; flagged where that is nothing."""
        dense = mask is not None and not work.sparsity
        yield exact(
            "sparsity",
            work.sparsity,
            method="mask",
            predicted=self.options.get("sparsity"),
            flags=(Flag.NOT_SPARSE,) if dense else (),
            message=FLAG_TEXT[Flag.NOT_SPARSE] if dense else "",
        )

    def _other_tile(self, mask: BlockMask | None) -> str:
        """What the kernel skips by, where it cannot take the tile that was asked for."""
        asked = mask.block_size if mask is not None and self.compiled else 0
        tile = flex.kernel_tile(self.device, asked)
        return (
            ""
            if tile == asked
            else f"of tiles of {asked}; this kernel skips whole tiles of {tile}, so fewer"
        )

    def _measure_backward(
        self, params: Any, inputs: tuple, flops: int, ceilings: dict[str, float]
    ) -> Measuring:
        if self.compiled:
            flex.allow_repeated_backward()
        for x in inputs:
            x.requires_grad_()
        out = attention.attend(
            self.attention_type, *inputs, causal=self.causal, options=self.options
        )
        gradient = torch.randn_like(out)

        def backward() -> tuple[torch.Tensor, ...]:
            return torch.autograd.grad(out, inputs, gradient, retain_graph=True)

        factor = BACKWARD_FACTOR if self.keeps_scores else RECOMPUTING_BACKWARD_FACTOR
        work = round(factor * flops)
        yield exact("flops", work, scope="backward")
        moved = (
            2 * sum(x.nbytes for x in inputs) + 2 * out.nbytes
        )  # read q, k, v, out, dout; write dq, dk, dv
        yield exact("bytes", moved, scope="backward")
        timed = yield params.timed(self.device, {"backward": backward})
        latency = replace(
            timed["backward"], predicted=roofline_ms(work, moved, self.dtype, ceilings)
        )
        yield latency
        yield from rate_rows(latency, work, self.dtype, ceilings)

    def _error(
        self,
        out: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        block_mask: BlockMask | None,
    ) -> Measurement:
        """The kernel against float64 with the same mask, on evenly spread queries of the first sequence."""
        n = self.seq_len
        rows = torch.linspace(0, n - 1, min(n, _ERROR_ROWS)).long().unique()
        if block_mask is not None:
            heads = 1 if block_mask.shared else self.num_heads
            mask = torch.stack([block_mask.elements(head, rows.tolist()) for head in range(heads)])
        else:
            mask = (
                causal_mask(n, n)[rows]
                if self.causal
                else torch.ones(len(rows), n, dtype=torch.bool)
            )
        q, k, v, out = (x[:1].detach().cpu() for x in (q, k, v, out))
        reference = masked_attention(q[:, :, rows], k, v, mask)
        error = relative_error(out[:, :, rows], reference)
        return exact(
            "relative_error", error, scope="forward", method=f"float64 on {len(rows)} queries"
        )

    def _against_dense(
        self, out: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> Iterator[Measurement]:
        """Compare with dense attention on these inputs; they are random, so this says nothing of what it does to a model."""
        with torch.no_grad():
            dense = attention.attend("dense", q, k, v, causal=self.causal)
        yield exact(
            "relative_error",
            relative_error(out, dense),
            scope="against_dense",
            method="random inputs",
        )
        cosine = torch.nn.functional.cosine_similarity(
            out.flatten().double(), dense.flatten().double(), dim=0
        )
        yield exact("cosine", float(cosine), scope="against_dense", method="random inputs")


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
