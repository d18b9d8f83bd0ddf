"""No sentence says more than its rows: smoke tests, busy machines, and rows drawn at random."""

import re

import numpy as np
import pandas as pd
import pytest

from nanolib.measurement import LEARNING_STEPS, METRICS, Flag
from tests.report.cases import attention_case, parity_case, quality_case
from tests.report.contradictions import contradictions
from tests.report.rows import points
from tests.shown import CHARTS, SECTIONS, VERDICTS


@pytest.mark.parametrize("steps", [LEARNING_STEPS - 1, LEARNING_STEPS])
def test_runs_too_short_to_learn_are_smoke_tests(measured, steps):
    short = steps < LEARNING_STEPS
    parity = measured("fp8", [parity_case("fp8_rowwise", "equivalent", 0.0, steps=steps)])
    cases = [attention_case("dense", 9.9, 10, 10.1), quality_case(0.5, (0.1, 0.2, 0.3), steps)]
    quality = measured("attention", cases)
    for experiment, rows, claim in (
        ("fp8", parity, "equivalent to bf16"),
        ("attention", quality, "increases the loss"),
    ):
        text = "\n".join(VERDICTS[experiment](rows))
        assert ("a smoke test" in text) == short == (claim not in text)
    assert points(CHARTS["attention_quality"](quality), "sure") == [(not short,)]
    assert points(CHARTS["fp8_parity"](parity), "sure") == [(not short,)]


_ORDER = re.compile(
    r"faster than|slower than|fastest|slowest|as fast as|no clear difference(?! to the loss)"
    r"|is higher|is lower|profiling overhead",
    re.IGNORECASE,
)


def _busy(rows):
    return rows.assign(
        flags=[
            [*row.flags, Flag.BUSY_MACHINE.value] if METRICS[row.metric].is_timed else row.flags
            for row in rows.itertuples()
        ]
    )


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.experiment)
def test_no_section_orders_timings_that_others_disturbed(section, stored):
    quiet, busy = (VERDICTS[section.experiment](rows) for rows in (stored, _busy(stored)))
    assert len(busy) <= 5 and not [line for line in busy if _ORDER.search(line)]
    if any(_ORDER.search(line) for line in quiet):
        assert any("so nanolib does not rank these estimates" in line for line in busy)


# Metrics whose intervals are drawn at random → what they are when nothing differs, less one.
_DRAWN = {"latency": 0, "component_time": 0, "speed_up": 0, "loss_difference": -1, "overhead": -1}


def _redrawn(rows, rng):
    """The rows with few enough values that ends touch, and now and then ends that are not known."""
    ends, steps = ["low", "estimate", "high"], rows["factor.steps"]
    rows = rows.assign(**{"factor.steps": steps.mask(steps.notna(), LEARNING_STEPS)})
    timed = rows.index[rows["low"].notna() & rows["metric"].isin([*_DRAWN])]
    values = np.sort(rng.integers(1, 25, (len(timed), 3)), axis=1) / 12
    rows.loc[timed, ends] = values + rows.loc[timed, "metric"].map(_DRAWN).to_numpy()[:, None]
    rows.loc[rng.choice(timed, len(timed) // 10), ["low", "high"]] = np.nan
    return rows


@pytest.mark.parametrize("draws", [3, pytest.param(30, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.experiment)
def test_no_finding_contradicts_its_rows(section, draws, stored):
    rng = np.random.default_rng(0)
    own = stored[stored["experiment"] == section.experiment].reset_index(drop=True)
    for _ in range(draws):
        runs = [_redrawn(own, rng).assign(run_id=name) for name in ("first", "second")]
        rows = pd.concat(runs, ignore_index=True)
        for finding in section.verdict(rows):
            assert not [*contradictions(finding, rows)], str(finding)
