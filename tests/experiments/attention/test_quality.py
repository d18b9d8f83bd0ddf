import pytest

from nanolib.experiments.attention import cases
from nanolib.experiments.attention.cases import QualityCase

pytestmark = pytest.mark.slow


def _rows(options, **changes):
    shape = {"seq_len": 64, "d_model": 32, "num_layers": 1}
    shape |= {"seeds": 2, "steps": 2} | changes
    case = QualityCase("cpu", "", options | {"block_size": 4}, **shape)
    return {(row.metric, row.scope): row for row in case.measure(None, {})}


@pytest.fixture
def _little_text(monkeypatch):
    monkeypatch.setattr(cases, "_HELD_OUT_BATCHES", 2)
    monkeypatch.setattr(cases, "_BATCH", 2)


@pytest.mark.usefixtures("_little_text")
@pytest.mark.parametrize("options", [{"pattern": "window", "sparsity": 0.75}, {"pattern": "dca"}])
def test_a_pattern_has_a_sparsity_and_its_losses_an_interval_over_seeds(options):
    rows = _rows(options)
    sparsity = rows["sparsity", ""]
    assert sparsity.predicted == options.get("sparsity")
    assert sparsity.predicted is None or sparsity.estimate == pytest.approx(0.75, abs=0.05)
    row = rows["loss_difference", "replaced"]
    assert row.low <= row.estimate <= row.high and len(row.samples) == 2


@pytest.mark.usefixtures("_little_text")
def test_what_removes_nothing_costs_nothing():
    rows = _rows({"pattern": "window", "window": 64})
    assert rows["sparsity", ""].estimate == 0
    assert rows["loss_difference", "replaced"].estimate == pytest.approx(0, abs=2e-3)


@pytest.mark.thorough  # it trains
def test_removing_nearly_everything_from_a_model_that_looks_back_costs_loss():
    """Trained long enough to use what it sees; a window of a few bytes must then be worse than all."""
    shape = {"seq_len": 128, "num_layers": 2, "d_model": 64}
    rows = _rows({"pattern": "window", "sparsity": 0.97}, steps=150, seeds=3, **shape)
    assert rows["loss_difference", "replaced"].low > 0
