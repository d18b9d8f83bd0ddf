"""Compare how often `nano ab` and other harnesses are right here, quiet and loaded: `make bench`.

Real work is timed in versions that do 0, 3, 5 or 10 % more of it. Each recording, of one work and
load, has both ways of collecting: blocks interleaved, and one version after the other. Comparisons
are replayed from it. Any two versions serve as A and B, since what each does more is known and
divided out. How often each harness calls B slower is printed with its exact 95 % interval. The
budget of `nano ab` includes its starts and forks. The others have the seconds that it may measure.
`--minutes` limits the recording.
"""

import argparse
import sys
from pathlib import Path

import numpy as np
from scipy.stats import binomtest

sys.path.insert(0, str(Path(__file__).parents[2]))

from nanolib.ab.schedule import TIMED, compare_pairs
from nanolib.stats.compare import THRESHOLD, Kind
from nanolib.stats.intervals import hodges_lehmann
from tests.benchmarks.parts.peers import RULES
from tests.benchmarks.parts.recording import (
    IN_A_ROW_S,
    UNITS,
    VERSIONS,
    WORKS,
    record,
    replay_ab,
    replay_peer,
    work_versions,
)

# B against A → units of B, of which A has a hundred.
EFFECTS = {
    "A again": 100.0,
    "+2 %": 102.0,
    "+3 %": 103.0,
    "+5 %": 105.0,
    "+10 %": 110.0,
    "-5 %": 100 / 1.05,
}
BEYOND = (Kind.REGRESSED, Kind.IMPROVED)
CALLED = (*BEYOND, Kind.SUSPECT)
_SHARP = 0.025  # a threshold at which a true 5 % must be called regressed, or improved
REPLAYS = 200
LOADS = ("quiet", "loaded")


def main():
    """Record, replay, and print."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--minutes", type=float, default=30.0, help="of recording, over all cells")
    options.add_argument("--budget", type=float, default=60.0, help="seconds per comparison")
    options.add_argument("--load", nargs="*", choices=LOADS, default=LOADS)
    chosen = options.parse_args()
    seconds = chosen.minutes * 60 / len(WORKS) / len(chosen.load)
    with work_versions() as versions:
        for load in chosen.load:
            recorded = {work: record(versions, work, load == "loaded", seconds) for work in WORKS}
            # it must be as much as was added
            _print_row(f"{load}: ratio to A", [*VERSIONS][1:])
            for work, recording in recorded.items():
                _print_row(work, (_ratio(recording, at) for at in range(1, len(UNITS))))
            _print_rates([*recorded.values()], chosen.budget)


def _ratio(recording, version):
    logs = [np.median(np.log(one.pairs[version] / one.pairs[0])) for one in recording.generations]
    low, middle, high = 100 * np.expm1(hodges_lehmann(np.array(logs)))
    return f"{middle:+.1f} [{low:+.1f} … {high:+.1f}] %"


def _rate(called):
    test = binomtest(sum(called), len(called))
    low, high = test.proportion_ci(0.95, "exact")
    return f"{test.statistic:5.1%} [{low:4.0%} … {high:4.0%}]"


def _print_row(name, texts):
    print(f"    {name:26}" + "".join(f"{text:>24}" for text in texts), flush=True)


def _print_rates(recordings, budget_s):
    """Print how often B is called slower, or faster (ours: regressed, improved or suspect)."""
    rng, columns = np.random.default_rng(0), []
    length = round(budget_s * TIMED / 2 / IN_A_ROW_S)
    rules = RULES
    if 2 * length > min(len(recording.generations) for recording in recordings):
        print("    the recording is too short for A and then B of this length: raise --minutes")
        rules = {}
    drawn = [recordings[i % len(recordings)] for i in range(REPLAYS)]
    for units in EFFECTS.values():
        pairs = [replay_ab(of, units, rng, budget_s) for of in drawn]
        verdicts, sharp = (
            [compare_pairs(one, threshold) for one in pairs] for threshold in (THRESHOLD, _SHARP)
        )
        found = {
            "nano ab": [is_called(one, units, CALLED) for one in verdicts],
            "  regressed or improved": [is_called(one, units, BEYOND) for one in verdicts],
            "  the same at 2.5 %": [is_called(one, units, BEYOND) for one in sharp],
            "  interval apart from 1": [_is_apart(one.interval, units) for one in verdicts],
        }
        for name, rule in rules.items():
            found[name] = [replay_peer(rule, of, units, rng, length) for of in drawn]
        columns.append({name: _rate(called) for name, called in found.items()})
    seconds = f"{budget_s:.0f} s, of which {budget_s * TIMED:.0f} s are for calls"
    _print_row(f"{REPLAYS} replays of {seconds}", EFFECTS)
    for name in columns[0]:
        _print_row(name, (column[name] for column in columns))


def is_called(verdict, units, kinds):
    """Whether B is called slower, or faster if it does less."""
    return verdict.kind in kinds and (verdict.ratio > 1) == (units >= UNITS[0])


def _is_apart(interval, units):
    """Whether it leaves out 1, on the side of B, or on the slower one."""
    return interval.low > 1 if units >= UNITS[0] else interval.high < 1


if __name__ == "__main__":
    main()
