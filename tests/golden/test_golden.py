"""nanolib says what the sheet says; a change that is meant: `python -m tests.golden.sheet`, and the diff is read."""

import json
from functools import partial
from itertools import filterfalse

import pytest

from nanolib.experiments import MEASURING
from tests.golden.sheet import (
    DECIMALS,
    LOSSES,
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


def _takes_long(line):
    return any(words in line for words in _LONG)


def _part(lines):
    """Some of them: the first of each class, and one of so many."""
    first = {line.split()[0]: line for line in reversed(lines)}
    return sorted({*first.values(), *lines[::_EACH]})


def _close(title, value):
    is_loss = title.split()[0] in LOSSES
    return pytest.approx(value, rel=0, abs=1.5 * 10**-DECIMALS if is_loss else 0)


@pytest.mark.parametrize("notebook", MEASURING)
@pytest.mark.parametrize(
    ("suite", "chosen"),
    [
        pytest.param("quick", partial(filterfalse, _takes_long), marks=pytest.mark.slow),
        pytest.param("quick", partial(filter, _takes_long), marks=pytest.mark.thorough),
        pytest.param("full", _part, marks=pytest.mark.slow),
        pytest.param("full", sorted, marks=pytest.mark.thorough),
    ],
)
def test_cases_their_factors_numbers_and_plans_are_those_of_the_sheet(suite, chosen, notebook):
    kept, params = json.loads(path_of(suite, notebook).read_text()), params_of(suite, notebook)
    with everywhere_alike():
        by_line = cases_of(notebook, params)
        assert {*by_line} == {*kept}
        for line in chosen([*kept]):
            wanted = {title: _close(title, value) for title, value in kept[line].items()}
            assert numbers(suite, by_line[line], params) == wanted, line
