"""No sentence says more than its rows: advice, gains, losses and absences, each from both sides."""

import re

import numpy as np
import pandas as pd
import pytest

from nanolib.measurement import LEARNING_STEPS, METRICS, Flag
from tests.report.cases import (
    COMPUTING,
    DECODE,
    attention_case,
    decode_case,
    parity_case,
    quality_case,
    warmup_process,
)
from tests.report.contradictions import contradictions
from tests.report.rows import interval
from tests.shown import CHARTS, SECTIONS, VERDICTS


@pytest.mark.parametrize("removed", [0.0, 0.001])
def test_what_removes_nothing_is_dense_and_gains_nothing(say, measured, removed):
    dense = attention_case("dense", 9.9, 10, 10.1)
    cases = [dense, attention_case("window", 1.9, 2, 2.1, sparsity=removed)]
    text = "\n".join(say("attention", cases))
    assert ("The mask of window removes no pairs at " in text) == (not removed)
    assert ("Sparse attention is" in text) == bool(removed)
    drawn = str(CHARTS["attention_speed_up"](measured("attention", cases)).to_dict())
    assert ("no mask removes a pair" in drawn) == (not removed)


@pytest.mark.parametrize(("one_rank_ms", "advised"), [(9.0, False), (17.0, True)])
def test_more_ranks_are_advised_only_where_they_have_helped(say, one_rank_ms, advised):
    alone = (one_rank_ms - 0.1, one_rank_ms, one_rank_ms + 0.1)
    case = decode_case({"fused": ((8.9, 9, 9.1), COMPUTING)}, world=2, alone=alone)
    text = "\n".join(say("distributed", [case]))
    assert ("Next: add a larger number to world_sizes" in text) == advised


@pytest.mark.parametrize(("cold_ms", "said"), [(12.5, True), (10.4, False)])
def test_no_warm_up_is_not_said_beside_a_mean_that_needs_it(say, cold_ms, said):
    times = {0: (cold_ms, cold_ms), 5: (10.0, 10.0)}
    first = say("warmup", [warmup_process("forward", at, times, needed=0.0) for at in range(5)])[0]
    assert (
        "but the mean is 25% higher without warm-up" in first and "Use 5 warm-up steps" in first
    ) == said


@pytest.mark.parametrize("steps", [LEARNING_STEPS - 1, LEARNING_STEPS])
def test_runs_too_short_to_learn_are_smoke_tests(say, measured, steps):
    short, losses = steps < LEARNING_STEPS, {"replaced": (0.1, 0.2, 0.3)}
    parity = say("fp8", [parity_case("fp8_rowwise", "equivalent", 0.0, steps=steps)])
    cases = [attention_case("dense", 9.9, 10, 10.1), quality_case(0.5, losses, steps)]
    quality = say("attention", cases)
    for lines, claim in ((parity, "equivalent to bf16"), (quality, "increases the loss")):
        text = "\n".join(lines)
        assert ("a smoke test" in text) == short == (claim not in text)
    drawn = str(CHARTS["attention_quality"](measured("attention", cases)).to_dict())
    assert ("a smoke test" in drawn) == short


@pytest.mark.parametrize(("low", "nothing"), [(-0.5, True), (0.0, True), (0.5, False)])
def test_an_overhead_that_may_be_zero_makes_no_clear_difference(say, low, nothing):
    details = {"cpu": [0.0, 0.01, 0.02], "plain_ms": 4, "detailed_ms": 8}
    row = interval("overhead", low / 100, 0.02, 0.04, scope="decode deep", details=details)
    (line,) = (line for line in say("energy", [(DECODE, [row])]) if "overhead" in line)
    assert ("(no clear difference) in mode deep" in line) == nothing


_ORDER = re.compile(
    r"faster than|slower than|fastest|slowest|as fast as|no clear difference"
    r"|compute-bound(?! in \d)|communication-bound|limited by waiting"
    r"|is higher|is lower|profiling overhead",
    re.IGNORECASE,
)


def _busy(rows):
    # stored rows may have metrics that nanolib no longer makes
    timed = [name in METRICS and METRICS[name].is_timed for name in rows["metric"]]
    flags = [
        [*flags, Flag.BUSY_MACHINE.value] if one else flags
        for flags, one in zip(rows["flags"], timed, strict=True)
    ]
    return rows.assign(flags=flags)


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.experiment)
def test_no_section_orders_timings_that_others_disturbed(section, stored):
    quiet, busy = (VERDICTS[section.experiment](rows) for rows in (stored, _busy(stored)))
    assert len(busy) <= 5 and not [line for line in busy if _ORDER.search(line)]
    orders = any(_ORDER.search(line) for line in quiet)
    assert any("so nanolib does not rank these estimates" in line for line in busy) == orders


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


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.experiment)
def test_no_finding_contradicts_its_rows(section, stored):
    rng, numbered = np.random.default_rng(0), stored.reset_index(drop=True)
    for _ in range(8):
        runs = [_redrawn(numbered, rng).assign(run_id=name) for name in ("first", "second")]
        rows = pd.concat(runs, ignore_index=True)
        for finding in section.verdict(rows):
            assert not [*contradictions(finding, rows)], str(finding)
