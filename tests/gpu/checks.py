"""Checks that several parts of the first minutes share: every check is an assertion that can fail."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pandas as pd

from tests.gpu.hardware import Hardware

LOSSES = {  # accident → what `sample_experiment` calls it, and the words of its message
    "memory": ("oom", "out of memory"),
    "assert": ("assert", "device-side assert"),
}


@dataclass(frozen=True)
class Check:
    """One assertion.

    Attributes:
        text: What must hold.
        found: What was found.
        holds: Whether it does; None where this machine cannot show it.
    """

    text: str
    found: str
    holds: bool | None


def near(text: str, found: float, wanted: float, share: float, unit: str) -> Check:
    return Check(
        text, f"{found:.4g} and {wanted:.4g} {unit}", abs(found - wanted) <= share * abs(wanted)
    )


def few(names: list[str]) -> str:
    return ", ".join(sorted(name[:60] for name in names)[:4]) or "none"


def every_case(name: str, rows: pd.DataFrame) -> Iterator[Check]:
    ends = rows[rows.metric == "case_duration"]
    wrong = ends[~ends.status.isin(["ok", "unsupported"])]
    said = (
        "; ".join(f"{row.factors} {row.status}: {row.message}" for row in wrong.itertuples())
        or f"{len(ends)} cases"
    )
    holds = wrong.empty and (ends.status == "ok").any()
    yield Check(f"{name}: every case runs, or says why it cannot", said[:1000], bool(holds))


def errors_below(text: str, rows: pd.DataFrame, scope: str, most: float) -> Iterator[Check]:
    errors = rows[(rows.metric == "relative_error") & (rows.scope == scope)].estimate
    found = f"at most {errors.max():.2g} in {len(errors)} rows"
    yield Check(
        f"{text}: the error is under {most:g}", found, bool(len(errors) and (errors < most).all())
    )


def shares_below_peak(name: str, rows: pd.DataFrame) -> Iterator[Check]:
    shares = rows[rows.metric == "mfu"].estimate
    found = f"at most {shares.max():.3f} in {len(shares)} rows"
    yield Check(
        f"{name}: no share of a ceiling is above 1.05",
        found,
        bool(len(shares) and (shares <= 1.05).all()),
    )


def accident(gpu: Hardware, accident: str, status: str) -> Iterator[Check]:
    behavior, words = LOSSES[accident]
    ends = gpu.run("sample", behaviors=[behavior, "ok"])
    ends = ends[ends.metric == "case_duration"]
    said = "; ".join(f"{row.status} {row.message}".strip() for row in ends.itertuples())
    lost = bool(ends.details.iloc[0].get("device_lost")) == (accident == "assert")
    text = f"{accident}: the case is {status}, says why, and the next one is ok"
    yield Check(
        text, said[:300], words in said.lower() and lost and list(ends.status) == [status, "ok"]
    )
