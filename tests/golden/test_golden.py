"""nanolib says what the sheet says; a change that is meant: `python -m tests.golden.write`, and the diff is read."""

import pytest

from tests.golden import answers, names, sheet
from tests.golden.sheet import differences, path_of, read, told

_EACH = 60  # of the full suite's cases so many share one that is planned in every run of the tests
# Of the quick suite, what takes seconds where others show the same kind of answers.
_LONG = ("batch_size=16 ", "arm=fp8_tensorwise ", "arm=scale_off_by_1024 ")
BOTH = [(suite, notebook) for suite in names.SUITES for notebook in names.NOTEBOOKS]


@pytest.fixture(autouse=True, scope="module")
def _machine():
    with answers.everywhere_alike():
        yield


def _is_that_of_the_sheet(suite, notebook, lines):
    by_line = answers.cases(suite, notebook)
    found = {line: answers.all_of(suite, notebook, by_line[line]) for line in lines if line in by_line}
    kept = read(path_of(suite, notebook))
    different = differences({line: kept[line] for line in lines}, found)
    assert not different, told(different)


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
    different = differences(*(lines | count for lines, count in zip(unanswered, counts, strict=True)))
    assert not different, told(different)


def _takes_long(line):
    return any(words in line for words in _LONG)


@pytest.mark.slow
@pytest.mark.parametrize("notebook", names.NOTEBOOKS)
def test_quick_answers_are_those_of_the_sheet(notebook):
    _is_that_of_the_sheet("quick", notebook, [line for line in _lines("quick", notebook) if not _takes_long(line)])


@pytest.mark.thorough
@pytest.mark.parametrize("notebook", ["fp8", "model"])
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


def test_every_metric_of_the_table_has_an_answer_of_the_quick_suite():
    quick = [read(path_of("quick", notebook)) for notebook in names.NOTEBOOKS]
    said = {answer.removeprefix("predicted ").split()[0] for kept in quick for of in kept.values() for answer in of}
    assert not {*names.METRICS.values()} - said


def test_every_class_and_factor_of_the_table_is_one_that_a_case_has():
    found = [case for suite, notebook in BOTH for case in answers.cases(suite, notebook).values()]
    assert {type(case).__name__ for case in found} == {*names.CASES}
    assert {name for case in found for name in case.factors} == {*names.FACTORS, *names.NOT_FACTORS}
    assert names.NOT_RUN.keys() <= names.CASES.keys()


def test_a_renamed_metric_factor_value_and_class_reproduce_the_sheet_through_the_table(monkeypatch):
    line, case = next(iter(answers.cases("quick", "energy").items()))
    asked = answers.foretold(case)
    renamed = {"CASES": "EnergyCase", "FACTORS": "phase", "WORDS": "prefill", "PREDICTED": "flops"}
    for table, word in renamed.items():
        monkeypatch.setattr(names, table, getattr(names, table) | {word: f"another {word}"})
    assert "another EnergyCase" in answers.line_of(case) and "another phase=another_prefill" in answers.line_of(case)
    assert answers.line_of(case) != line
    said = answers.foretold(case)
    assert said["predicted another flops"] == asked["predicted flops"]
    assert said["planned another prefill"] == asked["planned prefill"]


def test_a_name_that_the_table_lacks_is_asked_for(monkeypatch):
    case = next(iter(answers.cases("quick", "energy").values()))
    monkeypatch.setattr(names, "FACTORS", {})
    with pytest.raises(KeyError, match="is in no table"):
        answers.line_of(case)


def test_differences_are_told_old_to_new_and_the_rest_is_counted():
    before = {"a": {"bytes": "1", "flops": "2"}, "b": {}, "same": {"loss": "~2.296"}}
    after = {"a": {"bytes": "3", "rounds": "4"}, "c": {}, "same": {"loss": "~2.297"}}
    lines = differences(before, after)
    assert lines == [
        "b: no such case any more",
        "c: a new case",
        "a: bytes: 1 → 3",
        "a: flops: 2 → nothing",
        "a: rounds: nothing → 4",
    ]
    text = told(lines, most=3)
    assert "5 answer(s) differ" in text and "a: bytes: 1 → 3" in text and "a: flops" not in text


@pytest.mark.parametrize(("was", "now"), [("~2.296", "~2.298"), ("2296", "2297"), ("~-0.001", "~0.001")])
def test_a_number_that_is_not_the_same_is_a_difference(was, now):
    assert differences({"a": {"loss": was}}, {"a": {"loss": now}}) == [f"a: loss: {was} → {now}"]


def test_a_sheet_is_read_as_it_was_written(tmp_path):
    kept = {"A x=1": {"flops (formula)": "12", "loss": "~2.296"}, "B": {}}
    sheet.write(tmp_path / "quick" / "a.txt", kept)
    assert read(tmp_path / "quick" / "a.txt") == kept


def test_the_sheet_is_sorted_and_small():
    files = [path_of(*which) for which in BOTH]
    assert sum(file.stat().st_size for file in files) < 1_000_000
    for file in files:
        assert [*read(file)] == sorted(read(file))
