"""A database of two machines: no sentence, fit, chart, table or comparison joins their numbers."""

import gzip
import html
import shutil
from dataclasses import replace

import pandas as pd
import pytest

from nanolib.compare.history import histories, since_before
from nanolib.compare.runs import compare_rows
from nanolib.measurement import BadInput
from nanolib.report import overview
from nanolib.report.page import build
from nanolib.report.regressions import comparison_table, comparison_verdict
from nanolib.stats.compare import Kind
from nanolib.store import Store
from nanolib.store.export import export_database
from tests.report.rows import OTHER, STORED, elsewhere
from tests.shown import SECTIONS


def _unpacked(folder):
    file = folder / "results.sqlite"
    with gzip.open(STORED) as packed, file.open("wb") as plain:
        shutil.copyfileobj(packed, plain)
    return file


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    """One machine, the other, and both: exported from the second, and merged into the first."""
    first, second, both = (tmp_path_factory.mktemp(name) for name in ("first", "second", "both"))
    _unpacked(first)
    with Store(_unpacked(second)):
        pass  # brought to today's layout
    elsewhere(second / "results.sqlite")
    with Store(second / "results.sqlite") as store:
        export_database(store, store.resolve("all"), both / "export.sqlite")
    shutil.copy(first / "results.sqlite", both / "results.sqlite")
    opened = [Store(folder / "results.sqlite") for folder in (first, second, both)]
    opened[2].merge(both / "export.sqlite")
    yield opened
    for store in opened:
        store.close()


@pytest.fixture(scope="module")
def rows(stores):
    return [store.shown(store.resolve("all"))[0] for store in stores]


def test_of_each_experiment_the_machine_of_its_newest_run_is_shown(stores, rows):
    both = stores[2]
    every, runs = both.shown(both.resolve("all"))
    alone = overview.newest_machine(every, runs)
    assert every["machine_id"].nunique() == 2 and set(alone["experiment"]) == set(
        every["experiment"]
    )
    assert (alone.groupby("experiment")["machine_id"].nunique() == 1).all()
    newer = runs.assign(started=runs["started"].where(runs["machine_id"] != OTHER, "2999"))
    assert set(overview.newest_machine(every, newer)["machine_id"]) == {OTHER}
    assert overview.newest_machine(every.iloc[:0], runs).empty


def test_a_page_of_two_machines_has_the_sentences_of_one_and_the_hardware_of_both(stores, tmp_path):
    both = stores[2]
    page = build(both, both.resolve("all"), tmp_path, SECTIONS)
    every, runs = both.shown(both.resolve("all"))
    alone = overview.newest_machine(every, runs)
    text = (page.parent / "profiling_report.md").read_text()
    assert all(machine in text for machine in set(every["machine_id"]))
    for section in SECTIONS:
        for finding in (
            section.verdict(alone) if section.experiment in set(runs["experiment"]) else ()
        ):
            assert finding.text.split("(")[0].split("[")[0] in html.unescape(text.replace("\\", ""))


def test_a_comparison_pairs_a_machine_with_itself_whatever_the_order(rows):
    first, second, _ = rows
    found = compare_rows(pd.concat([first, second]), pd.concat([second, first]))
    assert found.same_machine and not found.regressed
    assert {line.finding for line in found.lines} == {Kind.EQUIVALENT}
    names = {machine[:6] for machine in (first["machine_id"].iloc[0], OTHER)}
    assert set(comparison_table(found)["machine"]) == names
    worse = replace(found, lines=[replace(line, finding=Kind.REGRESSED) for line in found.lines])
    assert all(
        finding.about
        for finding in comparison_verdict(worse, "x")
        if finding.text.startswith("regressed")
    )
    fewer = compare_rows(pd.concat([first, second]), second)
    assert (
        not fewer.lost
        and "left out" in fewer.noise[0]
        and {line.finding for line in fewer.lines} == {Kind.EQUIVALENT}
    )
    across = compare_rows(first, second)
    assert (
        not across.same_machine
        and not across.regressed
        and {line.machine for line in across.lines} == {""}
    )
    third = first.assign(machine_id="g" * 12)
    with pytest.raises(BadInput, match="2 and 1 different machines; name runs of one machine"):
        compare_rows(pd.concat([first, second]), third)


def test_no_history_and_no_run_before_is_of_another_machine(stores):
    both = stores[2]
    assert since_before(both, both.resolve("all")) is None
    assert not histories(both, machine_ids=sorted(both.runs().machine_id))
