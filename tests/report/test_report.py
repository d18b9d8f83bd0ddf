import json
import re

import pytest

from nanolib.experiments import ALL, MEASURING
from nanolib.measurement import FLAG_TEXT, BadInput, Flag, Measurement, Status
from nanolib.paths import checkout
from nanolib.report import export, overview, page
from nanolib.report.theme import is_empty
from nanolib.run.jobs import plan
from nanolib.store import Run, Store
from tests.features import results
from tests.report.cases import attention_rows
from tests.report.rows import EVIL, MACHINE, in_turns
from tests.shown import CHARTS, SECTIONS


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """Stored runs of each notebook, and a newer one whose texts try to break out."""
    with Store(results(tmp_path_factory.mktemp("stored"))) as opened:
        times = {("dense (flash)", 256): 1.0, ("window 64", 256): 2.0}
        failed = [("dense (cudnn)", 256, Status.UNSUPPORTED, EVIL)]
        rows = in_turns("attention", attention_rows(times, failed))
        opened.add(Run("attention", MACHINE, label=EVIL, rows=rows, run_id="evil"))
        yield opened


def test_an_empty_database_makes_a_page_and_charts_that_say_so(tmp_path):
    with Store(tmp_path / "empty.sqlite") as empty:
        text = page.build(empty, [], tmp_path / "report", SECTIONS).read_text()
        rows = empty.measurements(samples=True)
    assert "There is nothing to show yet" in text
    for name, draw in CHARTS.items():
        text = json.dumps(draw(rows).to_dict())
        assert "not measured" in text or "no " in text, name


def test_the_report_is_whole_self_contained_and_escaped(store, tmp_path):
    """The list of features has the names of all files of a report, with its pictures."""
    ids = store.resolve("attention")
    index = page.build(store, ids, tmp_path / "report", SECTIONS, pictures=False)
    text = index.read_text()
    assert not re.search(r"""(src|href)=["']?(https?:)?//""", text)  # nothing is fetched
    assert "<script>alert(1)" not in text and "A <b>CPU</b>" not in text
    assert text.count("<script>") == 2
    markdown = (index.parent / "profiling_report.md").read_text()
    assert "<script>" not in markdown and not re.search(r"(?<!\\)\]\(http", markdown)
    profile = json.loads((index.parent / "attention_profile.json").read_text())
    assert len(profile["measurements"]) == len(store.measurements(["evil"]))
    (index.parent / "attention_notes.md").touch()  # a user's own
    page.build(store, store.resolve("warmup"), index.parent, SECTIONS, pictures=False)
    assert [file.name for file in index.parent.glob("attention*")] == ["attention_notes.md"]
    assert (index.parent / "warmup_summary.csv").exists()


@pytest.mark.parametrize(("ending", "headers"), [(".csv", 1), (".md", 2)])
def test_an_export_has_a_line_for_every_row(store, tmp_path, ending, headers):
    target = tmp_path / f"share{ending}"
    with pytest.raises(BadInput, match="there are no runs"):
        export.write(store, [], target)
    export.write(store, ["evil"], target)
    lines = target.read_text().strip().splitlines()
    assert len(lines) == len(store.measurements(["evil"])) + headers


def test_the_glossary_explains_every_flag_as_the_report_does():
    written = (checkout() / "docs" / "glossary.md").read_text(encoding="utf-8")
    assert all(f"| `{flag}` | {FLAG_TEXT[flag]} |" in written for flag in Flag)


@pytest.fixture(scope="module")
def failed(tmp_path_factory):
    """The rows of runs in which every case of every notebook failed."""
    why = {"status": Status.ERROR, "message": "out of luck", "details": {"attempts": 1}}
    ended = Measurement("case_duration", None, **why)
    with Store(tmp_path_factory.mktemp("failed") / "results.sqlite") as store:
        for job in plan(ALL, list(MEASURING), {}, {}):
            rows = {case.case_id: (case.factors, [ended]) for case in job.cases()}
            store.add(Run(job.name, MACHINE, rows=rows))
        rows, _ = store.shown(store.resolve("all"))
    assert set(overview.failures(rows)["message"]) == {"out of luck"}
    return rows


@pytest.mark.parametrize("status", [Status.UNSUPPORTED, Status.STARTED])
@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.experiment)
def test_a_section_says_what_became_of_its_cases(failed, section, status):
    rows = failed.assign(status=status.value)
    section.verdict(rows)
    charts = [draw(rows) for draw in (section.charts | section.files).values()]
    assert all(map(is_empty, charts))
    if section.experiment in MEASURING:
        assert "no case has a result" in str([chart.usermeta for chart in charts])
