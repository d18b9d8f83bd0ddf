"""A page for each notebook when none of its cases gave a number."""

import functools

import pytest

from nanolib.experiments import ALL
from nanolib.measurement import Measurement, Status
from nanolib.report.page import build
from nanolib.run.suite.jobs import plan
from nanolib.store import Run, Store
from tests.shown import SECTIONS

NAMES = ["attention", "model", "warmup", "energy", "fp8", "distributed"]
MACHINE = {"machine_id": "m", "cpu": "c", "cores": 2, "ram_gib": 8}


@functools.cache
def _cases(name):
    (job,) = plan(ALL, [name], {}, {})
    return job.cases()


@pytest.mark.parametrize("status", [Status.ERROR, Status.TIMEOUT, Status.UNSUPPORTED, Status.STARTED])
@pytest.mark.parametrize("name", NAMES)
def test_a_page_says_what_became_of_the_cases(tmp_path, name, status):
    ended = Measurement("case_time", None, status=status, message="out of luck", details={"attempts": 1})
    rows = {case.case_id: (case.factors, [ended]) for case in _cases(name)}
    with Store(tmp_path / "results.sqlite") as store:
        run_id = store.add(Run(name, MACHINE, rows=rows))
        page = build(store, [run_id], tmp_path / "report", SECTIONS, pictures=False)
    assert name in {section.experiment for section in SECTIONS}
    text = page.read_text(encoding="utf-8")
    assert "out of luck" in text or status is Status.STARTED
    assert "gains no time" not in text or status is Status.UNSUPPORTED
