"""No sentence says more than its rows: advice, gains, losses and absences, each from both sides."""

import itertools
import re

import pytest
from hypothesis import HealthCheck, Phase, Verbosity, given, settings

from nanolib.experiments import ALL
from nanolib.experiments.attention.findings import attention_table
from nanolib.measurement import LEARNING_STEPS, METRICS, Flag, exact
from nanolib.report.finding import Estimate
from tests.measuring import rows_of
from tests.report.cases import (
    COMPUTING,
    attention_case,
    decode_case,
    overhead_case,
    parity_case,
    quality_case,
)
from tests.report.generated import contradictions, databases
from tests.report.rows import warmup_process
from tests.shown import CHARTS, SECTIONS, VERDICTS


@pytest.mark.parametrize("removed", [0.0, 0.001])
def test_what_removes_nothing_is_dense_and_gains_nothing(say, measured, removed):
    factors, found = attention_case("window", 1.9, 2, 2.1)
    found = [row for row in found if row.metric != "sparsity"] + [
        exact("sparsity", removed, method="mask")
    ]
    cases = [attention_case("dense", 9.9, 10, 10.1), (factors, found)]
    text = "\n".join(say("attention", cases))
    assert (
        ("The mask of window removes nothing at " in text)
        == (not removed)
        == ("Sparse attention is" not in text)
    )
    drawn = str(CHARTS["attention_speed_up"](measured("attention", cases)).to_dict())
    assert ("sparse attention was not timed in turns" in drawn) == (not removed)


@pytest.mark.usefixtures("small_ceilings")
def test_a_mask_that_removes_nothing_is_flagged_beside_what_was_asked(tmp_path):
    shape = {
        "seq_lens": [96],
        "num_heads": 1,
        "head_dim": 8,
        "quality_patterns": [],
        "backward": False,
        "device": "cpu",
    }
    sparse = {"kind": "sparse", "pattern": "top_k", "sparsity": 0.75}
    kinds = [{"kind": "dense", "backend": "flash"}]
    kinds += [sparse | {"block_size": size} for size in (128, 8)]  # one block, and twelve
    params = ALL["attention"]().Params(attention_types=kinds, budget_s=0.01, rel_ci=0.5, **shape)
    rows = rows_of(ALL["attention"](), params, tmp_path)
    found = rows[(rows.metric == "sparsity") & (rows["factor.attention_type"] == "sparse")]
    assert list(found["estimate"] > 0) == [False, True]
    assert [Flag.MASK_IS_DENSE.value in flags for flags in found["flags"]] == [True, False]
    assert list(found["predicted"]) == [0.75, 0.75]
    assert list(attention_table(rows)["mask_is_dense"]) == [False, True, False]
    assert any("removes nothing at " in line for line in VERDICTS["attention"](rows))


def _scaled(say, one_rank_ms):
    parts = COMPUTING
    alone = (one_rank_ms - 0.1, one_rank_ms, one_rank_ms + 0.1)
    cases = [decode_case({"fused": ((8.9, 9, 9.1), 1, parts)}, world=2, alone=alone)]
    return "\n".join(say("distributed", cases))


def test_more_ranks_are_advised_only_where_they_have_helped(say):
    assert "Next: add a larger number" not in _scaled(say, 9.0)
    assert "Next: add a larger number to world_sizes" in _scaled(say, 17.0)


@pytest.mark.parametrize(("cold_ms", "said"), [(12.5, True), (10.4, False)])
def test_no_warm_up_is_not_said_beside_a_mean_that_needs_it(say, cold_ms, said):
    times = {0: (cold_ms, cold_ms), 5: (10.0, 10.0)}
    first = say(
        "warmup", [warmup_process("forward", at, 10, times, needed=0.0) for at in range(1, 6)]
    )[0]
    assert (
        "but the mean without warm-up is +25%" in first and "Use 5 warm-up steps" in first
    ) == said


@pytest.mark.parametrize("steps", [LEARNING_STEPS - 1, LEARNING_STEPS])
def test_runs_too_short_to_learn_are_smoke_tests(say, steps):
    text = "\n".join(say("fp8", [parity_case("fp8_rowwise", "equivalent", 0.0, steps=steps)]))
    assert (
        ("a smoke test" in text) == (steps < LEARNING_STEPS) == ("equivalent to bf16" not in text)
    )
    losses = {"replaced": (0.1, 0.2, 0.3), "fine_tuned": (0.1, 0.2, 0.3)}
    cases = [attention_case("dense", 9.9, 10, 10.1), quality_case(0.5, losses, steps=steps)]
    text = "\n".join(say("attention", cases))
    assert (
        ("a smoke test" in text)
        == (steps < LEARNING_STEPS)
        == ("after a fine-tune it increases the loss" not in text)
    )


@pytest.mark.parametrize(("low", "nothing"), [(-0.5, True), (0.0, True), (0.5, False)])
def test_an_overhead_that_may_be_zero_makes_no_clear_difference(say, low, nothing):
    case = overhead_case("deep", low / 100, 0.02, 0.04)
    (line,) = (line for line in say("energy", [case]) if "overhead" in line)
    assert ("(no clear difference) in mode deep" in line) == nothing


@pytest.mark.parametrize(
    ("second", "order"),
    [
        ((3.1, 4, 5), "below"),
        ((3, 4, 5), "no clear difference"),
        ((0.1, 0.2, 0.9), "above"),
        ((float("nan"),) * 3, "no clear difference"),
    ],
)
def test_an_order_is_what_two_intervals_allow(second, order):
    assert Estimate(1.0, 2.0, 3.0).compare_to(Estimate(*second)) == order


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
    assert any("so these estimates have no order" in line for line in busy) == orders


@pytest.mark.parametrize("examples", [12, pytest.param(100, marks=pytest.mark.thorough)])
def test_no_claim_contradicts_its_rows(tmp_path, examples):
    numbers = itertools.count()

    @settings(
        max_examples=examples,
        deadline=None,
        phases=(Phase.generate,),
        verbosity=Verbosity.quiet,
        suppress_health_check=list(HealthCheck),
    )
    @given(drawn=databases())
    def check(drawn):
        wrong = contradictions(*drawn, tmp_path / f"{next(numbers)}.sqlite")
        assert not wrong, "\n".join(wrong)

    check()
