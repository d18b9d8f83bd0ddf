"""What is not installed is said in one line, with the part that goes without it."""

import pytest

from nanolib import installed
from tests.processes import invoked


@pytest.mark.parametrize(
    ("absent", "more", "code", "said"),
    [
        (
            ["ruptures"],
            [],
            2,
            "nano: not installed: ruptures (needed for everything); nothing was run",
        ),
        (
            ["papermill", "nbclient"],
            ["--dry-run"],
            2,
            "nano: not installed: papermill, nbclient (needed for notebooks); nothing was run",
        ),
        (
            ["torchao"],
            ["--dry-run"],
            0,
            "not installed: torchao (needed for FP8); other parts of nanolib work",
        ),
    ],
)
def test_nano_run_says_in_its_first_line_what_is_missing(
    monkeypatch, tmp_path, absent, more, code, said
):
    known = installed.find_spec
    monkeypatch.setattr(
        installed, "find_spec", lambda name: None if name in absent else known(name)
    )
    ended = invoked("run", "quick", "warmup", *more, "--output", tmp_path)
    assert ended.exit_code == code and ended.output.startswith(said)
    assert code == 0 or len(ended.output.splitlines()) == 1
