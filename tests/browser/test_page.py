"""The report as a person opens it: a file, no network."""

import pytest

from nanolib.measurement import Status
from nanolib.report import page
from nanolib.store import Run, Store
from tests.browser.conftest import as_it_was, watching
from tests.report.cases import attention_rows
from tests.report.rows import EVIL, MACHINE, in_turns
from tests.shown import SECTIONS

pytestmark = pytest.mark.slow

TIMES = {
    ("dense (flash)", 1024): 16.0,
    ("window 64", 1024): 8.0,
    ("dense (flash)", 4096): 250.0,
    ("window 64", 4096): 100.0,
}


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """Two runs, of two machines and labels; the second's label and messages try to break out."""
    folder = tmp_path_factory.mktemp("report")
    slower = {case: 2 * ms for case, ms in TIMES.items()} | {(EVIL, 1024): 9.0}
    failed = [("dense (cudnn)", 1024, Status.UNSUPPORTED, EVIL * 50)]
    evil = MACHINE | {"machine_id": "m2", "cpu": EVIL}
    runs = [(MACHINE, "first", TIMES, []), (evil, EVIL, slower, failed)]
    with Store(folder / "results.sqlite") as store:
        for machine, label, times, lost in runs:
            rows = in_turns("attention", attention_rows(times, lost))
            store.add(Run("attention", machine, label=label, rows=rows))
        return page.build(store, store.resolve("all"), folder / "report", SECTIONS, pictures=False)


@pytest.fixture(scope="module")
def drawn(browser, report):
    with watching(browser) as made:
        made.page.on("dialog", lambda dialog: made.complaints.append(f"dialog: {dialog.message}"))
        made.page.goto(report.as_uri())
        made.page.wait_for_selector("body[data-drawn=yes]")
        yield made


@pytest.fixture
def opened(drawn):
    with as_it_was(drawn.page):
        yield drawn


def test_it_opens_from_the_file_system_and_what_tries_to_break_out_is_shown_as_text(opened):
    assert opened.complaints == []
    shown = opened.page.locator(".plot:visible")
    assert shown.count() == shown.locator("svg.marks").count() > 0
    assert "window 64" in opened.page.locator(".verdict:visible").first.inner_text()
    assert opened.page.locator("body").inner_text().count("<script>alert(1)</script>") >= 2


def test_a_point_tells_its_interval_and_what_it_is_compared_with(opened):
    opened.page.locator("#attention_speed_up .mark-symbol.role-mark path").first.hover(force=True)
    tip = opened.page.locator("#vg-tooltip-element")
    tip.wait_for(state="visible", timeout=5000)
    said = tip.inner_text()
    assert all(word in said for word in ("from", "to", "over dense (flash)", "sparsity")), said


def test_a_machine_that_is_picked_answers_by_itself(opened):
    page, machines = opened.page, opened.page.locator("#machine")
    for option in (MACHINE["machine_id"], "m2"):
        machines.select_option(option)
        page.wait_for_selector("body[data-drawn=yes]")
        of = page.locator("section:visible, .card:visible").evaluate_all(
            "some => some.map(one => one.dataset.machine).filter(Boolean)"
        )
        assert set(of) == {option} and f"machine={option}" in page.url
        assert page.locator("section:visible .plot:visible svg.marks").count() > 0
    machines.select_option("")
