import pytest

from nanolib.experiments.attention import quality
from nanolib.experiments.attention.quality import QUALITY_PATTERNS, QualityCase

pytestmark = pytest.mark.slow


def _rows(pattern, target, **changes):
    shape = {"seq_len": 64, "block_size": 4, "d_model": 32, "num_layers": 1}
    shape |= {"seeds": 2, "steps": 2, "finetune_steps": 2} | changes
    case = QualityCase("cpu", pattern, pattern, target, **shape)
    return {(row.metric, row.scope): row for row in case.measure(None, {})}


@pytest.fixture
def _little_text(monkeypatch):
    monkeypatch.setattr(quality, "_HELD_OUT_BATCHES", 2)
    monkeypatch.setattr(quality, "_BATCH", 2)


@pytest.mark.usefixtures("_little_text")
@pytest.mark.parametrize("target", [0.5, 0.75])
@pytest.mark.parametrize("pattern", QUALITY_PATTERNS)
def test_every_pattern_removes_about_the_share_asked_for(pattern, target):
    rows = _rows(pattern, target)
    assert rows["sparsity", ""].estimate == pytest.approx(target, abs=0.15)
    for scope in ("replaced", "fine_tuned"):
        row = rows["loss_difference", scope]
        assert row.low <= row.estimate <= row.high and len(row.samples) == 2


@pytest.mark.usefixtures("_little_text")
def test_what_removes_nothing_costs_nothing():
    rows = _rows("window", 0.001)
    assert rows["sparsity", ""].estimate < 0.01
    for scope in ("replaced", "fine_tuned"):
        assert rows["loss_difference", scope].estimate == pytest.approx(0, abs=2e-3)


@pytest.mark.thorough  # it trains
def test_removing_nearly_everything_from_a_model_that_looks_back_costs_loss():
    """Trained long enough to use what it sees; a window of a few bytes must then be worse than all."""
    shape = {"seq_len": 128, "block_size": 8, "num_layers": 2, "d_model": 64}
    rows = _rows("window", 0.97, steps=150, seeds=3, **shape)
    assert rows["loss_difference", "replaced"].low > 0
