"""A database of two machines: no sentence, fit, chart, table or comparison joins their numbers."""

import html
import json
import re

import pandas as pd
import pytest

from nanolib.compare.history import histories
from nanolib.compare.runs import compare_rows
from nanolib.report import overview
from nanolib.report.overview import compare_with_earlier
from nanolib.report.page import build
from nanolib.stats.compare import Kind
from nanolib.store import Store
from tests.features import results
from tests.report.rows import OTHER, elsewhere
from tests.shown import SECTIONS


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """The database of one machine, merged with that of another."""
    first, second = (results(tmp_path_factory.mktemp(name)) for name in ("first", "second"))
    elsewhere(second)
    with Store(first) as store:
        store.merge(second)
        yield store


@pytest.fixture(scope="module")
def ids(both):
    """The runs of two notebooks on both machines."""
    return [*both.resolve("warmup"), *both.resolve("fp8")]


def test_a_page_of_two_machines_has_the_sentences_of_one_and_the_hardware_of_both(
    both, ids, tmp_path
):
    """The list of features has the names of all files of a report, with its pictures."""
    every, runs = both.report_data(ids)
    newest = overview.newest_machine(every, runs)
    assert set(newest["experiment"]) == set(every["experiment"]) == {"warmup", "fp8"}
    newer = runs.sort_values("machine_id", key=lambda ids: ids == OTHER)
    assert set(overview.newest_machine(every, newer)["machine_id"]) == {OTHER}
    text = build(both, ids, tmp_path, SECTIONS, pictures=False).read_text()
    assert not re.search(r"""(src|href)=["']?(https?:)?//""", text)  # nothing is fetched
    assert "<script>alert(1)" not in text and text.count("<script>") == 2
    profile = json.loads((tmp_path / "fp8_profile.json").read_text())
    assert len(profile["measurements"]) == (newest["experiment"] == "fp8").sum()
    written = (tmp_path / "profiling_report.md").read_text()
    assert all(machine in written for machine in set(every["machine_id"]))
    assert "<script>" not in written and not re.search(r"(?<!\\)\]\(http", written)
    said = html.unescape(written.replace("\\", ""))
    for section in SECTIONS:
        if section.experiment in set(runs["experiment"]):
            assert all(one.text.split("[")[0] in said for one in section.verdict(newest))


def test_a_comparison_pairs_a_machine_with_itself_whatever_the_order(both, ids):
    every, _ = both.report_data(ids)
    is_other = every["machine_id"] == OTHER
    first, second = every[~is_other], every[is_other]
    found = compare_rows(every, pd.concat([second, first]))
    assert found.same_machine and {line.finding for line in found.lines} == {Kind.EQUIVALENT}
    names = {f"machine={machine[:6]}" for machine in every["machine_id"]}
    assert {line.case.split()[-1] for line in found.lines} == names and len(names) == 2
    fewer = compare_rows(every, second)
    assert not fewer.lost and {line.finding for line in fewer.lines} == {Kind.EQUIVALENT}
    across = compare_rows(first, second)
    assert across.is_compared and not across.same_machine and not across.has_regressed
    neither = compare_rows(every, first.assign(machine_id="g" * 12))
    assert not neither.is_compared and "only in base are not compared" in neither.noise[0]


def test_no_history_and_no_run_before_is_of_another_machine(both, ids):
    figures = both.figures("latency", both.runs()["machine_id"])
    assert compare_with_earlier(both, ids, figures) is None and not histories(figures)
