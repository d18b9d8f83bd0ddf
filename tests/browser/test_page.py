"""The report as a person opens it: a file, no network."""

import json

import pytest

from nanolib.report import page
from nanolib.store import Store
from tests.browser.conftest import as_it_was, watching
from tests.report.rounds import in_turns
from tests.report.rows import EVIL, MACHINE, attention_rows
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
    from nanolib.measurement import Status
    from nanolib.store.schema import Run

    folder = tmp_path_factory.mktemp("report")
    with Store(folder / "results.sqlite") as store:
        store.add(Run("attention", MACHINE, label="first", rows=in_turns("attention", attention_rows(TIMES))))
        evil = attention_rows(
            {(name, n): 2 * ms for (name, n), ms in TIMES.items()} | {(EVIL, 1024): 9.0},
            failed=[("dense (cudnn)", 1024, Status.UNSUPPORTED, EVIL * 50)],
        )
        store.add(
            Run("attention", MACHINE | {"machine_id": "m2", "cpu": EVIL}, label=EVIL, rows=in_turns("attention", evil))
        )
        return page.build(store, store.resolve("all"), folder / "report", SECTIONS, pictures=False)


@pytest.fixture(scope="module")
def drawn(browser, report):
    with watching(browser) as made:
        made.page.on("dialog", lambda dialog: made.complaints.append(f"dialog: {dialog.message}"))
        made.page.goto(report.as_uri())
        made.page.wait_for_function("Number(document.body.dataset.drawn) === Object.keys(specs).length", timeout=60_000)
        yield made


@pytest.fixture
def opened(drawn):
    with as_it_was(drawn.page):
        yield drawn


def _marks(page):
    """How many measured points the first chart shows."""
    return page.locator("#chart-attention_latency .mark-symbol.role-mark path").count()


def test_it_opens_from_the_file_system_and_complains_of_nothing(opened):
    assert opened.complaints == []
    assert opened.page.locator(".chart svg.marks").count() == opened.page.locator(".chart").count()
    assert "window 64" in opened.page.locator(".verdict").first.inner_text()


def test_a_question_shows_its_main_chart_and_the_others_on_a_click(opened):
    def seen():
        return [chart.get_attribute("id") for chart in opened.page.locator(".chart").all() if chart.is_visible()]

    assert [name for name in seen() if "attention" in name] == ["chart-attention_latency"]
    opened.page.get_by_text("More charts: speed up, memory").click()
    assert {"chart-attention_speed_up", "chart-attention_efficiency"} <= set(seen())
    assert "Under the roofline: not drawn, no timing has its work" in opened.page.locator("#attention").inner_text()


@pytest.mark.parametrize("width", [1280, 1920])
def test_nothing_overflows(opened, width):
    opened.page.set_viewport_size({"width": width, "height": 900})
    opened.page.evaluate("document.querySelectorAll('details').forEach(one => { one.open = true; })")
    assert opened.page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")


def test_a_chart_under_a_caption_of_one_line_has_the_whole_width(opened):
    shown = "shown => document.querySelectorAll('figcaption .line').forEach(line => { line.style.display = shown; })"
    opened.page.evaluate(shown, "none")
    figure = opened.page.locator("#chart-attention_latency")
    buttons, drawn = (figure.locator(part).bounding_box() for part in (".save", ".scroll"))
    opened.page.evaluate(shown, "")
    assert buttons["y"] + buttons["height"] <= drawn["y"]


def test_a_choice_is_followed_by_every_chart(opened):
    everything = _marks(opened.page)
    opened.page.locator("#picks").get_by_label("Sequence length").select_option("4,096")
    opened.page.wait_for_timeout(300)
    assert 0 < _marks(opened.page) < everything
    machine = opened.page.locator("#picks").get_by_label("Machine").locator("option").nth(1).inner_text()
    of_length = _marks(opened.page)
    opened.page.locator("#picks").get_by_label("Machine").select_option(machine)
    opened.page.wait_for_timeout(300)
    assert 0 < _marks(opened.page) < of_length
    opened.page.locator("#picks").get_by_label("Machine").select_option("all")
    opened.page.locator("#picks").get_by_label("Sequence length").select_option("all")
    opened.page.wait_for_timeout(300)
    assert _marks(opened.page) == everything and opened.complaints == []


def test_a_point_tells_its_interval_and_method(opened):
    opened.page.locator("#chart-attention_latency .mark-symbol.role-mark path").first.hover(force=True)
    tip = opened.page.locator("#vg-tooltip-element")
    tip.wait_for(state="visible", timeout=5000)
    said = tip.inner_text()
    assert all(word in said for word in ("interval from", "method", "perf_counter", "flags", "blocks"))


def test_what_tries_to_break_out_is_shown_as_text(opened, report):
    assert opened.complaints == []
    assert opened.page.locator("body").inner_text().count("<script>alert(1)</script>") >= 2
    source = report.read_text()
    assert "<script>alert" not in source
    data = source.split("const page = ", 1)[1].split(";\n", 1)[0]
    assert "<" not in data and json.loads(data)


@pytest.mark.parametrize("kind", ["empty", "failed"])
def test_a_page_without_numbers_says_so(watched, tmp_path, kind):
    from nanolib.measurement import Status
    from nanolib.store.schema import Run

    with Store(tmp_path / "results.sqlite") as store:
        if kind == "failed":
            rows = attention_rows({}, failed=[("dense (flash)", 1024, Status.OOM, "too little memory")])
            store.add(Run("attention", MACHINE, rows=rows))
        made = page.build(
            store, store.resolve("all") if kind == "failed" else [], tmp_path / "report", SECTIONS, pictures=False
        )
    watched.page.goto(made.as_uri())
    watched.page.wait_for_timeout(1500)
    said = watched.page.locator("body").inner_text()
    assert ("nothing to show yet" if kind == "empty" else "too little memory") in said and watched.complaints == []
