"""nanolib says what the sheet says; a change that is meant: `python -m tests.golden.write`, and the diff is read."""

import pytest

from tests.golden import answers, names
from tests.golden.sheet import differences, path_of, read, summary

_EACH = 60  # of the full suite's cases so many share one that is planned in every run of the tests
# Of the quick suite, what takes seconds where others show the same kind of answers.
_LONG = (
    "QualityCase ",
    "seq_len=256 ",
    "batch_size=16 ",
    "seq_len=4096 ",
    "arm=",
    "precision=bfloat16 ",
)
BOTH = [(suite, notebook) for suite in names.SUITES for notebook in names.NOTEBOOKS]


@pytest.fixture(autouse=True, scope="module")
def _machine():
    with answers.everywhere_alike():
        yield


def _is_that_of_the_sheet(suite, notebook, lines):
    by_line = answers.cases(suite, notebook)
    found = {
        line: answers.all_of(suite, notebook, by_line[line]) for line in lines if line in by_line
    }
    kept = read(path_of(suite, notebook))
    different = differences({line: kept[line] for line in lines}, found)
    assert not different, summary(different)


def _lines(suite, notebook):
    """Of its cases in the sheet."""
    return [line for line in read(path_of(suite, notebook)) if line != answers.COUNT]


def _part(suite, notebook):
    """Some of them: the first of each class, and one of so many."""
    lines = _lines(suite, notebook)
    first = {line.split()[0]: line for line in reversed(lines)}
    return sorted({*first.values(), *lines[::_EACH]})


@pytest.mark.parametrize(("suite", "notebook"), BOTH)
def test_the_cases_their_factors_and_their_counts_are_those_of_the_sheet(suite, notebook):
    by_line = answers.cases(suite, notebook)
    kept = read(path_of(suite, notebook))
    unanswered = [{line: {} for line in lines} for lines in (kept, by_line)]
    counts = ({answers.COUNT: kept[answers.COUNT]}, answers.counts(by_line))
    different = differences(
        *(lines | count for lines, count in zip(unanswered, counts, strict=True))
    )
    assert not different, summary(different)


def _takes_long(line):
    return any(words in line for words in _LONG)


@pytest.mark.slow
@pytest.mark.parametrize("notebook", names.NOTEBOOKS)
def test_quick_answers_are_those_of_the_sheet(notebook):
    _is_that_of_the_sheet(
        "quick", notebook, [line for line in _lines("quick", notebook) if not _takes_long(line)]
    )


@pytest.mark.thorough
@pytest.mark.parametrize("notebook", ["attention", "fp8", "model"])
def test_quick_answers_that_take_long_are_those_of_the_sheet(notebook):
    lines = [line for line in _lines("quick", notebook) if _takes_long(line)]
    assert lines
    _is_that_of_the_sheet("quick", notebook, lines)


@pytest.mark.slow
@pytest.mark.parametrize("notebook", names.NOTEBOOKS)
def test_a_part_of_the_full_plans_is_that_of_the_sheet(notebook):
    _is_that_of_the_sheet("full", notebook, _part("full", notebook))


@pytest.mark.thorough
@pytest.mark.parametrize("notebook", names.NOTEBOOKS)
def test_all_full_plans_are_those_of_the_sheet(notebook):
    _is_that_of_the_sheet("full", notebook, _lines("full", notebook))


def test_every_metric_is_in_the_sheet_or_left_out_for_a_reason():
    assert not names.METRICS.keys() & names.LEFT_OUT.keys()
    assert {*names.METRICS, *names.LEFT_OUT} == {*names.DECLARED}
    assert all(names.LEFT_OUT.values())


def test_every_metric_that_must_not_change_is_in_the_sheet():
    assert names.METRICS.keys() >= names.EQUAL


def test_every_class_and_factor_of_the_table_is_one_that_a_case_has():
    found = [case for suite, notebook in BOTH for case in answers.cases(suite, notebook).values()]
    assert {type(case).__name__ for case in found} == {*names.CASES}
    assert {name for case in found for name in case.factors} == {*names.FACTORS, *names.NOT_FACTORS}
    assert names.NOT_RUN.keys() <= names.CASES.keys()
