"""Checks that several parts of the first minutes share: every check is an assertion that can fail."""

from typing import NamedTuple


class Check(NamedTuple):
    """One assertion.

    Attributes:
        text: What must hold.
        found: What was found.
        holds: Whether it does; None where this machine cannot show it.
    """

    text: str
    found: str
    holds: bool | None


def near(text, found, wanted, share, unit):
    holds = abs(found - wanted) <= share * abs(wanted)
    return Check(text, f"{found:.4g} and {wanted:.4g} {unit}", bool(holds))


def at_most(text, values, most):
    found = f"at most {values.max():.3g} in {len(values)} rows"
    return Check(f"{text} is at most {most:g}", found, bool(len(values) and values.max() <= most))


def selected(rows, metric, scope):
    return rows[(rows.metric == metric) & (rows.scope == scope)]


def error_at_most(text, rows, scope, most):
    errors = selected(rows, "relative_error", scope)
    return at_most(f"{text}: the error", errors.estimate, most)


def shares_of_peak(name, rows):
    return at_most(f"{name}: each share of a ceiling", rows[rows.metric == "mfu"].estimate, 1.05)


def every_case(name, rows):
    ends = rows[rows.metric == "case_duration"]
    wrong = ends[~ends.status.isin(["ok", "unsupported"])]
    said = "; ".join(f"{row.factors} {row.status}: {row.message}" for row in wrong.itertuples())
    holds = wrong.empty and (ends.status == "ok").any()
    found = said[:1000] or f"{len(ends)} cases"
    return Check(f"{name}: every case runs, or says why it cannot", found, bool(holds))


def accident(gpu, behavior, status, words):
    """What `sample_experiment` calls an accident costs one case, whose message has the words."""
    ends = gpu.run("sample", behaviors=[behavior, "ok"])
    ends = ends[ends.metric == "case_duration"]
    said = "; ".join(f"{row.status} {row.message}".strip() for row in ends.itertuples())
    lost = bool(ends.details.iloc[0].get("device_lost")) == (behavior == "assert")
    text = f"{behavior}: the case is {status}, says why, and the next one is ok"
    holds = words in said.lower() and lost and list(ends.status) == [status, "ok"]
    return Check(text, said[:300], holds)
