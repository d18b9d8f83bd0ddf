import json
import math
import re

import pandas as pd
import pytest

from nanolib.experiments import ALL, MEASURING
from nanolib.measurement import Flag, Measurement, Status
from nanolib.params import plan_jobs
from nanolib.paths import checkout
from nanolib.report import page
from nanolib.report.theme import is_empty
from nanolib.store import Run, Store
from tests.shown import CHARTS, SECTIONS
from tests.store.rows import MACHINE


def test_an_empty_database_makes_a_page_and_charts_that_say_so(tmp_path):
    with Store(tmp_path / "empty.sqlite") as empty:
        text = page.build(empty, [], tmp_path / "report", SECTIONS).read_text()
        rows = empty.measurements(samples=True)
    assert "0 runs, 0 measurements" in text
    for name, draw in CHARTS.items():
        text = json.dumps(draw(rows).to_dict())
        assert "not measured" in text or "no " in text, name


def test_the_glossary_explains_every_flag_as_the_report_does():
    written = (checkout() / "docs" / "glossary.md").read_text(encoding="utf-8")
    assert all(f"| `{flag}` | {flag.text} |" in written for flag in Flag)


@pytest.fixture(scope="module")
def failed(tmp_path_factory):
    """The rows of runs in which every case of every notebook failed."""
    ended = Measurement("case_duration", status=Status.ERROR, message="out of luck")
    with Store(tmp_path_factory.mktemp("failed") / "results.sqlite") as store:
        for job in plan_jobs(ALL, list(MEASURING), {}, {}):
            rows = {case.case_id: (case.factors, [ended]) for case in job.cases()}
            store.add(Run(job.name, MACHINE, rows=rows))
        rows, _ = store.report_data(store.resolve("all"))
    return rows


@pytest.mark.parametrize("status", [Status.UNSUPPORTED, Status.STARTED])
@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.experiment)
def test_a_section_says_what_became_of_its_cases(failed, section, status):
    rows = failed.assign(status=status.value)
    charts = [draw(rows) for draw in section.charts.values()]
    assert all(map(is_empty, charts))
    if section.experiment in MEASURING:
        assert "out of luck" in str(section.verdict(rows)[0])
        assert f"{status}: out of luck" in str([chart.usermeta for chart in charts])


def test_a_length_of_a_million_tokens_is_written_as_the_list_of_lengths_has_it():
    whole = pd.DataFrame({"seq_len": [1048576.0, math.nan]})
    lines = page._table(whole, pd.DataFrame({"a": ["x", "y"]}))._repr_html_()
    assert re.findall("<tr[^>]*>", lines)[1:] == ['<tr data-n="1048576">', "<tr>"]
