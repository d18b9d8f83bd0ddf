"""Compare how often `nano ab` and other harnesses are right on this machine, quiet and loaded: `make bench`.

Real work is timed in versions that do 0, 3, 5 or 10 % more of it. Each recording, of one work and load, has both ways of
collecting: blocks interleaved, and one version after the other. Comparisons are replayed from it. Any two versions serve as A
and B, since what each does more is known and divided out. How often each harness calls B slower is printed with its exact 95 %
interval. The budget of `nano ab` includes its starts and forks. The others have the seconds that it may measure. `--live N`
adds N real `nano ab` comparisons per cell, as long as a user would wait for them. `--minutes` limits the recording.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from scipy.stats import binomtest

sys.path.insert(0, str(Path(__file__).parents[2]))

from nanolib.ab.pairs import Settings, Task
from nanolib.ab.schedule import TIMED, compare_versions
from nanolib.ab.versions import Version, checked_out
from nanolib.stats.compare import Kind, Verdict
from nanolib.stats.signed_ranks import hodges_lehmann
from tests.benchmarks.parts.neighbors import busy_neighbors
from tests.benchmarks.parts.peers import RULES
from tests.benchmarks.parts.recording import (
    BEYOND,
    IN_A_ROW_S,
    UNITS,
    VERSIONS,
    WORKS,
    Recording,
    is_called,
    judge,
    record,
    replay_ab,
    replay_peer,
    repository,
    request,
    tag,
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
_SHARP = 0.025  # a threshold at which a true 5 % must be called regressed, or improved
REPLAYS = 200
LOADS = ("quiet", "loaded")


def main() -> None:
    """Record, replay, and print."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--minutes", type=float, default=30.0, help="of recording, over all cells")
    options.add_argument(
        "--live", type=int, default=1, help="comparisons per cell through nano ab itself"
    )
    options.add_argument(
        "--budget", type=float, default=60.0, help="seconds for a live comparison, all included"
    )
    options.add_argument("--load", nargs="*", choices=LOADS, default=LOADS)
    chosen = options.parse_args()
    with repository() as folder, checked_out(list(map(tag, VERSIONS)), folder) as versions:
        cells = [(work, load) for load in LOADS if load in chosen.load for work in WORKS]
        seconds = chosen.minutes * 60 / len(cells)
        recordings = {
            (work, load): record(versions, work, load == "loaded", seconds) for work, load in cells
        }
        print("\nratio to A over all sets of processes")  # it must be as much as was added
        for (work, load), recording in recordings.items():
            _print_row(f"{work}, {load}", (_ratio(recording, at) for at in range(1, len(UNITS))))
        for budget_s in (12.0, 36.0, 60.0):
            _print_rates(recordings, budget_s)
        if chosen.live:
            _print_live(versions, chosen.load, chosen.live, chosen.budget)


def _ratio(recording: Recording, version: int) -> str:
    logs = [np.median(np.log(one.pairs[version] / one.pairs[0])) for one in recording.generations]
    low, middle, high = 100 * np.expm1(hodges_lehmann(np.array(logs)))
    return f"{middle:+.1f} [{low:+.1f} … {high:+.1f}] %"


def _rate(called: int, of: int) -> str:
    low, high = binomtest(called, of).proportion_ci(0.95, "exact")
    return f"{called / of:5.1%} [{low:4.0%} … {high:4.0%}]"


def _print_row(name: str, texts: Iterable[str]) -> None:
    print(f"    {name:26}" + "".join(f"{text:>24}" for text in texts), flush=True)


def _print_rates(recordings: dict[tuple[str, str], Recording], budget_s: float) -> None:
    rng = np.random.default_rng(0)
    length = round(budget_s * TIMED / 2 / IN_A_ROW_S)
    print(
        f"\nB called slower, or faster where it is (ours: regressed, improved or suspect), {REPLAYS} replays per cell: "
        f"nano ab with {budget_s:.0f} s, all included; the others with {budget_s * TIMED:.0f} s of calls"
    )
    for load in dict.fromkeys(load for _, load in recordings):
        ofs = [recording for (_, of), recording in recordings.items() if of == load]
        drawn = [ofs[i % len(ofs)] for i in range(REPLAYS)]
        is_long = 2 * length <= min(len(of.generations) for of in ofs)
        called = defaultdict(list)
        for units in EFFECTS.values():
            pairs = [replay_ab(of, units, rng, budget_s) for of in drawn]
            verdicts, sharp = [judge(one) for one in pairs], [judge(one, _SHARP) for one in pairs]
            found = {
                "nano ab": [is_called(one, units) for one in verdicts],
                "  regressed or improved": [is_called(one, units, BEYOND) for one in verdicts],
                "  the same at 2.5 %": [is_called(one, units, BEYOND) for one in sharp],
                "  interval apart from 1": [_is_apart(one, units) for one in verdicts],
            }
            for name, rule in RULES.items() if is_long else ():
                found[name] = [replay_peer(rule, of, units, rng, length) for of in drawn]
            for name, each in found.items():
                called[name].append(_rate(sum(each), REPLAYS))
        _print_row(load, EFFECTS)
        for name, rates in called.items():
            _print_row(name, rates)
        if not is_long:
            print("    the recording is too short for A and then B of this length: raise --minutes")


def _is_apart(verdict: Verdict | None, units: float) -> bool:
    """Whether the interval leaves out 1, on the side of B, or on the slower one."""
    if verdict is None:
        return False
    return verdict.interval.low > 1 if units >= UNITS[0] else verdict.interval.high < 1


def _print_live(versions: list[Version], loads: list[str], count: int, budget: float) -> None:
    """Print verdicts of `nano ab`: each version against the first, and the first against "+5 %"."""
    print(f"\nlive: nano ab with {budget:.0f} s per comparison, the starts included")
    cells = [(name, 0, at) for at, name in enumerate(VERSIONS) if at]
    cells.append(("-5 %", list(VERSIONS).index("+5 %"), 0))
    for load in loads:
        for name, a, b in cells:
            verdicts, start = [], time.monotonic()
            with busy_neighbors(load == "loaded"):
                for i in range(count):
                    work = WORKS[i % len(WORKS)]
                    task = Task("call", "live", {"name": work}, (request(work), request(work)))
                    sides, settings = (versions[a], versions[b]), Settings(budget_s=budget)
                    (found,) = compare_versions(sides, [task], settings)
                    verdicts += found.verdicts.values()
            seconds, truth = (time.monotonic() - start) / count, UNITS[b] / UNITS[a]
            kinds, intervals = [v.kind for v in verdicts], [v.interval for v in verdicts]
            words = ", ".join(f"{count} {kind}" for kind, count in Counter(kinds).items())
            counts = {
                "called": sum(kind in (*BEYOND, Kind.SUSPECT) for kind in kinds),
                "interval apart from 1": sum(not low <= 1 <= high for low, _, high in intervals),
                "holds the truth": sum(low <= truth <= high for low, _, high in intervals),
            }
            rates = "; ".join(f"{what} {_rate(n, len(kinds))}" for what, n in counts.items())
            print(f"  {load:7}{name:12} {rates}  ({words}; {seconds:.0f} s each)", flush=True)


if __name__ == "__main__":
    if shutil.which("git") is None:
        sys.exit("trust: git is not installed")
    main()
