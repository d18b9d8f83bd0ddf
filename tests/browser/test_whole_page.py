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
from tests.report.rows import OTHER, earlier, elsewhere
from tests.shown import SECTIONS

pytestmark = pytest.mark.slow

REFERENCE = checkout() / "outputs" / "reference" / "amd-epyc-2-cores-quick" / "results.sqlite"
READY = "body[data-ready=yes]"


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """A quick run of each notebook, an earlier one of some, and attention of another machine."""
    folder = tmp_path_factory.mktemp("whole")
    shutil.copy(REFERENCE, folder / "results.sqlite")
    with Store(folder / "results.sqlite") as store:
        ids = store.resolve("all")
        for change in (elsewhere, earlier):
            other = results(folder)
            change(other)
            store.merge(other)
        earlier_models = [run for run in store.resolve("model") if run.startswith("eeee")]
        ids = [*dict.fromkeys([*store.resolve("attention"), *earlier_models, *ids])]
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


def _pick(page, **choice):
    for name in ("machine", "run", "model", "n"):
        page.locator(f"select[name={name}]").select_option(choice.get(name, ""))
    page.evaluate("follow()")  # the same choice again, which ends when all is drawn


def _options(page, name):
    options = page.locator(f"select[name={name}] option")
    return options.evaluate_all("some => some.map(one => one.value)")[1:]


def _found(page):
    """What is left: of cards and lines what they are of, and how many points and bars."""
    return page.evaluate(
        """() => ({
            cards: all('.card:not([hidden])').map(one => one.hash.slice(1).split('-')[0]),
            texts: all('.card:not([hidden]) [data-only]:not([hidden])').map(one => one.innerText),
            lines: all('section:not([hidden]) tr:not([hidden])').map(one => ({...one.dataset})),
            drawn: all('section:not([hidden]) .role-mark path').filter(one =>
                one.closest('.mark-symbol, .mark-rect')).length,
        })"""
    )


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
    options = _options(still, "machine")
    assert OTHER in options and len(options) == 2
    for option in options:
        _pick(still, machine=option)
        of = still.locator("section:visible, .card:visible").evaluate_all(
            "some => some.map(one => one.dataset.machine).filter(Boolean)"
        )
        assert set(of) == {option}
        widths = still.locator("section:visible .plot svg.marks").evaluate_all(
            "some => some.map(one => one.getBoundingClientRect().width)"
        )
        assert widths and min(widths) > 200  # also of a part that had been hidden
    _pick(still)


def test_each_list_filters_cards_charts_and_tables(still, drawn):
    _pick(still)
    whole, texts = _found(still), set()
    assert len(whole["cards"]) == 6
    assert all(len(_options(still, name)) > 1 for name in ("run", "model", "n"))
    for name in ("run", "model", "n"):
        for option in _options(still, name)[:3]:
            _pick(still, **{name: option})
            found = _found(still)
            lines = {line[name].split(" (")[0] for line in found["lines"] if name in line}
            assert lines == {option}
            assert 0 < found["drawn"] < whole["drawn"]
            assert 0 < len(found["cards"]) < 6
            texts |= {*found["texts"]}
    assert len(texts - {*whole["texts"], ""}) > 2  # they answer by what was measured there
    _pick(still)
    assert _found(still) == whole
    assert still.locator(".card:visible .mini svg.marks").count() >= 3
    assert drawn.complaints == []


def test_a_run_shows_all_that_it_measured_even_if_a_newer_run_measured_it_again(still):
    run = next(run for run in _options(still, "run") if run.startswith("eeee"))
    _pick(still, run=run)
    found = _found(still)
    assert found["cards"] == ["attention"] and found["drawn"] > 20
    assert "1,024" in found["texts"][0]
    _pick(still, run=run, machine=OTHER)
    assert _found(still)["cards"] == []  # the run is of the other machine


def test_lists_combine_and_each_sentence_is_about_what_is_left(still):
    _pick(still, model="small", n="256")
    found = _found(still)
    assert found["cards"] == ["model"]
    assert "small (dense, float32), batch 1, 256 tokens" in found["texts"][0]
    lines = [line for line in found["lines"] if "model" in line]
    assert lines and {(line["model"], line["n"]) for line in lines} == {("small", "256")}
    hidden = still.locator("#changes, #failed, #energy").evaluate_all(
        "some => some.map(one => one.hidden)"
    )
    assert hidden == [True] * 3
    newest = next(run for run in _options(still, "run") if not run.startswith(("eeee", "ffff")))
    _pick(still, model="small", n="256", run=newest)
    assert _found(still)["cards"] == []
    _pick(still)


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
