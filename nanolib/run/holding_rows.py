"""Who holds the memory of a call, as rows: its peak, and each kind's share of it beside the plan's."""

from __future__ import annotations

import gc

from torch import nn

from nanolib.measurement import Held, Measurement, exact
from nanolib.meters.holders import Holding
from nanolib.meters.memory import MIB, measure_memory, resident_row
from nanolib.run.case import Plan
from nanolib.run.workload import UNCOUNTED, Workload, followed, memory_rows


def holding_rows(
    work: Workload, model: nn.Module, device: str, plan: Plan, foreseen: Holding | None
) -> list[Measurement]:
    """The peak of one call and what fills it, kind by kind; they add up to it.

    On a GPU the peak is the allocator's, and what it holds beyond the live tensors is a kind of its own, `unattributed`.

    Args:
        work: Whose tensors are known by kind.
        model: Whose modules are named.
        device: Where it computes.
        plan: What was planned of the peak.
        foreseen: What was planned of its parts; None where nobody knows.

    Returns:
        `peak_memory`, whose details hold its parts and the peak of each phase, bytes; `reserved_memory` or
        `resident_memory`; and `memory_part` by kind, MiB.
    """
    work.first()  # counted from where the plan was
    gc.collect()
    counter = followed(work, model)
    holdings = counter.holdings()
    holding = max(holdings.values(), key=lambda held: held.peak)
    details = {
        "parts": [[*part, size] for part, size in holding.largest(len(holding.parts))],
        "phases": {phase: held.peak for phase, held in holdings.items() if phase is not None},
    }
    kinds = holding.by_kind
    predicted = plan.peaks.get(work.scope)
    if device.startswith("cuda"):
        work.first()
        existing = tuple(work.existing())
        peak, *others = measure_memory(
            work.call, device=device, existing=existing, scope=work.scope, predicted_bytes=predicted
        )
        kinds[Held.UNATTRIBUTED] = max(0, round(peak.estimate * MIB) - holding.peak)
        peak.details.update(details)
    else:
        said = {
            "scope": work.scope,
            "method": "live_tensor_bytes",
            "details": {"before": counter.existing / MIB} | details,
        }
        peak = exact(
            "peak_memory",
            holding.peak / MIB,
            predicted=None if predicted is None else predicted / MIB,
            **said,
        )
        work.first()
        others = [resident_row(work.call, work.scope)]
    planned = foreseen.by_kind if foreseen else {}
    parts = [
        exact(
            "memory_part",
            size / MIB,
            scope=f"{work.scope}: {kind}",
            method=peak.method,
            predicted=planned.get(kind, 0) / MIB if planned and kind != Held.UNATTRIBUTED else None,
        )
        for kind, size in {**dict.fromkeys(planned, 0), **kinds}.items()
    ]
    return [peak, *others, *parts]


def unattributed_rows(work: Workload, device: str, plan: Plan) -> list[Measurement]:
    """The memory of a call whose tensors are born where no counter sees them: of its resident peak nobody knows what fills it."""
    refused, resident = memory_rows(work, device, plan, counted=False)
    of = f"{work.scope}: {Held.UNATTRIBUTED}"
    message = f"{UNCOUNTED}, so its parts are not known"
    told = {
        "n": resident.n,
        "method": resident.method,
        "status": resident.status,
        "message": message,
    }
    return [refused, resident, Measurement("memory_part", resident.estimate, scope=of, **told)]
