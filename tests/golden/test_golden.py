"""nanolib says what the sheet says.

After a change that is meant: `python -m tests.golden.sheet`, and the diff is read.
"""

import json

import pytest

from nanolib.experiments import MEASURING
from tests.golden.sheet import (
    DECIMALS,
    LOSSES,
    SUITES,
    cases_of,
    everywhere_alike,
    numbers,
    params_of,
    path_of,
)

_EACH = 60  # of the full suite's cases so many share one that is planned in every run of the tests
# Of the quick suite, what takes seconds where others show the same kind of answers.
_LONG = (
    "QualityCase ",
    "seq_len=256 ",
    "seq_len=512 batch_size=1 ",
    "seq_len=128 batch_size=1 dtype=float32 mode=generation ",
    "batch_size=16 ",
    "seq_len=4096 ",
    "recipe=",
    "precision=bfloat16 ",
)


def _part(suite, lines):
    """The lines that each run of the tests checks: of the full suite, a class's first, and some."""
    if suite == "quick":
        return [line for line in lines if not any(words in line for words in _LONG)]
    first = {line.split()[0]: line for line in reversed(lines)}
    return [*first.values(), *lines[::_EACH]]


def _close(title, value):
    is_loss = title.split()[0] in LOSSES
    return pytest.approx(value, rel=0, abs=1.5 * 10**-DECIMALS if is_loss else 0)


@pytest.mark.parametrize("notebook", MEASURING)
@pytest.mark.parametrize("suite", SUITES)
@pytest.mark.parametrize(
    "is_rest",
    [
        pytest.param(False, marks=pytest.mark.slow),
        pytest.param(True, marks=pytest.mark.thorough),
    ],
)
def test_cases_their_factors_numbers_and_plans_are_those_of_the_sheet(is_rest, suite, notebook):
    kept, params = json.loads(path_of(suite, notebook).read_text()), params_of(suite, notebook)
    part = _part(suite, [*kept])
    with everywhere_alike():
        by_line = cases_of(notebook, params)
        assert {*by_line} == {*kept}
        for line in kept:
            if (line in part) != is_rest:
                wanted = {title: _close(title, value) for title, value in kept[line].items()}
                assert numbers(suite, by_line[line], params) == wanted, line
