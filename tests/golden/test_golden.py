"""nanolib says what the sheet says; a change that is meant: `python -m tests.golden.write`, and the diff is read."""

from functools import partial
from itertools import filterfalse

import pytest

from tests.golden import answers, names
from tests.golden.sheet import differences, path_of, read

_EACH = 60  # of the full suite's cases so many share one that is planned in every run of the tests
# Of the quick suite, what takes seconds where others show the same kind of answers.
_LONG = (
    "QualityCase ",
    "seq_len=256 ",
    "seq_len=512 batch_size=1 ",
    "seq_len=128 batch_size=1 dtype=float32 mode=generation ",
    "batch_size=16 ",
    "seq_len=4096 ",
    "arm=",
    "precision=bfloat16 ",
)


@pytest.fixture(autouse=True, scope="module")
def _machine():
    with answers.everywhere_alike():
        yield


def _takes_long(line):
    return any(words in line for words in _LONG)


def _part(lines):
    """Some of them: the first of each class, and one of so many."""
    first = {line.split()[0]: line for line in reversed(lines)}
    return sorted({*first.values(), *lines[::_EACH]})


@pytest.mark.parametrize("notebook", names.NOTEBOOKS)
@pytest.mark.parametrize(
    ("suite", "chosen"),
    [
        pytest.param("quick", partial(filterfalse, _takes_long), marks=pytest.mark.slow),
        pytest.param("quick", partial(filter, _takes_long), marks=pytest.mark.thorough),
        pytest.param("full", _part, marks=pytest.mark.slow),
        pytest.param("full", sorted, marks=pytest.mark.thorough),
    ],
)
def test_cases_their_factors_answers_and_plans_are_those_of_the_sheet(suite, chosen, notebook):
    kept = read(path_of(suite, notebook))
    by_line = answers.cases(suite, notebook)
    assert {*by_line} == {*kept}
    lines = [*chosen([*kept])]
    found = {line: answers.all_of(suite, notebook, by_line[line]) for line in lines}
    different = differences({line: kept[line] for line in lines}, found)
    assert not different, "\n".join(
        [*different[:20], "if that is meant: python -m tests.golden.write"]
    )


def test_every_metric_is_in_the_sheet_or_left_out_for_a_reason():
    assert not names.METRICS.keys() & names.LEFT_OUT.keys()
    assert {*names.METRICS, *names.LEFT_OUT} == {*names.DECLARED}
    must_not_change = {name for name, m in names.DECLARED.items() if m.direction == "equal"}
    assert names.METRICS.keys() >= must_not_change
