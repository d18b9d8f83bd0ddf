"""What would lower the peak of a training step: planned first, then measured beside the step as it is, in turns."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from nanolib.experiments.model.model_cases import ModelCase, ShapedCase, model_name, text_batch
from nanolib.measurement import Measurement, exact
from nanolib.meters import measure_phases
from nanolib.meters.memory import MIB, peak_memory
from nanolib.models.optimise import unsupported as unsupported_on
from nanolib.models.user import missing
from nanolib.run.case import Plan
from nanolib.run.workload import planned_by_depth
from nanolib.stats.intervals import Interval, TooFewSamples
from nanolib.stats.signed_ranks import hodges_lehmann

AS_IT_IS, CHANGED = "as_it_is", "changed"
_TURNS = 4  # times the budget of one timing: a pair takes two steps, and six pairs are the fewest that give an interval
_STATES = {"adamw": 2, "momentum": 1, "sgd": 0}  # tensors per weight that an optimizer keeps


@dataclass(frozen=True)
class Remedy:
    """One change of a training step that holds less.

    Attributes:
        title: For people.
        optimisation: A key of `OPTIMISATIONS`.
        dtype: Of the weights; empty for that of the step as it is.
        optimizer: A key of `OPTIMIZERS`.
        batch_divisor: The batch is so many times smaller.
    """

    title: str
    optimisation: str = "eager"
    dtype: str = ""
    optimizer: str = "adamw"
    batch_divisor: int = 1


REMEDIES: dict[str, Remedy] = {
    "checkpoint": Remedy("checkpoint all blocks", optimisation="checkpoint"),
    "checkpoint_half": Remedy("checkpoint the first half of the blocks", optimisation="checkpoint_half"),
    "half_batch": Remedy("half the batch", batch_divisor=2),
    "bfloat16": Remedy("bfloat16", dtype="bfloat16"),
    "momentum": Remedy("SGD with momentum in place of AdamW", optimizer="momentum"),
    "sgd": Remedy("SGD in place of AdamW", optimizer="sgd"),
}


@dataclass(frozen=True)
class RemedyCase(ShapedCase):
    """A model's training step as it is and with one change, in turns: what that saves and what it costs."""

    remedy: str

    @property
    def changed(self) -> ModelCase:
        """The step that does, but for its optimizer."""
        change = REMEDIES[self.remedy]
        return dataclasses.replace(
            self.training_step(),
            name=model_name(self.preset, self.overrides, change.optimisation),
            optimisation=change.optimisation,
            dtype=change.dtype or self.dtype,
            batch_size=self.batch_size // change.batch_divisor,
        )

    def __str__(self) -> str:
        """The model, its shape and the change."""
        return f"{self.name} n={self.seq_len} batch={self.batch_size} {self.dtype}: {REMEDIES[self.remedy].title}"

    def unsupported(self) -> str:
        """Why it cannot be tried here."""
        if self.batch_size % REMEDIES[self.remedy].batch_divisor:
            return f"a batch of {self.batch_size} cannot be halved; give an even one, such as batch_sizes: [2]"
        if self.own and not self.runs_code and (reason := missing(self.preset)):
            return reason
        return unsupported_on(REMEDIES[self.remedy].optimisation, self.device)

    def plan(self) -> Plan:
        """Both peaks; and the larger one beside what the other step holds while it waits."""
        if self.unsupported():
            return Plan()
        plans = [self.training_step().plan(), self._plan_changed()]
        if reason := next((plan.reason for plan in plans if plan.reason), ""):
            return Plan(reason=reason, unsupported=next((plan.unsupported for plan in plans if plan.unsupported), ""))
        before, after = (plan.peaks["training_step"] for plan in plans)
        return Plan(
            {
                AS_IT_IS: before,
                CHANGED: after,
                "both": max(before + self._waiting(self.changed), after + self._waiting(self.training_step())),
            }
        )

    def _waiting(self, case: ModelCase) -> int:
        states = _STATES[REMEDIES[self.remedy].optimizer if case == self.changed else "adamw"]
        return case.parameter_count * getattr(torch, case.dtype).itemsize * (1 + states)

    def _plan_changed(self) -> Plan:
        case, optimizer = self.changed, REMEDIES[self.remedy].optimizer
        if optimizer == "adamw":
            return case.plan()
        if reason := case.not_planned():
            return Plan(reason=reason)
        at = functools.partial(case.at_depth, optimizer=optimizer)
        return planned_by_depth(dataclasses.replace(self, name=""), case.depth, at)

    def formulas(self, ceilings: dict[str, float] | None = None) -> dict[str, Any]:
        """The bytes of its weights."""
        found = self.changed.formulas() if not self.unsupported() else {}
        return {name: found[name] for name in ("footprint",) if name in found}

    def predict(self, ceilings: dict[str, float] | None = None) -> dict[str, float | str]:
        """Also its `peak_memory`, MiB, and its share of the peak as it is."""
        peaks = self.plan().peaks
        if not peaks:
            return self.formulas()
        share = peaks[CHANGED] / peaks[AS_IT_IS]
        return self.formulas() | {"peak_memory": peaks[CHANGED] / MIB, "of the peak as it is": round(share, 4)}

    def measure(self, params: Any, ceilings: dict[str, float]) -> Iterator[Measurement]:
        """Times of both, their ratio per token, and both peaks."""
        cases = {AS_IT_IS: self.training_step(), CHANGED: self.changed}
        optimizers = {AS_IT_IS: "adamw", CHANGED: REMEDIES[self.remedy].optimizer}
        steps = {
            scope: case.step(
                case.build(params.seed),
                text_batch(case, params.corpus, params.seed),
                params.learning_rate,
                optimizers[scope],
            )
            for scope, case in cases.items()
        }
        timing = params.timing(self.device)
        timings = measure_phases(steps, **timing | {"budget_s": _TURNS * timing["budget_s"]})
        yield timings[AS_IT_IS]
        yield timings[CHANGED]
        yield _ratio(timings[AS_IT_IS], timings[CHANGED], REMEDIES[self.remedy].batch_divisor)
        planned = self.plan().peaks
        for scope, step in steps.items():
            (work,) = step.workloads()
            existing = tuple(work.existing())
            with peak_memory(self.device, *existing) as peak:
                step()
            predicted = planned[scope] / MIB if planned else None
            yield exact("peak_memory", peak.own / MIB, scope=scope, method=peak.method, predicted=predicted)


def _ratio(before: Measurement, after: Measurement, batches: int) -> Measurement:
    """Time per token of the changed step over that of the one as it is, of steps that ran in turns."""
    each = max(1, int(before.details["calls_per_block"]))
    blocks = [
        np.median(np.reshape(row.samples[row.details["warmup_cut"] :], (-1, each)), axis=1) for row in (before, after)
    ]
    logs = np.log(blocks[1] * batches / blocks[0])
    try:
        found = hodges_lehmann(logs)
    except TooFewSamples:
        found = Interval(float("nan"), float(np.median(logs)), float("nan"))
    low, estimate, high = (None if np.isnan(end) else float(np.exp(end)) for end in found)
    return Measurement(
        "ratio",
        estimate,
        low,
        high,
        0.95 if low is not None else None,
        n=len(logs),
        samples=tuple(np.exp(logs).tolist()),
        method="interleaved_pairs",
        scope=CHANGED,
        flags=after.flags,
    )
