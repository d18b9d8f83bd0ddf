"""The report of a whole suite, as its readers use it: lists, phone, dark, print, a screen reader."""

import gzip
import json
import re
import shutil
import unicodedata

import pytest
from axe_playwright_python.sync_playwright import Axe
from pypdf import PdfReader

from nanolib.paths import checkout
from nanolib.report import page
from nanolib.store import Store
from tests.browser.conftest import as_it_was, watching
from tests.report.rows import STORED, elsewhere
from tests.shown import SECTIONS

pytestmark = pytest.mark.slow

REFERENCE = checkout() / "outputs" / "reference" / "amd-epyc-2-cores-quick" / "results.sqlite"
DRAWN = "Number(document.body.dataset.drawn) === Object.keys(specs).length"


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """A quick run of each notebook on one machine, and stored ones of another."""
    folder = tmp_path_factory.mktemp("whole")
    shutil.copy(REFERENCE, folder / "results.sqlite")
    other = folder / "other.sqlite"
    other.write_bytes(gzip.decompress(STORED.read_bytes()))
    elsewhere(other)
    with Store(folder / "results.sqlite") as store:
        store.merge(other)
        return page.build(store, store.resolve("all"), folder / "report", SECTIONS, pictures=False)


def _opened(watched, report):
    watched.page.goto(report.as_uri())
    watched.page.wait_for_function(DRAWN, timeout=120_000)
    return watched.page


@pytest.fixture
def opened(watched, report):
    return _opened(watched, report)


@pytest.fixture(scope="module")
def resized(browser, report):
    """For each width the charts are drawn anew."""
    with watching(browser) as made:
        yield _opened(made, report)


@pytest.fixture(scope="module")
def drawn(browser, report):
    with watching(browser) as made:
        _opened(made, report)
        yield made


@pytest.fixture
def still(drawn, report):
    """The page for tests that leave it as it was."""
    with as_it_was(drawn.page):
        yield drawn.page
    if any(_left(drawn.page).values()):
        _opened(drawn, report)


def _pick(page, title, option):
    page.locator("#picks").get_by_label(title).select_option(option)
    page.evaluate("() => follow()")  # waits for every chart


def _left(page):
    return page.evaluate("() => kept(chosen())")


def test_what_is_picked_every_chart_and_table_follows_or_says_why_not(still, drawn):
    choices = still.evaluate("choices")
    assert list(choices) == [
        "Model",
        "Sequence length",
    ]  # of one machine, each notebook's newest run
    for title, choice in choices.items():
        for option in list(choice["options"])[:8]:
            _pick(still, title, option)
            found = still.evaluate(
                """() => [...document.querySelectorAll('section[data-asked]')].map(section => ({
                    none: section.querySelector('.none').innerText,
                    open: !section.querySelector('.answers').hidden,
                    lines: [...section.querySelectorAll('tr[data-place]')].filter(row => !row.hidden)
                        .map(row => JSON.parse(row.dataset.place)),
                    charts: [...section.querySelectorAll('figure')].map(figure => ({
                        name: figure.id.slice(6),
                        none: figure.querySelector('.none').textContent,
                        hidden: figure.querySelector('.scroll').hidden,
                        marks: figure.querySelectorAll('svg.marks .mark-symbol.role-mark path, '
                            + 'svg.marks .mark-rect.role-mark path, svg.marks .mark-line.role-mark path').length,
                    })),
                }))"""
            )
            at, values = still.evaluate("picks").index(choice["pick"]), choice["options"][option]
            for section in found:
                assert bool(section["none"]) != section["open"]
                if not section["open"]:
                    assert re.match(
                        r"Nothing (at n = .* here; lengths: |of .* here; (run|model)s: )",
                        section["none"],
                    )
                    continue
                assert all(place[at] is None or place[at] in values for place in section["lines"])
                for chart in section["charts"]:
                    assert chart["hidden"] if chart["none"] else chart["marks"], (
                        title,
                        option,
                        chart,
                    )
        _pick(still, title, "all")
    assert drawn.complaints == []


def test_the_choice_is_in_the_address(opened, report):
    _pick(opened, "Sequence length", "1,024")
    opened.locator("#short a", has_text="sparse attention").click()
    address = opened.url
    assert "sequence-length=1%2C024" in address and "at=attention" in address
    opened.goto("about:blank")
    opened.goto(address)
    opened.wait_for_function(DRAWN, timeout=60_000)
    assert opened.locator("#picks").get_by_label("Sequence length").input_value() == "1,024"
    assert _left(opened)["n"] == [1024]
    opened.goto(
        report.as_uri() + "#sequence-length=7&model=constructor"
    )  # nothing of the kind is here
    opened.wait_for_timeout(300)
    assert _left(opened) == {"run": None, "model": None, "n": None}


@pytest.mark.parametrize("width", [390, 1280])
def test_it_fits_the_screen(resized, width):
    resized.set_viewport_size({"width": width, "height": 900})
    resized.evaluate("document.querySelectorAll('details').forEach(one => { one.open = true; })")
    resized.wait_for_timeout(400)
    resized.wait_for_function(DRAWN, timeout=120_000)
    assert resized.evaluate(
        "document.documentElement.scrollWidth <= document.documentElement.clientWidth"
    )
    panels = (
        "all('#chart-model_performance .role-title text').filter(e => ['inference', 'next token', 'training step']"
        ".includes(e.textContent))"
    )
    columns = f"new Set({panels}.map(e => Math.round(e.getBoundingClientRect().left / 50))).size"
    resized.wait_for_function(
        f"{columns} === {1 if width < 800 else 3}", timeout=60_000
    )  # stacked, or side by side
    used = "document.querySelector('#chart-model_performance svg.marks').getBoundingClientRect().width / rooms()"
    resized.wait_for_function(
        f"0.9 < {used} && {used} <= 1.0", timeout=60_000
    )  # drawn anew for the new width
    cut = """() => all('.role-legend-label text').filter(e =>
        e.getBoundingClientRect().right > e.closest('svg.marks').getBoundingClientRect().right + 1).map(e => e.textContent)"""
    assert resized.evaluate(cut) == []


def test_printed_it_says_all_that_the_page_says(opened, tmp_path):
    opened.pdf(path=tmp_path / "report.pdf", prefer_css_page_size=True)
    printed = "".join(read.extract_text() for read in PdfReader(tmp_path / "report.pdf").pages)

    def bare(text):
        return re.sub(r"\W", "", unicodedata.normalize("NFKC", text))  # a font may join letters

    held = bare(printed)
    said = "td, th, .verdict li, figcaption b, h2"
    cells = opened.evaluate(f"() => all('{said}').map(e => e.textContent)")
    missing = [cell for cell in dict.fromkeys(cells) if bare(cell) and bare(cell) not in held]
    assert len(cells) > 500 and not missing, missing[:10]
    opened.emulate_media(media="print")
    opened.set_viewport_size({"width": 1032, "height": 700})  # A4 across, less its margins
    opened.evaluate("document.querySelectorAll('details').forEach(one => { one.open = true; })")
    cut = opened.evaluate(
        """() => all('table, svg.marks').filter(e => e.getBoundingClientRect().right > 1034)
            .map(e => e.closest('section').id)"""
    )
    assert cut == []


def test_it_can_be_read_aloud_and_seen(still):
    still.evaluate("document.querySelectorAll('details').forEach(one => { one.open = true; })")
    found = [
        one
        for one in Axe().run(still).response["violations"]
        if one["impact"] in ("serious", "critical")
    ]
    assert not found, json.dumps(
        [(one["id"], one["nodes"][0]["html"][:300]) for one in found], indent=1
    )
    described = still.evaluate(
        "() => [...document.querySelectorAll('figure .plot[role=graphics-document]')].map(e => e.getAttribute('aria-label'))"
    )
    assert len(described) == len(still.evaluate("Object.keys(specs)")) and all(
        len(text) > 20 for text in described
    )
