"""The notebooks in JupyterLab, as a person uses them: run all cells, move a control, measure, cancel."""

import pytest

pytestmark = pytest.mark.slow


class Lab:
    """A notebook that is open in JupyterLab."""

    def __init__(self, page, address, name):
        self.page = page
        self.page.goto(address % name)
        self.page.wait_for_selector(".jp-Notebook .jp-Cell", timeout=60_000)
        self.page.wait_for_function(
            "window.jupyterapp?.shell.currentWidget?.sessionContext?.session?.kernel?.status === 'idle'",
            timeout=60_000,
        )

    def run_all(self):
        """Restart the kernel and run all cells, from no outputs on; what a person asks for in the Run menu."""
        execute = "command => void window.jupyterapp.commands.execute(command)"  # not its end
        self.page.evaluate(execute, "notebook:clear-all-cell-outputs")
        self.page.evaluate(execute, "notebook:restart-run-all")
        self.page.locator(".jp-Dialog button.jp-mod-accept").click()

    def ended(self):
        """Wait until each cell has run. Returns what they printed, and their errors."""
        cells = """window.jupyterapp.shell.currentWidget.content.widgets
            .filter(cell => cell.model.type === 'code').map(cell => cell.model)"""
        self.page.wait_for_function(
            f"{cells}.every(cell => cell.executionCount || !cell.sharedModel.getSource() || cell.outputs.toJSON().some("
            "output => output.output_type === 'error'))",
            timeout=480_000,
            polling=500,  # not with each picture: there are megabytes of outputs to look through
        )
        outputs = self.page.evaluate(f"{cells}.flatMap(cell => cell.outputs.toJSON())")
        said = "".join("".join(one["text"]) for one in outputs if one["output_type"] == "stream")
        return said, [one["evalue"] for one in outputs if one["output_type"] == "error"]

    def show(self, text):
        """Cells out of sight are not there: the one that holds the text comes into view."""
        self.page.evaluate(
            """text => {
                const notebook = window.jupyterapp.shell.currentWidget.content;
                const at = notebook.widgets.findIndex(cell => cell.model.sharedModel.getSource().includes(text));
                const go = () => notebook.scrollToItem(at, 'start');
                return go().catch(go).then(() => at);  // what runs scrolls too
            }""",
            text,
        )


def test_a_committed_notebook_shows_its_charts_before_anything_is_trusted_or_run(watched, lab):
    opened = Lab(watched.page, lab, "attention")
    opened.show("view.")
    chart = ".jp-OutputArea-output canvas, .jp-OutputArea-output svg.marks"
    opened.page.wait_for_selector(chart, timeout=60_000)
    assert opened.page.locator(chart).first.bounding_box()["width"] > 200


def test_explore_predicts_measures_keeps_copies_and_cancels(watched, lab):
    opened = Lab(watched.page, lab, "attention")
    page = opened.page
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    opened.run_all()
    opened.show("explore(experiment")
    page.wait_for_selector("button:has-text('Measure')", timeout=240_000)
    assert not opened.ended()[1]
    opened.show("explore(experiment")
    label = page.locator("label:text-is('num_heads')")
    field = page.locator(".widget-inline-hbox", has=label).locator("input")
    field.fill("2")
    field.press("Enter")
    # The kernel says what there is to copy when it has heard of the control; until then the button names the old line.
    page.locator("code", has_text="num_heads=2").wait_for(timeout=60_000)
    page.locator("button:has-text('Copy as nano run')").click()
    page.wait_for_selector("button:has-text('Copied')", timeout=60_000)
    copied = page.evaluate("() => navigator.clipboard.readText()")
    assert copied.startswith("nano run quick attention ") and "num_heads=2" in copied
    page.locator("button:has-text('Predict')").click()
    page.locator(".widget-html-content", has_text="Predicted").locator("tr").nth(1).wait_for(
        timeout=60_000
    )
    page.locator("button:has-text('Measure')").click()
    page.wait_for_selector("text=/^Starting |^[0-9]+ of /", timeout=60_000)
    page.wait_for_selector("text=Results are not stored yet.", timeout=240_000)
    page.locator(".widget-html-content", has_text="Measured").locator("tr").nth(1).wait_for(
        timeout=60_000
    )
    page.wait_for_selector(".jupyter-widgets canvas, .jupyter-widgets svg.marks", timeout=60_000)
    page.locator("button:has-text('Keep in database')").click()
    page.wait_for_selector("text=Results are in results.sqlite.", timeout=60_000)
    page.locator("button:has-text('Measure')").click()
    page.locator("button:has-text('Cancel'):not([disabled])").click(timeout=60_000)
    page.wait_for_selector("text=Canceled.", timeout=60_000)
    assert not opened.ended()[1]
