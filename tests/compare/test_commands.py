"""What `nano compare` says of runs on busy machines, of sides that share nothing, of lost cases; and that a terminal holds it."""

import json
from dataclasses import replace

import pytest
from click.testing import CliRunner

from nanolib.cli import main
from nanolib.compare.runs import BUSY
from nanolib.measurement import Flag, Measurement, Status, exact
from nanolib.store import Run, Store
from tests.compare.test_compare import _case
from tests.store.rows import MACHINE

LONG = "decoder_tiny with num_layers 2, vocab_size 4096"


@pytest.fixture
def nano(tmp_path, monkeypatch):
    """Adds runs of (id, cases by name, experiment, what disturbed them), then asks."""
    monkeypatch.setenv("NANOLIB_OUTPUT", str(tmp_path))

    def asked(runs, *arguments):
        with Store(tmp_path / "results.sqlite") as store:
            for run_id, cases, experiment, disturbed in runs:
                rows = {
                    name: ({"name": f"{LONG} {name}", "seq_len": 8, "dtype": "float32"}, found)
                    for name, found in cases.items()
                }
                named = {"git_revision": "new" if run_id.startswith("curr") else "rev"}
                named |= {"run_id": run_id, "interference": disturbed}
                store.add(Run(experiment, MACHINE, rows=rows, **named))
        return CliRunner().invoke(main, ["compare", *arguments])

    return asked


def _pair(disturbed=(), flags=(), earlier=5, **now):
    return [
        *(
            (f"earl000{at}", {"a": _case(10 + at), "b": _case(20 + at)}, "attention", [])
            for at in range(earlier)
        ),
        ("base0001", {"a": _case(1), "b": _case(2)}, "attention", []),
        (
            "curr0001",
            {"a": _case(3, level=13.0, flags=flags), "b": _case(4)} | now,
            "attention",
            list(disturbed),
        ),
    ]


@pytest.mark.parametrize(
    "how", [{"disturbed": ["other processes use 60% of the CPUs"]}, {"flags": (Flag.BUSY_MACHINE,)}]
)
def test_a_busy_one_is_suspect_at_most_and_says_so_above_the_table(nano, tmp_path, how):
    ended = nano(_pair(**how), "base0001", "curr0001", "--json", str(tmp_path / "found.json"))
    assert ended.exit_code == 0 and "1 suspect" in ended.output and "regressed" not in ended.output
    assert BUSY in ended.output
    told = json.loads((tmp_path / "found.json").read_text())
    if "disturbed" in how:
        first, *_ = ended.output.splitlines()
        assert (
            first
            == "run curr0001 began on a busy machine: other processes use 60% of the CPUs"
            == told["noise"][0]
        )
    assert next(line for line in told["lines"] if line["finding"] == "suspect")["ratio"] > 1.2


def test_what_has_no_blocks_gets_no_verdict_and_no_remedy_that_cannot_help(nano):
    once = {
        "c": [
            Measurement("case_duration", 1.0),
            Measurement("latency", 5.0, scope="decode", method="window"),
        ]
    }
    runs = [("base0001", once, "energy", []), ("curr0001", once, "energy", [])]
    said = nano(runs, "base0001", "curr0001", "--all").output
    assert "only one sample; no verdict" in said and "budget_s" not in said


def test_sides_without_a_common_case_are_refused_in_one_line(nano):
    runs = [*_pair(earlier=0), ("modl0001", {"c": _case(5)}, "model", [])]
    ended = nano(runs, "base0001", "modl0001")
    assert ended.exit_code == 2 and ended.output.count("\n") == 1
    assert "'base0001' (attention) and 'modl0001' (model) have no case in common" in ended.output


@pytest.mark.parametrize("strict", [False, True])
def test_notebooks_of_one_side_are_named_in_one_line_and_no_case_of_theirs_is_missing(
    nano, tmp_path, strict
):
    with Store(tmp_path / "results.sqlite") as store:
        for at, experiment in enumerate(("attention", "model", "energy", "attention")):
            rows = {"a": ({"name": "a"}, _case(at))}
            named = {"label": "mine"} if at == 3 else {"suite": "quick"}
            store.add(Run(experiment, MACHINE, rows=rows, run_id=f"run0000{at}", **named))
    options = ["--all", "--json", str(tmp_path / "found.json"), *["--strict"] * strict]
    ended = nano([], "quick", "mine", *options)
    assert "experiments only in base are not compared: energy, model" in ended.output.splitlines()
    found = json.loads((tmp_path / "found.json").read_text())
    assert {line["experiment"] for line in found["lines"]} == {"attention"}
    assert found["missing"] == ["energy", "model"] and ended.exit_code == strict


@pytest.mark.parametrize("lost", ["missing", "failed"])
def test_strict_fails_where_cases_are_lost(nano, lost):
    runs = _pair(earlier=0)
    runs[1] = (
        "curr0001",
        {"b": _case(4)} | ({} if lost == "missing" else {"a": _case(1, status=Status.ERROR)}),
        "attention",
        [],
    )
    for strict, code in (([], 0), (["--strict"], 1)):
        ended = nano(runs, "base0001", "curr0001", *strict)
        assert ended.exit_code == code and f"1 {lost}" in ended.output
        runs = []


def test_figures_of_two_methods_have_two_names(nano, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    flops = [
        exact("flops", 7, scope="backward"),
        exact("flops", 9, scope="backward", method="flop_counter"),
    ]
    runs = [
        (run_id, {"a": [*_case(1), *flops]}, "attention", []) for run_id in ("base0001", "curr0001")
    ]
    said = " ".join(nano(runs, "base0001", "curr0001", "--all").output.split())
    assert (
        "flops backward by formula, FLOP 7 7" in said
        and "flops backward by flop_counter, FLOP 9 9" in said
    )


def _stored(path, machine, factor, predicted, flops=100.0):
    cases = {}
    for at in range(8):
        rows = [
            replace(row, predicted=predicted) if row.metric == "latency" else row
            for row in _case(at, level=(10 + at) * factor, flops=flops)
        ]
        cases[f"c{at}"] = ({"name": f"k{at}", "seq_len": 8}, rows)
    with Store(path) as store:
        store.add(Run("attention", MACHINE | {"machine_id": machine}, rows=cases))


@pytest.mark.parametrize(
    ("predicted", "flops", "expected"),
    [
        (
            8.0,
            100.0,
            ["scaled by peak rates: 1 ", "24 equivalent"],
        ),  # twice as slow, as its peaks say
        (4.0, 100.0, ["scaled by peak rates: 2.0", "8 regressed"]),
        (8.0, 101.0, ["8 changed", "deterministic metric changed"]),
        (
            None,
            100.0,
            ["left out: 8 latencies without a prediction", "too few for a ratio", "16 equivalent"],
        ),
    ],
)
def test_a_reference_is_scaled_by_the_peaks_and_is_no_gate(tmp_path, predicted, flops, expected):
    (tmp_path / "theirs").mkdir()
    _stored(tmp_path / "theirs" / "results.sqlite", "m1", 1.0, 4.0)
    _stored(tmp_path / "mine" / "results.sqlite", "m2", 2.0, predicted, flops)
    arguments = ["compare", str(tmp_path / "theirs"), "latest", "--across-machines"]
    ended = CliRunner().invoke(main, [*arguments, "--output", str(tmp_path / "mine")])
    assert ended.exit_code == 0, ended.output
    told = " ".join(ended.output.split())
    assert all(words in told for words in expected), told
