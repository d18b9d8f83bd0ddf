"""The folder with notebooks and params files is found from within; results go next to them."""

from pathlib import Path

import pytest

from nanolib import paths
from nanolib.measurement import BadInput
from tests.processes import invoked

ROOT = Path(__file__).parents[1]


def _workbook(folder):
    (folder / "notebooks").mkdir(parents=True)
    (folder / "notebooks" / "attention.ipynb").touch()
    (folder / "params" / "quick").mkdir(parents=True)
    return folder


@pytest.fixture
def no_output(monkeypatch):
    monkeypatch.delenv("NANOLIB_OUTPUT")


def test_the_nearest_folder_above_counts_and_results_go_there(tmp_path, monkeypatch, no_output):
    inner = _workbook(_workbook(tmp_path / "outer") / "inner")
    monkeypatch.chdir(inner / "notebooks")
    assert paths.checkout() == inner
    assert paths.output_folder() == inner / "outputs"
    monkeypatch.setenv("NANOLIB_OUTPUT", "elsewhere")
    assert paths.output_folder() == inner / "notebooks" / "elsewhere"


def test_notebooks_of_another_project_are_not_taken_and_outside_of_any_the_message_names_init(
    tmp_path, monkeypatch, no_output
):
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "notebooks" / "mine.ipynb").touch()
    monkeypatch.chdir(tmp_path)
    assert paths.checkout() == ROOT  # the package's own
    monkeypatch.setattr(paths, "__file__", str(tmp_path / "site-packages" / "nanolib" / "paths.py"))
    with pytest.raises(BadInput, match="run `nano init DIR`"):
        paths.checkout()
    assert paths.output_folder() == tmp_path / "outputs"


def test_init_copies_the_files_to_an_empty_folder(tmp_path, monkeypatch):
    target = tmp_path / "mine"
    target.mkdir()
    ended = invoked("init", target)
    assert ended.exit_code == 0, ended.output
    for file in ("notebooks/attention.ipynb", "params/quick/attention.yml"):
        assert (target / file).read_bytes() == (ROOT / file).read_bytes()
    assert not list(target.rglob(".*"))
    monkeypatch.chdir(target)
    assert paths.checkout() == target
