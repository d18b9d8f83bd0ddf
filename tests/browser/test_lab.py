"""The notebooks in JupyterLab, as a person uses them: run all cells, move a control, measure, cancel."""

import os

import pytest

pytestmark = pytest.mark.slow


class Lab:
    """A notebook that is open in JupyterLab."""

    def __init__(self, watched, address, name):
        self.page = watched.page
        self.page.goto(address % name)
        self.page.wait_for_selector(".jp-Notebook .jp-Cell", timeout=60_000)
        self.page.wait_for_function(
            "window.jupyterapp?.shell.currentWidget?.sessionContext?.session?.kernel?.status === 'idle'", timeout=60_000
        )

    def run_all(self):
        self.page.evaluate("() => void window.jupyterapp.commands.execute('notebook:run-all-cells')")  # not its end

    def show(self, text):
        """Cells out of sight are not there: the one that holds the text comes into view."""
        self.page.evaluate(
            """text => {
                const notebook = window.jupyterapp.shell.currentWidget.content;
                const at = notebook.widgets.findIndex(cell => cell.model.sharedModel.getSource().includes(text));
                return notebook.scrollToItem(at, 'start').then(() => at);
            }""",
            text,
        )

    def field(self, description):
        return self.page.locator(".widget-inline-hbox, .jupyter-widgets").filter(
            has=self.page.locator(f"label:text-is('{description}')")
        )


@pytest.mark.parametrize("name", ["attention", "summary"])
def test_a_committed_notebook_shows_its_charts_before_anything_is_trusted_or_run(watched, lab, name):
    opened = Lab(watched, lab, name)
    opened.show("view.")
    chart = ".jp-OutputArea-output canvas, .jp-OutputArea-output svg.marks"
    opened.page.wait_for_selector(chart, timeout=30_000)
    assert opened.page.locator(chart).first.bounding_box()["width"] > 200


def test_what_is_picked_in_the_summary_its_charts_and_tables_follow(watched, lab):
    opened = Lab(watched, lab, "summary")
    page = opened.page
    opened.run_all()
    opened.show("panel.summary_panel")
    marks = ".jupyter-widgets svg .mark-symbol path, .jupyter-widgets canvas"
    page.wait_for_selector(marks, timeout=120_000)
    table = page.locator(".jupyter-widgets .widget-html-content", has_text="Kind")
    assert "16" in table.locator("tbody").inner_text()
    before = page.locator(".jupyter-widgets .vega-embed").first.screenshot()
    lengths = page.locator(".widget-dropdown", has_text="Sequence length").locator("select")
    lengths.select_option("32")
    page.wait_for_function(
        "() => ![...document.querySelectorAll('.widget-html-content td')].some(cell => cell.innerText === '16')",
        timeout=20_000,
    )
    page.wait_for_timeout(500)
    assert page.locator(".jupyter-widgets .vega-embed").first.screenshot() != before
    if folder := os.environ.get("NANOLIB_SCREENSHOTS"):
        page.screenshot(path=f"{folder}/summary_panel.png")


PANELS = {"attention": ("heads", "2", "num_heads=2"), "model": ("batch", "2", "batch_sizes=[2]")}


@pytest.mark.parametrize("name", PANELS)
def test_explore_predicts_measures_keeps_copies_and_cancels(watched, lab, name):
    control, value, said = PANELS[name]
    opened = Lab(watched, lab, name)
    page = opened.page
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    opened.run_all()
    opened.show(f"panel.{name}_panel")
    page.wait_for_selector("button:has-text('Measure')", timeout=240_000)
    prediction = page.locator(".widget-html-content", has_text="Predicted").first
    before = prediction.inner_text()
    field = page.locator(".widget-inline-hbox", has=page.locator(f"label:text-is('{control}')")).locator("input")
    field.fill(value)
    field.press("Enter")
    page.wait_for_function(
        "before => [...document.querySelectorAll('.widget-html-content')].some("
        "e => e.innerText.includes('Predicted') && e.innerText !== before)",
        arg=before,
        timeout=20_000,
    )
    page.locator("button:has-text('Copy as nano run')").click()
    page.wait_for_selector("button:has-text('Copied')", timeout=10_000)
    copied = page.evaluate("() => navigator.clipboard.readText()")
    assert copied.startswith(f"nano run quick {name} ") and said in copied
    page.locator("button:has-text('Measure')").click()
    page.wait_for_selector("text=/^Starting |^[0-9]+ of /", timeout=10_000)
    page.wait_for_selector("text=Measured; not kept yet.", timeout=240_000)
    page.locator(".widget-html-content", has_text="Measured here").locator("tr").nth(1).wait_for(timeout=20_000)
    page.wait_for_selector(".jupyter-widgets canvas, .jupyter-widgets svg.marks", timeout=20_000)
    page.wait_for_timeout(500)
    if folder := os.environ.get("NANOLIB_SCREENSHOTS"):
        page.screenshot(path=f"{folder}/{name}_panel.png")
    page.locator("button:has-text('Keep in database')").click()
    page.wait_for_selector("text=Kept in results.sqlite.", timeout=10_000)
    page.locator("button:has-text('Measure')").click()
    page.locator("button:has-text('Cancel'):not([disabled])").click(timeout=10_000)
    page.wait_for_selector("text=Cancelled.", timeout=20_000)


def test_the_memory_plan_follows_its_controls_and_can_be_copied(watched, lab):
    opened = Lab(watched, lab, "model")
    page = opened.page
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    opened.run_all()
    opened.show("memory_panel.memory_panel")
    said = page.locator(".widget-html-content", has_text="fits: inference; decoding; training; training, checkpointed")
    said.first.wait_for(timeout=240_000)
    field = page.locator(".widget-inline-hbox", has=page.locator("label:text-is('sequences')")).locator("input")
    field.fill("512")
    field.press("Enter")
    page.wait_for_selector("text=/training needs .* more than there is; .* Next: .*batch/", timeout=60_000)
    page.locator("button:has-text('Copy as nano plan')").click()
    page.wait_for_selector("button:has-text('Copied')", timeout=10_000)
    assert "nano plan decoder_tiny --memory 24GiB --seq-len 1024 --batch-size 512" in page.evaluate(
        "() => navigator.clipboard.readText()"
    )
    if folder := os.environ.get("NANOLIB_SCREENSHOTS"):
        page.screenshot(path=f"{folder}/memory_panel.png")


def test_the_energy_notebook_runs_all_its_cells(watched, lab):
    opened = Lab(watched, lab, "energy")
    opened.run_all()
    opened.show("run.finish()")
    opened.page.wait_for_selector("text=/run [0-9a-f]{8} is in results.sqlite/", timeout=240_000)
    opened.show("live.live_panel")
    opened.page.wait_for_selector("button:has-text('Generate')", timeout=30_000)
    assert opened.page.locator("button:has-text('Generate')").is_enabled()
