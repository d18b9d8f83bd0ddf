"""Results of another machine: times scaled by the peak rates of both, and metrics that must be equal as they are."""

from dataclasses import replace

import pytest
from click.testing import CliRunner

from nanolib.cli import main
from nanolib.store import Run, Store
from tests.compare.test_compare import _case, _machine


def _stored(path, machine, factor, predicted, flops=100.0):
    cases = {}
    for at in range(8):
        rows = [
            replace(row, predicted=predicted) if row.metric == "latency" else row
            for row in _case(at, level=(10 + at) * factor, flops=flops)
        ]
        cases[f"c{at}"] = ({"name": f"k{at}", "seq_len": 8}, rows)
    with Store(path) as store:
        store.add(Run("attention", _machine(machine), rows=cases))


@pytest.mark.parametrize(
    ("predicted", "flops", "expected"),
    [
        (
            8.0,
            100.0,
            ["scaled by the peak rates of both machines: 1 ", "24 equivalent"],
        ),  # twice as slow, as its peaks say
        (4.0, 100.0, ["scaled by the peak rates of both machines: 2.0", "8 regressed"]),
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
