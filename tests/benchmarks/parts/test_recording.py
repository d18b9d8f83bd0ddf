import numpy as np
import pytest

from tests.benchmarks.parts.recording import (
    UNITS,
    Generation,
    Recording,
    is_called,
    judge,
    replay_ab,
)


@pytest.mark.parametrize("generations", [3, 6])
@pytest.mark.parametrize(("units", "called"), [(100.0, 0), (110.0, 20), (90.0, 20)])
def test_a_table_of_any_length_is_judged_as_nano_ab_does(generations, units, called):
    """Fewer than six pairs of processes give block times as data, and not ratios."""
    rng = np.random.default_rng(0)
    blocks = rng.lognormal(0, 0.01, (generations, 20, len(UNITS))) * UNITS
    recording = Recording([Generation(block.T, []) for block in blocks])
    verdicts = [judge(replay_ab(recording, units, rng, 60.0)) for _ in range(20)]
    assert sum(is_called(verdict, units) for verdict in verdicts) == pytest.approx(called, abs=2)


def test_too_few_blocks_have_no_verdict_and_are_not_called():
    recording = Recording([Generation(np.ones((len(UNITS), 3)), [])])
    verdict = judge(replay_ab(recording, 110.0, np.random.default_rng(0), 60.0))
    assert verdict is None and not is_called(verdict, 110.0)
