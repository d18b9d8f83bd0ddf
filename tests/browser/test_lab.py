"""Notebooks in JupyterLab as people use them: run all cells, move a control, measure, cancel."""

import pytest

pytestmark = pytest.mark.slow


def _ended(page):
    """Wait until each cell has run. Returns their errors."""
    cells = """window.jupyterapp.shell.currentWidget.content.widgets
        .filter(cell => cell.model.type === 'code').map(cell => cell.model)"""
    page.wait_for_function(
        f"{cells}.every(cell => cell.executionCount || !cell.sharedModel.getSource() || "
        "cell.outputs.toJSON().some(output => output.output_type === 'error'))",
        timeout=480_000,
        polling=500,  # not with each picture: there are megabytes of outputs to look through
    )
    outputs = page.evaluate(f"{cells}.flatMap(cell => cell.outputs.toJSON())")
    return [one["evalue"] for one in outputs if one["output_type"] == "error"]


def _show(page, text):
    """Cells out of sight are not there: the one that holds the text comes into view."""
    page.evaluate(
        """text => {
            const notebook = window.jupyterapp.shell.currentWidget.content;
            const sources = notebook.widgets.map(cell => cell.model.sharedModel.getSource());
            const at = sources.findIndex(source => source.includes(text));
            const go = () => notebook.scrollToItem(at, 'start');
            return go().catch(go).then(() => at);  // what runs scrolls too
        }""",
        text,
    )


def test_a_notebook_shows_its_charts_untrusted_and_explore_predicts_measures_keeps_and_cancels(
    watched, lab
):
    page = watched.page
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.goto(lab % "attention")
    page.wait_for_selector(".jp-Notebook .jp-Cell")
    kernel = "window.jupyterapp?.shell.currentWidget?.sessionContext?.session?.kernel"
    page.wait_for_function(f"{kernel}?.status === 'idle'")
    _show(page, "view.")
    chart = ".jp-OutputArea-output canvas, .jp-OutputArea-output svg.marks"
    page.wait_for_selector(chart)
    assert page.locator(chart).first.bounding_box()["width"] > 200
    # restart and run all cells, from no outputs on
    for command in ("notebook:clear-all-cell-outputs", "notebook:restart-run-all"):
        page.evaluate("one => void window.jupyterapp.commands.execute(one)", command)
    page.locator(".jp-Dialog button.jp-mod-accept").click()
    _show(page, "explore(experiment")
    page.wait_for_selector("button:has-text('Measure')")
    assert not _ended(page)
    _show(page, "display.Answer()")
    page.wait_for_selector(chart)
    _show(page, "explore(experiment")
    label = page.locator("label:text-is('num_heads')")
    field = page.locator(".widget-inline-hbox", has=label).locator("input")
    field.fill("2")
    field.press("Enter")
    # Until the kernel has heard of the control, the button names the old line.
    page.locator("code", has_text="num_heads=2").wait_for()
    page.locator("button:has-text('Copy as nano run')").click()
    page.wait_for_selector("button:has-text('Copied')")
    copied = page.evaluate("() => navigator.clipboard.readText()")
    assert copied.startswith("nano run quick attention ") and "num_heads=2" in copied
    page.locator("button:has-text('Predict')").click()
    page.locator(".widget-html-content", has_text="Predicted").locator("tr").nth(1).wait_for()
    page.locator("button:has-text('Measure')").click()
    page.wait_for_selector("text=/^Starting |^[0-9]+ of /")
    page.wait_for_selector("text=Results are not stored yet.")
    page.locator(".widget-html-content", has_text="Measured").locator("tr").nth(1).wait_for()
    page.wait_for_selector(".jupyter-widgets canvas, .jupyter-widgets svg.marks")
    page.locator("button:has-text('Keep')").click()
    page.wait_for_selector("text=Results are in results.sqlite.")
    page.locator("button:has-text('Measure')").click()
    page.locator("button:has-text('Cancel'):not([disabled])").click()
    page.wait_for_selector("text=Canceled.")
    assert not _ended(page)
