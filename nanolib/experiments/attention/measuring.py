"""How one attention case is measured: time, memory, work and error, forward and backward."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from nanolib.experiments.attention.attention_case import AttentionCase, inputs_of, keeps_scores, plan, workloads_of
from nanolib.measurement import Measurement, exact
from nanolib.meters import measure
from nanolib.meters.flops import BACKWARD_FACTOR, RECOMPUTING_BACKWARD_FACTOR, count_flops
from nanolib.models import attention
from nanolib.models.attention.block_mask import BlockMask
from nanolib.models.attention.reference import causal_mask, masked_attention, relative_error
from nanolib.models.attention.sparse import build_mask, choose_mask
from nanolib.run.ceilings import rate_rows, roofline_ms
from nanolib.run.workload import (
    check_fits,
    compile_row,
    first_call_ms,
    memory_rows,
    trace,
)

_ERROR_ROWS = 128  # queries compared with float64: enough to find a wrong tile, few enough for a long sequence


def measure_attention(
    case: AttentionCase, params: Any, ceilings: dict[str, float], predicted: dict[str, float | str]
) -> Iterator[Measurement]:
    """The rows of one case: work, latency, rates, memory, error.

    Args:
        case: Which.
        params: The notebook's.
        ceilings: As `roofline_ms` takes them.
        predicted: What formulas say of it.

    Raises:
        WillNotFit: It needs more memory than is free.
    """
    check_fits(plan(case), case.device)
    q, k, v = inputs_of(case, params.seed)
    workloads = {work.scope: work for work in workloads_of(case, q, k, v)}
    timing = params.timing(case.device)
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
    case: AttentionCase, params: Any, inputs: tuple, flops: int, ceilings: dict[str, float]
) -> Iterator[Measurement]:
    for x in inputs:
        x.requires_grad_()
    out = attention.attend(case.attention_type, *inputs, causal=case.causal, options=case.options)
    gradient = torch.randn_like(out)

    def backward() -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(out, inputs, gradient, retain_graph=True)

    factor = BACKWARD_FACTOR if keeps_scores(case) else RECOMPUTING_BACKWARD_FACTOR
    work = round(factor * flops)
    yield exact("flops", work, scope="backward")
    moved = 2 * sum(x.nbytes for x in inputs) + 2 * out.nbytes  # read q, k, v, out, dout; write dq, dk, dv
    yield exact("bytes", moved, scope="backward")
    latency = measure(
        backward,
        scope="backward",
        predicted=roofline_ms(work, moved, case.dtype, ceilings),
        **params.timing(case.device),
    )
    yield latency
    yield from rate_rows(latency, work, case.dtype, ceilings)


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
