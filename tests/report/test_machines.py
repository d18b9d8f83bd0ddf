"""A database of two machines: no sentence, fit, chart, table or comparison joins their numbers."""

import gzip
import shutil
from dataclasses import replace

import pandas as pd
import pytest

from nanolib.compare.compare import compare_rows
from nanolib.compare.history import histories, since_before
from nanolib.measurement import BadInput
from nanolib.report import overview, page
from nanolib.report.regressions import comparison_table, comparison_verdict
from nanolib.stats.compare import Kind, compare
from nanolib.store import Store
from nanolib.store.export import export_database
from tests.report.rows import OTHER, STORED, elsewhere
from tests.shown import CHARTS, SECTIONS


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


def _names(rows):
    return [overview.machine_name(machine) for machine in dict.fromkeys(rows["machine_id"])]


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.experiment)
def test_each_sentence_is_one_that_its_machine_alone_gives(section, rows):
    first, second, both = (section.verdict(part) for part in rows)
    told = [
        replace(one, machine=name)
        for name, claims in zip(_names(rows[2]), (first, second), strict=True)
        for one in claims
        if not (one in first and one in second)
    ]
    assert all(str(one).startswith(one.machine) for one in both)
    assert both == [*told, *(line for line in first if line in second)]


@pytest.mark.parametrize(
    "table",
    [pytest.param(table, id=f"{one.experiment}: {title}") for one in SECTIONS for title, table in one.tables.items()],
)
def test_each_line_of_a_table_is_one_of_its_machine(table, rows):
    first, second, both = (table.readable(part) for part in rows)
    if len(first) == 0:
        assert len(both) == 0
        return
    assert list(both["Machine"]) == [_names(rows[2])[0]] * len(first) + [_names(rows[2])[1]] * len(second)
    again = both.drop(columns="Machine")
    assert again.iloc[: len(first)].reset_index(drop=True).equals(first.reindex(columns=again.columns))


def _bare(spec):
    return {
        name: part for name, part in spec.items() if name not in ("$schema", "config", "title", "datasets", "params")
    }


@pytest.mark.parametrize("name", sorted(CHARTS))
def test_each_picture_holds_the_points_of_one_machine(name, rows):
    first, second, both = (CHARTS[name](part.drop(columns="id")).to_dict(validate=False) for part in rows)  # ids differ
    if "vconcat" not in both or name not in CHARTS:
        assert both == first  # nothing was measured for it on either
        return
    assert len(both["vconcat"]) == 2
    held = set(both["datasets"])  # named by what they hold
    assert held == set(first["datasets"]) | set(second["datasets"])
    titles = [one["title"]["text"] for one in both["vconcat"]]
    assert titles == [f"On {name}" for name in _names(rows[2])]
    for alone, together in zip((first, second), both["vconcat"], strict=True):
        assert set(_lines(alone)) == set(_lines(both)) | set(_lines(together))  # no line is of the other's rows


def _lines(spec):
    told = spec["title"].get("subtitle", []) if isinstance(spec["title"], dict) else []
    return [told] if isinstance(told, str) else told


def test_a_chart_and_a_sentence_name_dense_kernels_of_their_machine_alone(rows):
    """The one machine has no FlashAttention."""
    first, second, _ = (part[part["experiment"] == "attention"] for part in rows)
    first = first[(first["factor.name"] != "dense (flash)") & ~first["scope"].str.endswith("over dense (flash)")]
    apart = pd.concat([first, second], ignore_index=True)
    charts = CHARTS["attention_speed_up"](apart).to_dict()["vconcat"]
    claims = SECTIONS[0].verdict(apart)
    for name, chart, flash in zip(_names(apart), charts, (False, True), strict=True):
        (line,) = (line for line in _lines(chart) if "each dense kernel" in line)
        (said,) = (str(claim) for claim in claims if claim.machine == name and "Sparse attention is" in claim.answer)
        assert ("dense (flash)" in line) == flash == ("dense (flash)" in said) and "dense (tiles)" in said


def test_what_must_be_equal_everywhere_is_told_of_each_machine(rows):
    assert set(overview.deterministic(rows[2])["machine"]) == set(_names(rows[2]))


def test_a_comparison_pairs_a_machine_with_itself_whatever_the_order(rows):
    first, second, _ = rows
    found = compare_rows(pd.concat([first, second]), pd.concat([second, first]))
    assert found.same_machine and not found.regressed and {line.finding for line in found.lines} == {Kind.EQUIVALENT}
    assert {line.machine for line in found.lines} == {machine[:6] for machine in (first["machine_id"].iloc[0], OTHER)}
    verdict = compare([1.0, 1.1, 1.2] * 3, [2.0, 2.1, 2.2] * 3)
    judged = replace(found, lines=[replace(line, verdict=verdict) for line in found.lines])
    labels = list(comparison_table(judged)["label"])
    assert {label.split(":")[0] for label in labels} == {f"machine {line.machine}" for line in found.lines}
    worse = replace(found, lines=[replace(line, finding=Kind.REGRESSED) for line in found.lines])
    assert all(claim.machine for claim in comparison_verdict(worse, "x") if claim.answer.startswith("regressed"))
    fewer = compare_rows(pd.concat([first, second]), second)
    assert (
        not fewer.lost and "left out" in fewer.noise[0] and {line.finding for line in fewer.lines} == {Kind.EQUIVALENT}
    )
    across = compare_rows(first, second)
    assert not across.same_machine and not across.regressed and {line.machine for line in across.lines} == {""}
    third = first.assign(machine_id="g" * 12)
    with pytest.raises(BadInput, match="2 and 1 machines that differ; name runs of one machine"):
        compare_rows(pd.concat([first, second]), third)


def test_no_history_and_no_run_before_is_of_another_machine(stores):
    both = stores[2]
    assert since_before(both, both.resolve("all")) is None
    assert not histories(both, machine_ids=sorted(both.runs().machine_id))


@pytest.mark.thorough  # the browser's page is of two machines too
def test_the_page_of_both_opens_with_each_machine_by_name(stores, tmp_path):
    both = stores[2]
    page.build(both, both.resolve("all"), tmp_path, SECTIONS, pictures=False)
    text = (tmp_path / "index.html").read_text()
    assert "another CPU" in text and all(name in text for name in _names(both.shown(both.resolve("all"))[0]))
