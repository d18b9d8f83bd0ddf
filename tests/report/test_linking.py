import pandas as pd
import pytest

from nanolib.report.linking import choices, kept

RUNS = pd.DataFrame(
    {
        "run_id": ["aaaaaaaa-1", "bbbbbbbb-2", "cccccccc-3"],
        "label": ["", "", "night"],
        "suite": ["quick", "quick", "full"],
        "started": ["2026-01-02T10:00:00Z", "2026-01-02T10:01:00Z", "2026-01-03T22:00:00Z"],
        "launch": ["one", "one", ""],
        "machine_id": ["m", "m", "m"],
    }
)
ROWS = pd.DataFrame(
    {
        "run_id": ["aaaaaaaa-1", "bbbbbbbb-2", "cccccccc-3", "cccccccc-3"],
        "experiment": ["attention", "model", "model", "fp8"],
        "factor.name": ["dense", "tiny", "small", "small"],
        "factor.seq_len": [16.0, 32.0, 32.0, None],
    }
)


def test_what_one_command_started_is_picked_as_one_run_and_a_single_machine_is_no_choice():
    found = choices(ROWS, RUNS)
    assert list(found) == ["Run", "Model", "Sequence length"]
    assert found["Run"]["options"] == {
        "quick, 2026-01-02 10:00 (aaaaaaaa)": ["aaaaaaaa", "bbbbbbbb"],
        "night, 2026-01-03 22:00 (cccccccc)": ["cccccccc"],
    }
    assert list(found["Model"]["options"]) == ["small", "tiny"]  # of attention a name is a kind
    assert found["Sequence length"]["options"] == {"16": [16], "32": [32]}


@pytest.mark.parametrize(
    ("picked", "left"),
    [
        ({}, [0, 1, 2, 3]),
        ({"run": None, "model": None, "n": None}, [0, 1, 2, 3]),
        ({"run": ["cccccccc"]}, [2, 3]),
        ({"model": ["tiny"]}, [0, 1]),  # attention knows no models
        ({"n": [32]}, [1, 2, 3]),  # the last has no length
        ({"n": [16], "run": ["bbbbbbbb"]}, []),
    ],
)
def test_what_does_not_know_of_a_pick_stays(picked, left):
    assert list(kept(ROWS, picked).index) == left
