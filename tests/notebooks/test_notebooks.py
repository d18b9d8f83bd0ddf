"""A stripped or stale notebook passes nbval without a word; these tests do not let it."""

import base64
import re

import nbformat
import pytest

from nanolib.experiments import ALL
from nanolib.params import read_yaml
from nanolib.paths import checkout
from nanolib.run.jobs import notebooks, suites
from tests.notebooks.parameters import cell_of

NAMES = notebooks()


def _cells(name, kind="code"):
    notebook = nbformat.read(checkout() / "notebooks" / f"{name}.ipynb", as_version=4)
    return [cell for cell in notebook.cells if cell.cell_type == kind]


def _parameters(name):
    cell = next(cell for cell in _cells(name) if "parameters" in cell.metadata.get("tags", []))
    values = {}
    exec(compile(cell.source, name, "exec"), values)
    return cell, {key: value for key, value in values.items() if not key.startswith("__")}


def _params(name):
    return ALL[name]().Params


@pytest.mark.parametrize("name", NAMES)
def test_the_committed_notebook_is_valid_and_was_run_in_order(name):
    nbformat.validate(nbformat.read(checkout() / "notebooks" / f"{name}.ipynb", as_version=4))
    counts = [cell.execution_count for cell in _cells(name)]
    assert counts == list(range(1, len(counts) + 1))
    assert not [out for cell in _cells(name) for out in cell.outputs if out.output_type == "error"]


@pytest.mark.parametrize("name", NAMES)
def test_every_checked_cell_has_an_output(name):
    checked = [cell for cell in _cells(name) if "NBVAL_CHECK_OUTPUT" in cell.source]
    assert bool(checked) == (name != "summary")  # what formulas predict is the same everywhere
    for cell in checked:
        assert cell.source.startswith("# NBVAL_CHECK_OUTPUT\n")
        assert any(
            out.output_type == "stream" and out.name == "stdout" and out.text.strip()
            for out in cell.outputs
        )


@pytest.mark.parametrize("name", NAMES)
def test_the_parameters_are_those_of_the_experiment(name):
    """Declared once, in `Params`; `python -m tests.notebooks.parameters` writes the cell."""
    cell, values = _parameters(name)
    assert cell.source == cell_of(_params(name))
    assert _params(name)(**values) == _params(name)()


@pytest.mark.parametrize("name", NAMES)
def test_every_parameter_is_typed_and_explained(name):
    main, settings = _parameters(name)[0].source.split("settings: dict = {\n")
    assert len(main.splitlines()) <= 14
    for line in main.splitlines():
        assert re.fullmatch(r"\w+: \w+ = .*  # .{5,}", line), line
    for line in settings.splitlines()[:-1]:  # a second = would begin a parameter of papermill's
        assert re.fullmatch(r'    "\w+": [^=]*,  # [^=]{5,}', line), line


@pytest.mark.parametrize("suite", suites())
@pytest.mark.parametrize("name", NAMES)
def test_every_suite_has_a_params_file_that_fits(suite, name):
    values = read_yaml(checkout() / "params" / suite / f"{name}.yml")
    assert set(values) <= {*_params(name).MAIN, "settings"}  # papermill warns of other names
    assert set(values.get("settings", {})) <= set(_params(name).model_fields)


@pytest.mark.parametrize(
    "file",
    sorted((checkout() / "params").rglob("*.yml")),
    ids=lambda file: f"{file.parent.name}-{file.stem}",
)
def test_a_params_file_means_the_same_to_papermill_and_to_nano(file):
    """Other parameters have papermill's value from the cell, and nano's from `Params`."""
    name, values = file.stem.split("-")[0], read_yaml(file)
    assert _params(name).collect(_parameters(name)[1] | values) == _params(name)(**values)


@pytest.mark.parametrize("name", NAMES)
def test_charts_show_everywhere(name):
    shown = [
        out.data
        for cell in _cells(name)
        for out in cell.outputs
        if "application/vnd.vega.v5+json" in out.get("data", {})
    ]
    assert shown
    assert all({"image/png", "text/plain"} <= set(data) for data in shown)
    palette = 3  # the color type that a PNG's header names
    assert {base64.b64decode(data["image/png"])[25] for data in shown} == {palette}


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_has_few_cells_and_a_code_host_shows_it(name):
    assert len(_cells(name)) + len(_cells(name, "markdown")) <= (10 if name == "summary" else 14)
    assert (checkout() / "notebooks" / f"{name}.ipynb").stat().st_size < 1_000_000
