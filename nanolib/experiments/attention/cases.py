"""When does sparse attention pay on this machine? Latency, memory, FLOPs and error of attention kinds over sequence lengths."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import pydantic
import torch

from nanolib.experiments.attention.sparse_quality import QUALITY_PATTERNS, QualityCase, measure_quality, quality_cases
from nanolib.measurement import BadInput, Measurement, Unsupported, exact, shown
from nanolib.meters import measure
from nanolib.meters.flops import BACKWARD_FACTOR, RECOMPUTING_BACKWARD_FACTOR, count_flops
from nanolib.meters.machine import resolve_device
from nanolib.meters.memory import MIB
from nanolib.models import attention
from nanolib.models.attention.block_mask import BlockMask
from nanolib.models.attention.reference import causal_mask, masked_attention, relative_error
from nanolib.models.attention.sparse import build_mask, choose_mask
from nanolib.run import params as shared
from nanolib.run.ceilings import CeilingCase, ceiling_cases, rate_rows, roofline_ms
from nanolib.run.params import MAX_SEQ_LEN, Case, distinct, known_dtypes
from nanolib.run.workload import (
    UNCOUNTED,
    Plan,
    Workload,
    check_fits,
    compile_row,
    first_call_ms,
    memory_rows,
    planned,
    trace,
)

_ERROR_ROWS = 128  # queries compared with float64: enough to find a wrong tile, few enough for a long sequence

Size = pydantic.PositiveInt


class Params(shared.Params):
    """Parameters of the attention notebook.

    Attributes:
        seq_lens: Sequence lengths, tokens.
        batch_sizes: Sequences per batch.
        attention_types: Attention kinds, each `{kind: dense, backend: flash}` or `{kind: sparse, pattern: window, ...}`; a
            bare name stands for the kind with its defaults.
        dtypes: Types of q, k and v.
        num_heads: Query heads.
        num_kv_heads: Key and value heads; divides `num_heads`; 0 means as many.
        head_dim: Width of a head.
        causal: Whether the future is masked.
        backward: Whether to measure the backward pass too.
        quality_patterns: Sparse patterns that take the place of a trained decoder's dense attention; none for no such cases.
        quality_sparsities: Shares of connections that they remove there.
        quality_seq_len: Tokens that the decoder sees.
        quality_block_size: Side of a tile there; small, since the sequences are short.
        quality_seeds: Decoders trained, each from weights of its own; the interval is over them.
        quality_steps: Steps of training before the attention is replaced.
        quality_tuning_steps: Steps of training after it, of both.
        quality_d_model: Width of the decoder.
        quality_layers: Its blocks.
    """

    NAME: ClassVar[str] = "attention"
    RENAMED: ClassVar = {**shared.Params.RENAMED, "kinds": "attention_types"}

    seq_lens: list[int] = pydantic.Field([128, 256], min_length=1, max_length=64)
    batch_sizes: list[int] = pydantic.Field([1], min_length=1, max_length=64)
    attention_types: list[dict[str, Any]] = pydantic.Field(
        [{"kind": "dense"}, {"kind": "sparse"}], min_length=1, max_length=64
    )
    dtypes: list[str] = pydantic.Field(["float32"], min_length=1)
    grids: ClassVar = (("seq_lens", "batch_sizes", "dtypes", "attention_types"),)
    num_heads: int = pydantic.Field(8, gt=0, le=4096)
    num_kv_heads: int = pydantic.Field(0, ge=0, le=4096)
    head_dim: int = pydantic.Field(64, gt=0, le=4096)
    causal: bool = True
    backward: bool = True
    quality_patterns: list[str] = pydantic.Field([], max_length=64)
    quality_sparsities: list[float] = pydantic.Field([0.5, 0.75, 0.9], min_length=1, max_length=64)
    quality_seq_len: int = pydantic.Field(128, ge=16, le=65_536)
    quality_block_size: int = pydantic.Field(16, gt=0, le=4096)
    quality_seeds: int = pydantic.Field(5, ge=2, le=1000)
    quality_steps: int = pydantic.Field(150, ge=1, le=1_000_000)
    quality_tuning_steps: int = pydantic.Field(20, ge=1, le=1_000_000)
    quality_d_model: int = pydantic.Field(128, ge=8, multiple_of=8, le=65_536)
    quality_layers: int = pydantic.Field(2, gt=0, le=1000)

    _dtypes = pydantic.field_validator("dtypes")(known_dtypes)
    _distinct = pydantic.field_validator(
        "seq_lens", "batch_sizes", "attention_types", "dtypes", "quality_patterns", "quality_sparsities"
    )(distinct)

    @pydantic.field_validator("quality_patterns")
    @classmethod
    def _patterns_exist(cls, values: list[str]) -> list[str]:
        for value in values:
            if value not in QUALITY_PATTERNS:
                raise ValueError(f"{shown(value)} is no pattern; use {', '.join(QUALITY_PATTERNS)}")
        return values

    @pydantic.field_validator("quality_sparsities")
    @classmethod
    def _shares(cls, values: list[float]) -> list[float]:
        for value in values:
            if not 0 < value < 1:
                raise ValueError(f"{value} will not do; give shares of connections to remove, between 0 and 1")
        return values

    @pydantic.field_validator("attention_types", mode="before")
    @classmethod
    def _spell_out(cls, values: Any) -> Any:
        values = [values] if isinstance(values, dict | str) else values
        if not isinstance(values, list | tuple):
            return values
        return [{"kind": value} if isinstance(value, str) else value for value in values]

    @pydantic.field_validator("attention_types")
    @classmethod
    def _kinds_exist(cls, values: list[dict[str, Any]]) -> list[dict[str, Any]]:
        for value in values:
            if "kind" not in value:
                raise ValueError(f"{shown(value)} names no kind; give kind: one of {', '.join(attention.kinds())}")
            try:
                attention.parse_options(value["kind"], _options(value))
            except BadInput as error:
                raise ValueError("; ".join(error.lines)) from None
        return values

    @pydantic.field_validator("seq_lens", "batch_sizes")
    @classmethod
    def _sizes(cls, values: list[int]) -> list[int]:
        for value in values:
            if not 0 < value <= MAX_SEQ_LEN:
                raise ValueError(f"{value} will not do; give whole numbers from 1 to {MAX_SEQ_LEN}")
        return values

    @pydantic.model_validator(mode="after")
    def _heads_divide(self) -> Self:
        if self.num_kv_heads and self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_kv_heads: {self.num_kv_heads} does not divide num_heads {self.num_heads}; use a divisor"
            )
        return self


def _options(kind: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in kind.items() if name != "kind"}


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
        "threshold": (parsed.top_p,),
    }.get(parsed.pattern, (parsed.window,))
    return f"{prefix}{parsed.pattern} {'+'.join(f'{size:g}' for size in sizes)}"


def cases(params: Params) -> list[Case]:
    """The ceilings, then every kind at every shape, short sequences first, then what patterns do to a trained model."""
    device = resolve_device(params.device)
    grid = [
        AttentionCase(
            device,
            kind_name(kind["kind"], _options(kind)),
            kind["kind"],
            _options(kind),
            seq_len,
            batch_size,
            dtype,
            params.num_heads,
            params.num_kv_heads or params.num_heads,
            params.head_dim,
            params.causal,
            params.backward,
        )
        for seq_len in params.seq_lens
        for batch_size in params.batch_sizes
        for dtype in params.dtypes
        for kind in params.attention_types
    ]
    quality = {
        "seq_len": params.quality_seq_len,
        "block_size": params.quality_block_size,
        "seeds": params.quality_seeds,
        "steps": params.quality_steps,
        "tuning_steps": params.quality_tuning_steps,
        "d_model": params.quality_d_model,
        "num_layers": params.quality_layers,
    }
    return [
        *ceiling_cases(device, params.dtypes, params.budget_s),
        *grid,
        *quality_cases(device, params.quality_patterns, params.quality_sparsities, quality),
    ]


def predict(case: Case, ceilings: dict[str, float] | None = None) -> dict[str, float | str]:
    """What formulas say before anything runs.

    Args:
        case: An `AttentionCase`; a ceiling has no prediction.
        ceilings: As `roofline_ms` takes them; without them no time is predicted.

    Returns:
        `bytes` (q, k, v and out once), `peak_memory` (MiB, of forward and backward) where it can be planned; unless the pattern
        follows the input, `flops` (FLOP, forward), `sparsity`, `block_sparsity`, and `latency` (ms, roofline) where the ceilings
        are known.
    """
    if not isinstance(case, AttentionCase):
        return {}
    moved = case.moved
    predicted: dict[str, float | str] = {"bytes": moved}
    if (most := plan(case).most) is not None:
        predicted["peak_memory"] = most / MIB
    work = case.work
    if work is None:  # how much is kept depends on the input: there is nothing to predict from
        return predicted
    flops = work.flops(case.batch_size, case.num_heads, case.head_dim)
    predicted |= {"flops": flops, "sparsity": work.sparsity, "block_sparsity": work.block_sparsity}
    if (latency := roofline_ms(flops, moved, case.dtype, ceilings or {})) is not None:
        predicted["latency"] = latency
    return predicted


def unsupported(case: Case) -> str:
    """Why this machine cannot run the case, found by a call on a few tokens; empty when it can."""
    if not isinstance(case, AttentionCase):
        return ""
    few = dataclasses.replace(case, seq_len=16, batch_size=1)
    try:
        with torch.set_grad_enabled(case.backward):
            inputs = tuple(x.requires_grad_(case.backward) for x in _inputs(few, 0))
            attention.attend(case.attention_type, *inputs, causal=case.causal, options=case.options)
    except Unsupported as error:
        return str(error)
    return ""


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
        return list(_workloads(case, *inputs))

    return planned(case, workloads)


def _workloads(case: AttentionCase, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Iterator[Workload]:
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


def measure_case(case: Case, params: Params, ceilings: dict[str, float]) -> Iterator[Measurement]:
    """The rows of one case: work, latency, rates, memory, error."""
    if isinstance(case, CeilingCase):
        yield from case.measure()
        return
    if isinstance(case, QualityCase):
        yield from measure_quality(case)
        return
    if case.backward and (reason := unsupported(case)):
        raise Unsupported(reason)
    check_fits(plan(case), case.device)
    q, k, v = _inputs(case, params.seed)
    workloads = {work.scope: work for work in _workloads(case, q, k, v)}
    timing = {"rel_ci": params.rel_ci, "budget_s": params.budget_s, "device": case.device}
    mask = None
    if case.masked:
        options = attention.parse_options(case.attention_type, case.options)
        mask = choose_mask(q, k, causal=case.causal, options=options)
        few = timing | {"budget_s": params.budget_s / 4}  # it is paid once, or hides behind the attention
        yield measure(lambda: build_mask(q, k, causal=case.causal, options=options), scope="mask", **few)
    forward = workloads["forward"].call
    first_ms = first_call_ms(forward) if case.attention_type == "flex" else 0.0  # nothing else is compiled
    out = forward()
    yield _error(case, out, q, k, v, mask)
    if mask is not None:
        yield from _against_dense(case, out, q, k, v)
    predicted = predict(case, ceilings)
    work = mask.work if mask is not None else case.work
    flops = work.flops(case.batch_size, case.num_heads, case.head_dim)
    yield exact("sparsity", work.sparsity, method="mask")
    yield exact("block_sparsity", work.block_sparsity, method="mask")
    yield exact("flops", flops, scope="forward")
    yield exact("flops", count_flops(forward), scope="forward", method="flop_counter", predicted=flops)
    yield exact("bytes", case.moved, scope="forward")
    latency = measure(forward, scope="forward", predicted=predicted.get("latency"), **timing)
    yield latency
    if case.attention_type == "flex":
        yield compile_row(first_ms, latency.estimate)
    yield from rate_rows(latency, flops, case.dtype, ceilings)
    if case.backward:
        yield from _measure_backward(case, params, (q, k, v), flops, ceilings)
    for each in workloads.values():
        counted = case.attention_type != "flex" or case.device.startswith("cuda")
        trace(each, case, params)
        yield from memory_rows(each, case.device, plan(case), counted)


def _measure_backward(
    case: AttentionCase, params: Params, inputs: tuple, flops: int, ceilings: dict[str, float]
) -> Iterator[Measurement]:
    for x in inputs:
        x.requires_grad_()
    out = attention.attend(case.attention_type, *inputs, causal=case.causal, options=case.options)
    gradient = torch.randn_like(out)

    def backward() -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(out, inputs, gradient, retain_graph=True)

    factor = BACKWARD_FACTOR if _keeps_scores(case) else RECOMPUTING_BACKWARD_FACTOR
    work = round(factor * flops)
    yield exact("flops", work, scope="backward")
    moved = 2 * sum(x.nbytes for x in inputs) + 2 * out.nbytes  # read q, k, v, out, dout; write dq, dk, dv
    yield exact("bytes", moved, scope="backward")
    latency = measure(
        backward,
        rel_ci=params.rel_ci,
        budget_s=params.budget_s,
        device=case.device,
        scope="backward",
        predicted=roofline_ms(work, moved, case.dtype, ceilings),
    )
    yield latency
    yield from rate_rows(latency, work, case.dtype, ceilings)


def _keeps_scores(case: AttentionCase) -> bool:
    """The math backend keeps the weights for the backward pass; all others compute the scores again."""
    return case.attention_type == "dense" and case.options.get("backend") == "math"


def _inputs(case: AttentionCase, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Random q, k, v, drawn afresh for the case."""
    generator = torch.Generator().manual_seed((seed + int(case.case_id, 16)) % 2**63)

    def draw(heads: int) -> torch.Tensor:
        x = torch.randn(case.batch_size, heads, case.seq_len, case.head_dim, generator=generator)
        return x.to(case.device, getattr(torch, case.dtype))

    return draw(case.num_heads), draw(case.num_kv_heads), draw(case.num_kv_heads)


def _error(
    case: AttentionCase,
    out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    block_mask: BlockMask | None,
) -> Measurement:
    """The kernel against float64 with the same mask, on evenly spread queries of the first sequence."""
    n = case.seq_len
    rows = torch.linspace(0, n - 1, min(n, _ERROR_ROWS)).long().unique()
    if block_mask is not None:
        heads = 1 if block_mask.shared else case.num_heads
        mask = torch.stack([block_mask.elements(head, rows.tolist()) for head in range(heads)])
    else:
        mask = causal_mask(n, n)[rows] if case.causal else torch.ones(len(rows), n, dtype=torch.bool)
    q, k, v, out = (x[:1].detach().cpu() for x in (q, k, v, out))
    reference = masked_attention(q[:, :, rows], k, v, mask)
    error = relative_error(out[:, :, rows], reference)
    return exact("relative_error", error, scope="forward", method=f"float64 on {len(rows)} queries")


def _against_dense(
    case: AttentionCase, out: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> Iterator[Measurement]:
    """How far the sparse result lies from dense attention on these inputs, which are random: no word on what it does to a model."""
    with torch.no_grad():
        dense = attention.attend("dense", q, k, v, causal=case.causal)
    yield exact("relative_error", relative_error(out, dense), scope="against_dense", method="random inputs")
    cosine = torch.nn.functional.cosine_similarity(out.flatten().double(), dense.flatten().double(), dim=0)
    yield exact("cosine", float(cosine), scope="against_dense", method="random inputs")
