"""A stripped or stale notebook passes nbval without a word; these tests do not let it."""

import base64
import re

import nbformat
import pytest

from nanolib.experiments import ALL
from nanolib.params import read_yaml
from nanolib.paths import checkout
from tests.notebooks.parameters import cell_of

FILES = sorted((checkout() / "params").rglob("*.yml"))
every_notebook = pytest.mark.parametrize("name", ALL)


def _path(name):
    return checkout() / "notebooks" / f"{name}.ipynb"


def _cells(name):
    cells = nbformat.read(_path(name), as_version=4).cells
    return [cell for cell in cells if cell.cell_type == "code"]


def _parameters(name):
    cell = next(cell for cell in _cells(name) if "parameters" in cell.metadata.get("tags", []))
    values = {}
    exec(compile(cell.source, name, "exec"), values)
    return cell.source, {key: value for key, value in values.items() if not key.startswith("__")}


def _params(name):
    return ALL[name]().Params


@every_notebook
def test_the_committed_notebook_is_valid_short_and_was_run_in_order(name):
    notebook, cells = nbformat.read(_path(name), as_version=4), _cells(name)
    nbformat.validate(notebook)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert len(notebook.cells) <= (10 if name == "summary" else 14)
    assert _path(name).stat().st_size < 1_000_000  # so that a code host shows it
    checked = [cell for cell in cells if "NBVAL_CHECK_OUTPUT" in cell.source]
    assert bool(checked) == (name != "summary")  # what formulas predict is the same everywhere
    for cell in checked:
        assert cell.source.startswith("# NBVAL_CHECK_OUTPUT\n")
        assert cell.outputs[0].data["text/plain"].strip()
    if name != "summary":  # The answer comes before the parameters, once it is known.
        findings, chart = cells[0].outputs
        assert findings.data["text/plain"].startswith("• ") and "image/png" in chart.data
    outputs = [out for cell in cells for out in cell.outputs]
    assert not [out for out in outputs if out.output_type == "error"]
    shown = [out.get("data", {}) for out in outputs]
    charts = [data for data in shown if "application/vnd.vega.v5+json" in data]
    assert charts and all("text/plain" in data for data in charts)
    # the color type in the header of a PNG with a palette
    assert {base64.b64decode(data["image/png"])[25] for data in charts} == {3}


@every_notebook
def test_the_parameters_are_those_of_the_experiment_typed_and_explained(name):
    """Declared once, in `Params`; `python -m tests.notebooks.parameters` writes the cell."""
    source, values = _parameters(name)
    assert source == cell_of(_params(name))
    assert _params(name)(**values) == _params(name)()
    main, settings = source.split("settings: dict = {\n")
    lines = re.sub(r"\n(    |(?=\]))", "", main).splitlines()  # a list of dicts takes several
    assert len(lines) <= 14
    for line in lines:
        assert re.fullmatch(r"\w+: \w+ = .*  # .{5,}", line), line
    for line in settings.splitlines()[:-1]:  # a second = would begin a parameter of papermill's
        assert re.fullmatch(r'    "\w+": [^=]*,  # [^=]{5,}', line), line


@pytest.mark.parametrize("file", FILES, ids=lambda file: f"{file.parent.name}-{file.stem}")
def test_a_params_file_means_the_same_to_papermill_and_to_nano(file):
    """Other parameters have papermill's value from the cell, and nano's from `Params`."""
    name, values = file.stem.split("-")[0], read_yaml(file)
    assert {*values} <= {*_params(name).MAIN, "settings"}  # papermill warns of other names
    assert _params(name).collect(_parameters(name)[1] | values) == _params(name)(**values)
