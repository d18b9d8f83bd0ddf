"""The report of a whole suite as its readers use it: lists, phone, dark, print, screen reader."""

import re
import shutil
import unicodedata

import pytest
from axe_playwright_python.sync_playwright import Axe
from pypdf import PdfReader

from nanolib.paths import checkout
from nanolib.report import page
from nanolib.store import Store
from tests.browser.conftest import watching
from tests.features import results
from tests.report.rows import OTHER, elsewhere
from tests.shown import SECTIONS

pytestmark = pytest.mark.slow

REFERENCE = checkout() / "outputs" / "reference" / "amd-epyc-2-cores-quick" / "results.sqlite"
READY = "body[data-ready=yes]"


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """A quick run of each notebook on one machine, and a stored one of attention of another."""
    folder = tmp_path_factory.mktemp("whole")
    shutil.copy(REFERENCE, folder / "results.sqlite")
    other = results(folder)
    elsewhere(other)
    with Store(folder / "results.sqlite") as store:
        ids = store.resolve("all")
        store.merge(other)
        ids = [*dict.fromkeys([*ids, *store.resolve("attention")])]
        return page.build(store, ids, folder / "report", SECTIONS, pictures=False)


@pytest.fixture(scope="module")
def drawn(browser, report):
    with watching(browser) as made:
        made.page.goto(report.as_uri())
        made.page.wait_for_selector(READY)
        yield made


@pytest.fixture
def still(drawn):
    """The page, which takes seconds to draw: its size and the mouse are put back."""
    yield drawn.page
    drawn.page.set_viewport_size({"width": 1280, "height": 900})
    drawn.page.mouse.move(0, 0)


def _pick(page, option):
    page.locator("#length").select_option(option)
    page.evaluate("follow()")  # the same choice again, which ends when all is drawn


def test_it_opens_from_the_file_system_and_what_tries_to_break_out_is_shown_as_text(still):
    shown = still.locator(".plot:visible")
    assert shown.count() == shown.locator("svg.marks").count() > 0
    assert "random s=0.9" in still.locator(".verdict:visible").first.inner_text()
    assert still.locator("body").inner_text().count("<script>alert(1)</script>") >= 2


def test_a_point_tells_its_interval_and_what_it_is_compared_with(still):
    still.locator("#attention_speed_up .mark-symbol.role-mark path").first.hover(force=True)
    said = still.locator("#vg-tooltip-element.visible").inner_text()
    assert all(word in said for word in ("from", "to", "over dense (")), said


def test_a_machine_that_is_picked_answers_by_itself(still):
    machines = still.locator("#machine")
    options = machines.locator("option").evaluate_all("some => some.map(one => one.value)")
    assert OTHER in options and len(options) == 3
    for option in filter(None, options):
        machines.select_option(option)
        still.evaluate("follow()")
        of = still.locator("section:visible, .card:visible").evaluate_all(
            "some => some.map(one => one.dataset.machine).filter(Boolean)"
        )
        assert set(of) == {option}
        widths = still.locator("section:visible .plot svg.marks").evaluate_all(
            "some => some.map(one => one.getBoundingClientRect().width)"
        )
        assert widths and min(widths) > 200  # also of a part that had been hidden
    machines.select_option("")


def test_what_is_picked_every_chart_and_table_follows(still, drawn):
    lengths = still.locator("#length option").evaluate_all("some => some.map(one => one.value)")
    assert lengths[0] == "" and len(lengths) > 3
    points = still.locator("section:visible .mark-symbol.role-mark path")
    alone, whole = set(), points.count()
    for length in lengths[1:4]:
        _pick(still, length)
        found = still.evaluate(
            """() => ({
                rows: all('section:not([hidden]) tr[data-n]:not([hidden])')
                    .map(row => row.dataset.n),
                drawn: all('section:not([hidden]) .mark-symbol.role-mark path').length,
            })"""
        )
        assert set(found["rows"]) == {length} or set(found["rows"]) == {length, ""}
        assert 0 < found["drawn"] < whole
        cards = still.locator(".card:visible [data-only]:visible").evaluate_all(
            "some => some.map(one => one.dataset.only)"
        )
        assert set(cards) <= {"", length}
        alone |= {*cards} - {""}
    assert alone  # a card answers for a length by what was measured there
    _pick(still, "")
    assert points.count() == whole
    assert still.locator(".card:visible .mini svg.marks").count() >= 3
    assert drawn.complaints == []


@pytest.mark.parametrize("width", [390, 1280])
def test_it_fits_the_screen(still, width):
    still.set_viewport_size({"width": width, "height": 900})
    still.reload()
    still.wait_for_selector(READY)
    still.evaluate("document.querySelectorAll('details').forEach(one => { one.open = true; })")
    root = "document.documentElement"
    assert still.evaluate(f"{root}.scrollWidth <= {root}.clientWidth")
    plots = "all('#model_performance .plot').map(e => e.getBoundingClientRect()"
    assert still.evaluate(f"new Set({plots}.left)).size") == (1 if width < 800 else 3)
    narrower = "svg.getBoundingClientRect().width <= svg.closest('.plot').clientWidth + 1"
    assert still.evaluate(f"all('.plot svg.marks').every(svg => {narrower})")


def test_printed_it_says_all_that_the_page_says(watched, report, tmp_path):
    opened = watched.page
    opened.goto(report.as_uri())
    opened.wait_for_selector(READY)
    opened.pdf(path=tmp_path / "report.pdf", prefer_css_page_size=True)
    printed = "".join(read.extract_text() for read in PdfReader(tmp_path / "report.pdf").pages)

    def bare(text):
        text = unicodedata.normalize("NFKC", text).casefold()  # a font may join letters
        return re.sub(r"\W", "", text)

    held = bare(printed)
    cells = opened.evaluate(
        "all('td, th, .verdict li, figcaption b, h2').filter(e => !e.closest('[hidden]'))"
        ".map(e => e.textContent)"
    )
    missing = [cell for cell in dict.fromkeys(cells) if bare(cell) not in held]
    assert len(cells) > 500 and not missing, missing[:10]
    opened.emulate_media(media="print")
    opened.set_viewport_size({"width": 1032, "height": 700})  # A4 across, less its margins
    opened.evaluate("document.querySelectorAll('details').forEach(one => { one.open = true; })")
    # Charts become narrower a moment after the page.
    opened.wait_for_function(
        "all('table, svg.marks').every(e => e.getBoundingClientRect().right <= 1034)"
    )


def test_it_can_be_read_aloud_and_seen(still):
    still.evaluate("document.querySelectorAll('details').forEach(one => { one.open = true; })")
    found = [
        (one["id"], one["nodes"][0]["html"][:300])
        for one in Axe().run(still).response["violations"]
        if one["impact"] in ("serious", "critical")
    ]
    assert not found
    described = still.evaluate(
        "() => all('.panels .plot').filter(e => e.offsetParent)"
        ".map(e => e.getAttribute('aria-label'))"
    )
    assert described and all(len(text) > 20 for text in described)
