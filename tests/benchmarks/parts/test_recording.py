import numpy as np
import pytest

from nanolib.ab.pairs import Settings
from nanolib.ab.schedule import _compare
from tests.benchmarks.parts.recording import UNITS, Generation, Recording, replay_ab
from tests.benchmarks.trust import CALLED, is_called


@pytest.mark.parametrize(("units", "called"), [(100.0, 0), (110.0, 10), (90.0, 10)])
def test_replayed_comparisons_are_judged_as_nano_ab_does(units, called):
    rng = np.random.default_rng(0)
    blocks = rng.lognormal(0, 0.01, (6, 20, len(UNITS))) * UNITS
    recording = Recording([Generation(block.T, []) for block in blocks], 0.0, 0.0)
    verdicts = [_compare(replay_ab(recording, units, rng, 60.0), Settings()) for _ in range(10)]
    found = sum(is_called(verdict, units, CALLED) for verdict in verdicts)
    assert found == pytest.approx(called, abs=1)
