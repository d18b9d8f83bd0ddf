"""Parameters that a notebook's cell does not declare are in `settings`, or have their own name."""

import json

import pytest
from click.testing import CliRunner

from nanolib.cli import main
from nanolib.experiments import ALL
from nanolib.measurement import BadInput
from nanolib.params import StrictModel
from nanolib.run.jobs import plan

Params = ALL["model"]().Params


@pytest.mark.parametrize(
    "values",
    [
        {"settings": {"seed": 3, "trace": True}},
        {"settings": "{seed: 3, trace: true}"},  # as papermill's -p hands it over
        {"settings": {"seed": 3, "trace": False}, "trace": "true"},  # its own name wins
    ],
)
def test_a_setting_is_accepted_in_settings_and_by_its_own_name(values):
    assert Params(**values) == Params.collect(values) == Params(seed=3, trace=True)
    assert Params(label="mine").replace(**values) == Params(seed=3, trace=True, label="mine")
    (job,) = plan(ALL, ["model"], values, {})
    assert (job.params.seed, job.params.trace) == (3, True)
    assert job.params.generation_batch_sizes == [4, 16]  # the params file's own settings stay
    written = job.params.nested(job.values)
    assert written["settings"]["seed"] == 3 and "seed" not in written
    assert Params.collect(written) == job.params


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"sead": 3}, "model.sead: unknown name; did you mean seed?"),
        ([3], "model.settings: must be a mapping of names, got [3]; write {name: v"),
        ({1: 2}, "model.settings: must be a mapping of names, got {1: 2}; write"),
        ("{a", "model.settings: '{a' is not valid YAML"),
    ],
)
def test_a_wrong_setting_is_one_line(settings, complaint):
    for take in (lambda given: Params(**given), Params.collect):
        with pytest.raises(BadInput) as error:
            take({"settings": settings})
        (line,) = error.value.lines
        assert line.startswith(complaint)


def test_a_notebook_that_declares_all_of_its_parameters_has_no_settings(tmp_path, monkeypatch):
    class All(StrictModel):
        size: int = 1

    assert All.collect({"size": 2, "settings": "a variable of the notebook"}) == All(size=2)
    assert All.nested({"size": 2}) == {"size": 2}
    for folder in ("notebooks", "params/quick"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "params" / "quick" / "all.yml").touch()
    cell = {"metadata": {"tags": ["parameters"]}, "source": ["size: int = 1  # how large"]}
    (tmp_path / "notebooks" / "all.ipynb").write_text(json.dumps({"cells": [cell]}))
    monkeypatch.chdir(tmp_path)
    ended = CliRunner().invoke(main, ["run", "all", "--help"])
    assert ended.exit_code == 0 and "size: int = 1" in ended.output
    assert "settings" not in ended.output
