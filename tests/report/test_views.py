"""The charts of a notebook show its numbers in their units, and are hollow where these say little."""

import pytest

from nanolib.measurement import LEARNING_STEPS, SMOKE_TEST, Measurement, Provenance, exact
from tests.report.cases import COMPUTING, decode_case, model_case, warmup_process
from tests.report.rows import SIZES, interval
from tests.shown import CHARTS


def _points(rows, name, *columns):
    """The values of some columns of a chart's points, and its subtitle."""
    spec = CHARTS[name](rows).to_dict()
    lines = [line for data in spec["datasets"].values() for line in data if "series" in line]
    found = [tuple(line.get(column) for column in columns) for line in lines]
    return found, spec["title"].get("subtitle")


def test_a_step_is_drawn_in_per_cent_of_the_second_half_and_hollow_in_the_warm_up(measured):
    rows = measured("warmup", [warmup_process("forward_backward", 3, {0: (9, 9)}, needed=2.0)])
    found, _ = _points(rows, "warmup_curve", "panel", "series", "x", "y", "sure")
    shares = [(300, False), (200, False), (100, True), (100, True)]
    named = ("forward + backward", "process 3")
    assert found == [(*named, at, *share) for at, share in enumerate(shares, 1)]


@pytest.mark.parametrize("count", [4, 5])
def test_means_are_drawn_against_the_mean_after_five_steps_and_five_processes_are_a_range(
    measured, count
):
    ratios = (2.5, 2.4, 2.6, 2.2, 2.9)[:count]
    processes = [
        warmup_process("forward", at, {0: (10.0, 12.0 * ratio), 2: (10.0, 6.0), 5: (10.0, 12.0)})
        for at, ratio in enumerate(ratios)
    ]
    rows = measured("warmup", processes)
    cold, warm = _points(rows, "warmup_settings", "series", "x", "low", "high", "sure")[0]
    high = 190 if count == 5 else 160
    middle = 150 if count == 5 else 145
    assert cold == ("forward after 0", *map(pytest.approx, (middle, 120, high)), count == 5)
    assert warm == ("forward after 2", *map(pytest.approx, (-50, -50, -50)), count == 5)


@pytest.mark.parametrize(
    ("needed", "ratio", "count", "said"),
    [
        (0.0, 1.04, 5, "No warm-up step is needed for forward: none of 5 fresh processes needs a"),
        (0.0, 1.06, 5, "Use 5 warm-up steps for forward: no curve shows warm-up, but the mean is 6% higher without warm-up"),
        (0.0, 1.06, 4, "No warm-up step is needed for forward: none of 4 fresh processes needs a"),
        (1.0, 1.06, 5, "1 warm-up step is enough for forward: 5 processes need 1, 1, 1, 1, 1 steps"),
    ],
)  # fmt: skip
def test_where_no_curve_shows_a_warm_up_the_mean_without_one_decides(
    say, needed, ratio, count, said
):
    times = {0: (10.0, 12.0 * ratio), 5: (10.0, 12.0)}
    lines = say("warmup", [warmup_process("forward", at, times, needed) for at in range(count)])
    assert lines[0].startswith(said) and ("repeat the run" in lines[0]) == lines[0].startswith(
        "Use 5"
    )


def test_a_peak_is_drawn_by_kind_in_mib(measured):
    kinds = {"weights": 2**20, "saved activations": 3 * 2**20}
    parts = [[kind, "a", "", "", size] for kind, size in kinds.items()]
    row = exact("peak_memory", 4.0, scope="training_step", details={"parts": parts})
    found, _ = _points(
        measured("model", [model_case("training", [row])]), "model_peaks", "part", "x", "text"
    )
    assert found == [("saved activations", 3.0, "4 MiB"), ("weights", 1.0, "")]


@pytest.mark.parametrize("steps", [3, LEARNING_STEPS])
def test_a_loss_is_drawn_step_by_step_and_a_short_training_is_said(measured, steps):
    losses = tuple(3.0 - at / steps for at in range(steps))
    row = Measurement("loss", losses[-1], n=1, samples=losses, scope="training")
    rows = measured("model", [model_case("loss", [row], steps=steps)])
    found, subtitle = _points(rows, "model_loss", "series", "x", "y")
    assert found == [("tiny (dense, float32)", at, ms) for at, ms in enumerate(losses, 1)]
    assert (f"{steps} steps: {SMOKE_TEST}." in subtitle) == (steps < LEARNING_STEPS)


def test_a_ranks_memory_is_drawn_in_gib_at_the_most_ranks_beside_that_of_one(measured):
    def peak(mib, scope, planned=None, provenance=Provenance.MEASURED):
        rest = {"scope": f"{scope} forward", "predicted": planned, "provenance": provenance}
        return exact("peak_memory", mib, **rest)

    planned, cases = {"provenance": Provenance.MODELLED}, []
    for n in (64, 128):
        shape = {**SIZES, "seq_len": n, "direction": "forward"}
        for world, mib in ((2, 9.0), (4, 2048.0)):
            ring = {"world_size": world, "algorithms": ["ring"]}
            cases.append((shape | ring, [peak(mib, "ring", 1024.0)]))
        one = {"world_size": 1, "algorithms": ["dense"]}
        cases.append((shape | one, [peak(512.0, "dense", **planned)]))
    found, _ = _points(measured("distributed", cases), "sharded_memory", "series", "x", "y", "pred")
    whole = [("flash, 1 rank", n, None, 0.5) for n in (64, 128)]
    assert found == whole + [("ring, 4 ranks", n, 2.0, 1.0) for n in (64, 128)]


def test_a_cost_model_is_drawn_from_the_largest_number_of_ranks_that_was_measured(measured):
    cases = []
    for world, ms in ((2, 9), (4, 6)):
        shape, found = decode_case({"ring": ((ms - 1, ms, ms + 1), COMPUTING)}, world=world)
        for more in (8, 16):
            details = {"algorithm": "ring", "world_size": more}
            rest = {"provenance": Provenance.MODELLED, "scope": f"{more}", "details": details}
            found.append(interval("latency", *[world + 1.0 / more] * 3, **rest))
        cases.append((shape, found))
    found, _ = _points(measured("distributed", cases), "decode_scaling", "x", "y", "low", "pred")
    measured_points = [(2, 9, 8, None), (4, 6, 5, 6)]
    modelled = [(more, None, None, 4 + 1 / more) for more in (8, 16)]
    assert found == measured_points + modelled
