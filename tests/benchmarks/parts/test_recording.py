import numpy as np

from nanolib.ab.schedule import compare_pairs
from nanolib.stats.compare import THRESHOLD
from tests.benchmarks.parts.recording import UNITS, Generation, Recording, replay_ab
from tests.benchmarks.trust import CALLED, is_called


def test_replayed_comparisons_are_judged_as_nano_ab_does():
    rng = np.random.default_rng(0)
    blocks = rng.lognormal(0, 0.01, (6, 20, len(UNITS))) * UNITS
    recording = Recording([Generation(block.T, []) for block in blocks], 0.0, 0.0)
    for units, called in ((100.0, 0), (110.0, 10), (90.0, 10)):
        replays = [replay_ab(recording, units, rng, 60.0) for _ in range(10)]
        verdicts = [compare_pairs(one, THRESHOLD) for one in replays]
        assert abs(sum(is_called(one, units, CALLED) for one in verdicts) - called) <= 1
