"""A notebook's charts show its numbers in their units, and are hollow where these say little."""

from nanolib.cli.run import _conclude
from nanolib.measurement import Provenance, exact
from nanolib.store import Store
from tests.features import results
from tests.report.cases import rank_case, warmup_process
from tests.report.rows import SIZES, points
from tests.shown import CHARTS


def test_a_step_is_drawn_in_per_cent_of_the_second_half_and_hollow_unless_it_is_steady(measured):
    needed = {"forward_backward": 2.0, "b": None, "c": 0.0}
    cases = [warmup_process(name, 3, {0: 24, 2: 20}, steps) for name, steps in needed.items()]
    chart = CHARTS["warmup_curve"](measured("warmup", cases))
    shares = [180, 300, 150, 250, 100, 100, 100, 100]
    assert points(chart, "x", "y") == [*enumerate(shares, 1)] * 3
    sure = [*[False] * 2, *[True] * 6, *[False] * 8, *[True] * 8]
    assert points(chart, "sure") == [(one,) for one in sure]
    assert points(chart, "panel", "series")[0] == ("forward + backward", "process 3")


def test_a_ranks_memory_is_drawn_in_gib_at_the_most_ranks_beside_that_of_one(measured):
    def peaks(seq_len, world_size, algorithm, mib, phase="forward", **rest):
        shape = SIZES | {"seq_len": seq_len, "phase": phase, "world_size": world_size}
        return shape | {"algorithm": algorithm}, [exact("peak_memory", mib, scope=phase, **rest)]

    cases = []
    for n in (64, 128):
        cases += [peaks(n, world, "ring", 512.0 * world, predicted=1024.0) for world in (2, 4)]
        cases.append(peaks(n, 1, "dense", 512.0, "memory", provenance=Provenance.MODELLED))
    chart = CHARTS["sharded_memory"](measured("distributed", cases))
    assert points(chart, "series", "x", "y", "pred") == [
        (series, n, gib, planned)
        for n in (64, 128)
        for series, gib, planned in (
            ("dense, 1, float32", None, 0.5),
            ("ring, 4, float32", 2.0, 1.0),
        )
    ]


def test_a_cost_model_is_drawn_from_the_largest_number_of_ranks_that_was_measured(measured):
    cases = []
    for world, ms in ((2, 9), (4, 6)):
        shape, found = rank_case("ring", (ms - 1, ms, ms + 1), world=world)
        for more in (world, 8, 16):
            rest = {"provenance": Provenance.MODELLED, "scope": f"decode at {more} ranks"}
            details = {"world_size": more}
            found.append(exact("latency", world + 1.0 / more, details=details, **rest))
        cases.append((shape, found))
    cases.append(rank_case("dense", (11, 12, 13)))
    chart = CHARTS["decode_scaling"](measured("distributed", cases))
    assert points(chart, "series", "x", "y", "pred") == [
        ("dense", 1, 12, None),
        ("ring", 2, 9, None),
        ("ring", 4, 6, None),
        *(("ring", more, None, 4 + 1 / more) for more in (4, 8, 16)),
    ]


def test_each_notebook_ends_in_the_terminal_with_its_question_and_first_conclusion(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("NANOLIB_OUTPUT", str(tmp_path))
    results(tmp_path).rename(tmp_path / "results.sqlite")
    with Store(create=False) as store:
        runs = store.runs().assign(status="done")
    ends = [_conclude(run) for run in runs.itertuples()]
    assert len({question for question, *_ in ends}) == len(ends) == 6
    assert all(len(end) == 3 and end[1].startswith("  ") for end in ends)
