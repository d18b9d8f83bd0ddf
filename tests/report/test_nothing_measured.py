"""A page of notebooks none of whose cases gave a number."""

import pytest

from nanolib.experiments import ALL
from nanolib.measurement import Measurement, Status
from nanolib.report.page import build
from nanolib.run.jobs import plan
from nanolib.store import Run, Store
from tests.report.rows import MACHINE
from tests.shown import SECTIONS


@pytest.mark.parametrize("status", [Status.ERROR, Status.UNSUPPORTED, Status.STARTED])
def test_a_page_says_what_became_of_the_cases(tmp_path, status):
    names = [name for name in ALL if name != "summary"]
    ended = Measurement(
        "case_duration", None, status=status, message="out of luck", details={"attempts": 1}
    )
    with Store(tmp_path / "results.sqlite") as store:
        for job in plan(ALL, names, {}, {}):
            rows = {case.case_id: (case.factors, [ended]) for case in job.cases()}
            store.add(Run(job.name, MACHINE, rows=rows))
        page = build(store, store.resolve("all"), tmp_path / "report", SECTIONS, pictures=False)
    text = page.read_text(encoding="utf-8")
    assert "out of luck" in text or status is Status.STARTED
    assert "no case gave a number" in text
    assert "gains no time" not in text or status is Status.UNSUPPORTED
