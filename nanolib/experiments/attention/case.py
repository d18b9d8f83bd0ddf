"""Measure one attention at one shape, and predict its latency and memory."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from nanolib.measurement import Flag, Measurement, Unsupported, exact
from nanolib.meters import measure_phases
from nanolib.meters.flops import BACKWARD_FACTOR, RECOMPUTING_BACKWARD_FACTOR
from nanolib.meters.latency import compile_row, timed_call_ms
from nanolib.models import attention
from nanolib.models.attention import dense, sparse
from nanolib.models.attention.block_mask import BlockMask
from nanolib.models.attention.dynamic import CHOOSERS
from nanolib.models.attention.reference import masked_attention, relative_error
from nanolib.models.attention.sparse import choose_mask, forget_masks
from nanolib.run.case import Case, Ceilings, Measuring, Plan, Predicted
from nanolib.run.memory_plan import UNCOUNTED, Workload, memory_rows, plan_case, trace
from nanolib.run.peaks import rate_rows, roofline_ms

# 128 evenly spaced queries include a query of each row of tiles, if there are at most 127 rows.
_ERROR_ROWS = 128
_Inputs = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class AttentionCase(Case):
    """Case of one attention at one shape. Charts show the `name` of the case."""

    # All other factors describe the shape.
    VARIES = ("name", "attention_type", "options")

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
    def uses_flex(self) -> bool:
        """Whether FlexAttention computes the case: always for `flex`, sometimes for `sparse`."""
        if self.attention_type != "sparse":
            return self.attention_type == "flex"
        return sparse.uses_flex(
            self.device,
            getattr(torch, self.dtype),
            self.head_dim,
            self.seq_len,
            self._sparse_options.block_size,
        )

    @property
    def runs_code(self) -> bool:
        """Whether the user's code computes the attention or the mask."""
        return bool(self.options.keys() & {"call", "mask_mod"})

    @property
    def _sparse_options(self):
        return attention.parse_options(self.attention_type, self.options)

    @property
    def moved_bytes(self) -> int:
        """Size of q, k, v and the output together, in bytes."""
        row = self.batch_size * self.seq_len * self.head_dim * getattr(torch, self.dtype).itemsize
        return row * (2 * self.num_heads + 2 * self.num_kv_heads)

    @property
    def work(self) -> attention.Work | None:
        """Work of the kept query-key pairs, or None if the input or user code selects the pairs."""
        if self.runs_code:
            return None
        return attention.work(
            self.attention_type,
            self.seq_len,
            self.seq_len,
            causal=self.causal,
            options=self.options,
            heads=self.num_heads,
        )

    @property
    def is_baseline(self) -> bool:
        """Whether the attention is a dense kernel, and therefore a baseline."""
        return self.attention_type in ("dense", "flash_attn")

    def __str__(self) -> str:
        return f"{self.name} n={self.seq_len} batch={self.batch_size} {self.dtype}"

    def inputs(self, seed: int) -> _Inputs:
        """Return random q, k and v, shape [batch, heads, seq_len, head_dim] each."""
        generator = torch.Generator().manual_seed((seed + int(self.case_id, 16)) % 2**63)
        return tuple(
            torch.randn(
                self.batch_size, heads, self.seq_len, self.head_dim, generator=generator
            ).to(self.device, getattr(torch, self.dtype))
            for heads in (self.num_heads, self.num_kv_heads, self.num_kv_heads)
        )

    def attend(self, inputs: _Inputs) -> Tensor:
        """Run one forward pass."""
        if self.attention_type != "dense":
            dense.activate("")  # Another case may have replaced torch's flash kernels.
        return attention.attend(
            self.attention_type, *inputs, causal=self.causal, options=self.options
        )

    def workloads(self, *inputs: Tensor) -> Iterator[Workload]:
        """Yield a forward pass and, if requested, a forward pass with its backward pass."""

        def forward() -> Tensor:
            with torch.no_grad():
                return self.attend(inputs)

        yield Workload("forward", forward, lambda: inputs)
        if self.backward:
            if self.uses_flex:
                sparse.allow_repeated_backward()
            gradient = torch.empty_like(inputs[0])

            def both() -> tuple[Tensor, ...]:
                for x in inputs:
                    x.requires_grad_()
                return torch.autograd.grad(self.attend(inputs), inputs, gradient)

            yield Workload("forward_backward", both, lambda: (*inputs, gradient))

    def plan(self) -> Plan:
        """Return the plan of the peak memory, or the reason why no plan is possible."""
        if self.attention_type == "flex" and not self.device.startswith("cuda"):
            return Plan(reason=UNCOUNTED)
        if self.work is None:
            return Plan(reason="the memory depends on the input or on your own code")
        return plan_case(self, lambda: self.workloads(*self.inputs(0)))

    def formulas(self, ceilings: Ceilings | None = None) -> Predicted:
        """Predict bytes, FLOPs, sparsity and latency by formulas, without planning memory.

        Returns:
            `bytes` is the size of q, k, v and the output. If the mask is known, the result also
            contains `flops` (forward pass), `sparsity` and `block_sparsity`. If the peak rates are
            known too, the result contains `latency` in ms.
        """
        predicted = {"bytes": self.moved_bytes}
        if (work := self.work) is None:
            return predicted
        flops = work.flops(self.batch_size, self.num_heads, self.head_dim)
        predicted |= {
            "flops": flops,
            "sparsity": work.sparsity,
            "block_sparsity": work.block_sparsity,
        }
        latency = roofline_ms(flops, self.moved_bytes, self.dtype, ceilings or {})
        return predicted if latency is None else predicted | {"latency": latency}

    def unsupported_reason(self) -> str:
        """Return why this machine cannot run the case, or an empty string.

        nanolib tries the attention on a few tokens. It does not try `flex` or the user's code.
        """
        if self.attention_type == "flex":
            return sparse.flex_unsupported(self.device, self.backward, self._sparse_options.backend)
        if self.runs_code:
            return ""
        few = replace(self, seq_len=16, batch_size=1)
        try:
            with torch.set_grad_enabled(self.backward):
                few.attend(tuple(x.requires_grad_(self.backward) for x in few.inputs(0)))
        except Unsupported as error:
            return str(error)
        return ""

    def measure(self, params, ceilings: Ceilings) -> Measuring:
        """Measure work, memory and error, and time the calls in turns with other attentions."""
        inputs = self.inputs(params.seed)
        forward, *_ = self.workloads(*inputs)
        work, mask, flags = self.work, None, ()
        if self.attention_type in ("sparse", "flex"):
            mask = choose_mask(*inputs[:2], causal=self.causal, options=self._sparse_options)
            work = mask.work
            flags = () if work.sparsity else (Flag.MASK_IS_DENSE,)
            yield self._build_mask(inputs, params)
        first_ms = timed_call_ms(forward.call)
        yield self._error(forward.call(), inputs, mask)
        if work is not None:
            yield exact(
                "sparsity",
                work.sparsity,
                method="mask",
                predicted=self.options.get("sparsity"),
                flags=flags,
            )
            yield exact("block_sparsity", work.block_sparsity, method="mask")
        for workload in self.workloads(*inputs):
            workload.call()  # The first call may compile, and the memory must not include that.
            trace(workload, self, params)
            counted = not self.uses_flex or self.device.startswith("cuda")
            yield from memory_rows(workload, self.device, self.plan(), counted)
            scope, call, moved, factor = "forward", workload.call, self.moved_bytes, 1.0
            if workload.scope != "forward":
                # A backward pass reads q, k, v, the output and the gradient of the output. It
                # writes the gradients of q, k and v.
                scope, call, moved = "backward", self._backward_call(inputs), 2 * self.moved_bytes
                # Only the math backend stores the scores of the forward pass for the backward pass.
                keeps = self.options.get("backend") == "math"
                factor = BACKWARD_FACTOR if keeps else RECOMPUTING_BACKWARD_FACTOR
            yield exact("bytes", moved, scope=scope)
            timed = yield params.timing(self.device, {scope: call})
            latency = timed[scope]
            if work is not None:
                flops = round(factor * work.flops(self.batch_size, self.num_heads, self.head_dim))
                yield exact("flops", flops, scope=scope)
                latency = replace(
                    latency, predicted=roofline_ms(flops, moved, self.dtype, ceilings)
                )
                yield from rate_rows(latency, flops, self.dtype, ceilings)
            yield latency
            if scope == "forward":
                yield compile_row(first_ms, latency.estimate)
                if params.cold_cache:
                    name = "forward, cold"
                    cold = params.timing(self.device, {name: call}, cold=True)
                    yield replace(measure_phases(cold)[name], predicted=latency.predicted)

    def _build_mask(self, inputs: _Inputs, params) -> Measurement:
        """Time the building of a mask. `kept` is false if each forward pass builds a mask."""
        mask = {"causal": self.causal, "options": self._sparse_options, "by_flex": self.uses_flex}

        def build():
            forget_masks()
            choose_mask(*inputs[:2], **mask)

        timing = params.timing(self.device, {"mask": build}, budget_s=params.budget_s / 4)
        built = measure_phases(timing)["mask"]
        built.details["kept"] = self._sparse_options.pattern not in CHOOSERS
        return built

    def _backward_call(self, inputs: _Inputs) -> Callable[[], tuple[Tensor, ...]]:
        """Return a call that repeats the backward pass of one forward pass."""
        for x in inputs:
            x.requires_grad_()
        out = self.attend(inputs)
        gradient = torch.randn_like(out)

        def backward() -> tuple[Tensor, ...]:
            dense.activate(self.options.get("impl", ""))
            return torch.autograd.grad(out, inputs, gradient, retain_graph=True)

        return backward

    def _error(self, out: Tensor, inputs: _Inputs, block_mask: BlockMask | None) -> Measurement:
        """Compare outputs of the first sequence with float64 attention under the same mask."""
        n = self.seq_len
        rows = torch.linspace(0, n - 1, min(n, _ERROR_ROWS)).long().unique()
        if block_mask is None:
            mask = (torch.arange(n) <= rows[:, None]) | (not self.causal)
        else:
            heads = range(1 if block_mask.is_shared else self.num_heads)
            mask = torch.stack([block_mask.elements(0, head, rows) for head in heads])
        q, k, v, out = (x[:1].detach().cpu() for x in (*inputs, out))
        error = relative_error(out[:, :, rows], masked_attention(q[:, :, rows], k, v, mask))
        if not math.isfinite(error):
            raise ValueError("the output contains infinite values or NaN; correct the attention")
        method = f"float64 on {len(rows)} queries"
        return exact("relative_error", error, scope="forward", method=method)
