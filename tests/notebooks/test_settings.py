"""Parameters that a notebook's cell does not declare are in `settings`, or have their own name."""

import pytest

from nanolib.experiments import ALL
from nanolib.measurement import BadInput
from nanolib.params import plan_jobs

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
    (job,) = plan_jobs(ALL, ["model"], values, {})
    assert (job.params.seed, job.params.trace) == (3, True)
    assert job.params.generation_batch_sizes == [4, 16]  # the params file's own settings stay
    written = job.params.nest_settings(job.values)
    assert written["settings"]["seed"] == 3 and "seed" not in written
    assert Params.collect(written) == job.params


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"sead": 3}, "model.sead: unknown name; did you mean seed?"),
        ([3], "model.settings: contains [3], not `name: value` pairs; give"),
        ({1: 2}, "model.settings: contains {1: 2}, not `name: value` pairs"),
        ("{a", "model.settings: '{a' is not valid YAML"),
    ],
)
def test_a_wrong_setting_is_one_line(settings, complaint):
    for take in (lambda given: Params(**given), Params.collect):
        with pytest.raises(BadInput) as error:
            take({"settings": settings})
        (line,) = error.value.lines
        assert line.startswith(complaint)
