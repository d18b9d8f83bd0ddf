import numpy as np

from nanolib.ab.pairs import Settings
from nanolib.ab.schedule import _compare
from tests.benchmarks.parts.recording import UNITS, Generation, Recording, replay_ab
from tests.benchmarks.trust import CALLED, is_called


def test_replayed_comparisons_are_judged_as_nano_ab_does():
    rng = np.random.default_rng(0)
    blocks = rng.lognormal(0, 0.01, (6, 20, len(UNITS))) * UNITS
    recording = Recording([Generation(block.T, []) for block in blocks], 0.0, 0.0)
    for units, called in ((100.0, 0), (110.0, 10), (90.0, 10)):
        verdicts = [_compare(replay_ab(recording, units, rng, 60.0), Settings()) for _ in range(10)]
        assert abs(sum(is_called(one, units, CALLED) for one in verdicts) - called) <= 1
