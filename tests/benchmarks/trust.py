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
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from parts.neighbors import busy_neighbors
from parts.peers import RULES
from parts.recording import (
    IN_A_ROW_S,
    UNITS,
    VERSIONS,
    WINDOW_S,
    WORKS,
    Generation,
    Recording,
    record,
    repository,
    request,
    tag,
)
from scipy.stats import binomtest

from nanolib.ab.pairs import Pairs, Settings, Task
from nanolib.ab.processes import CHILDREN
from nanolib.ab.schedule import (
    FEWEST_PAIRS,
    MIN_PAIRS,
    TIMED,
    WARM_UP_S,
    compare_versions,
    ends_after,
    is_precise_enough,
    next_look,
    precise_enough,
)
from nanolib.ab.versions import Version, checked_out
from nanolib.stats.compare import THRESHOLD, Kind, Verdict, compare_processes
from nanolib.stats.signed_ranks import hodges_lehmann

# What is replayed: B against A → units of B, of which A has a hundred; what was recorded is scaled to them.
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
_CALLED = (Kind.REGRESSED, Kind.SUSPECT, Kind.IMPROVED)


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
    options.add_argument(
        "--load", nargs="*", choices=("quiet", "loaded"), default=["quiet", "loaded"]
    )
    chosen = options.parse_args()
    loads = [loaded for loaded in (False, True) if ("quiet", "loaded")[loaded] in chosen.load]
    with repository() as folder, checked_out(list(map(tag, VERSIONS)), folder) as versions:
        cells = [(work, loaded) for loaded in loads for work in WORKS]
        seconds = chosen.minutes * 60 / len(cells)
        recordings = {cell: record(versions, *cell, seconds) for cell in cells}
        _print_ratios(recordings)
        _print_rates(recordings)
        if chosen.live:
            _print_live(versions, loads, chosen.live, chosen.budget)


def _print_ratios(recordings: dict[tuple[str, bool], Recording]) -> None:
    """What more work is seen to take, all sets of processes together: it must be as much as was added."""
    print("\nratio to A over all sets of processes")
    for (work, loaded), recording in recordings.items():
        seen = []
        for version in range(1, len(UNITS)):
            logs = [np.median(np.log(g.pairs[version] / g.pairs[0])) for g in recording.generations]
            low, middle, high = 100 * np.expm1(hodges_lehmann(np.array(logs)))
            seen.append(f"{middle:+.1f} [{low:+.1f} … {high:+.1f}] %")
        name = work + (", loaded" if loaded else "")
        print(f"    {name:26}" + "".join(f"{text:>24}" for text in seen), flush=True)


def _rate(called: int, of: int) -> str:
    low, high = binomtest(called, of).proportion_ci(0.95, "exact")
    return f"{called / of:5.1%} [{low:4.0%} … {high:4.0%}]"


def _replayed_ab(
    recording: Recording, units: float, rng: np.random.Generator, budget_s: float
) -> np.ndarray:
    """What nano ab would judge, with so much time: B / A of each pair of processes; every set of them is in it once."""
    pairs, spent_s = Pairs(), 0.0
    for number, at in enumerate(rng.permutation(len(recording.generations)), 1):
        generation = recording.generations[at]
        found = _replayed_pairs(generation, units, rng, budget_s)
        pairs += found
        spent_s += _seconds(recording, generation, found, number)
        if ends_after(number, spent_s, budget_s) or is_precise_enough({"": pairs}, Settings.rel_ci):
            break
    return np.asarray(pairs.data()[1])


def _called(verdict: Verdict, units: float) -> bool:
    """Whether B is called slower, or faster where it does less."""
    return verdict.kind in _CALLED and (verdict.ratio > 1) == (units >= UNITS[0])


def _beyond(verdict: Verdict, units: float) -> bool:
    """Whether it is called beyond the threshold."""
    return _called(verdict, units) and verdict.kind is not Kind.SUSPECT


def _apart(verdict: Verdict, units: float) -> bool:
    """Whether its interval leaves out 1, to the side where B is, or to the slower one."""
    return verdict.interval.low > 1 if units >= UNITS[0] else verdict.interval.high < 1


def _seconds(recording: Recording, generation: Generation, pairs: Pairs, number: int) -> float:
    """What the n-th pair of processes takes of a user's time."""
    makes = recording.fork_server_s if (number - 1) % CHILDREN == 0 else 0.0
    return (
        makes + recording.fork_s + WARM_UP_S + len(pairs.a) / generation.pairs.shape[1] * WINDOW_S
    )


def _drawn(rng: np.random.Generator) -> Sequence[int]:
    """Which versions stand for A and for B: any two, since what each does more is known and taken off.

    A set of processes is one draw only of how they came to lie; with either of two versions as A it is two, around the truth.
    """
    return rng.choice(len(UNITS), 2, replace=False).tolist()


def _replayed_pairs(
    generation: Generation, units: float, rng: np.random.Generator, budget_s: float
) -> Pairs:
    """Pairs of one pair of processes until they are precise enough or used up."""
    a, b = (
        generation.pairs[version] / UNITS[version] * done
        for version, done in zip(_drawn(rng), (UNITS[0], units), strict=True)
    )
    most, n = max(FEWEST_PAIRS, round(budget_s / Settings.budget_s * len(a))), MIN_PAIRS
    while n < most and not precise_enough(a[:n], b[:n], Settings.rel_ci):
        n = next_look(n)
    n = min(n, most, len(a))
    return Pairs(a[:n].tolist(), b[:n].tolist(), [n])


def _in_turn(recording: Recording, at: int, version: int, units: float) -> list[np.ndarray]:
    """Calls of all sets of processes from one on, ms, as if the version did so many units of work."""
    order = [*recording.generations[at:], *recording.generations[:at]]
    return [generation.calls[version] / UNITS[version] * units for generation in order]


def _replayed_peer(
    rule: Callable, recording: Recording, units: float, rng: np.random.Generator, length: int
) -> bool:
    """A for so many sets of processes in a row, then B for as many; the rule says whether the second is slower."""
    start, (a, b) = int(rng.integers(len(recording.generations))), _drawn(rng)
    first = _in_turn(recording, start, a, UNITS[0])[:length]
    then = _in_turn(recording, start, b, units)[length : 2 * length]
    sides = [np.concatenate(calls) / 1000 for calls in (first, then)]
    return rule(*(sides if units >= UNITS[0] else reversed(sides)))


def _print_rates(recordings: dict[tuple[str, bool], Recording]) -> None:
    rng = np.random.default_rng(0)
    for budget_s in (12.0, 36.0, 60.0):
        measuring = budget_s * TIMED
        length = round(measuring / 2 / IN_A_ROW_S)
        print(
            f"\nB called slower, or faster where it is (ours: regressed, improved or suspect), {REPLAYS} replays per cell: "
            f"nano ab with {budget_s:.0f} s, all included; the others with {measuring:.0f} s of calls"
        )
        for loaded in (False, True):
            chosen = [r for (_, ld), r in recordings.items() if ld is loaded]
            if not chosen:
                continue
            print(f"  {'loaded' if loaded else 'quiet'}: " + "".join(f"{e:>22}" for e in EFFECTS))
            ours = {
                units: [_replayed_ab(chosen[k % 3], units, rng, budget_s) for k in range(REPLAYS)]
                for units in EFFECTS.values()
            }
            for name, threshold, holds in (
                ("nano ab", THRESHOLD, _called),
                ("  regressed or improved", THRESHOLD, _beyond),
                ("  the same at 2.5 %", _SHARP, _beyond),
                ("  interval apart from 1", THRESHOLD, _apart),
            ):
                verdicts = {
                    units: [compare_processes(r, threshold=threshold) for r in all_of]
                    for units, all_of in ours.items()
                }
                _print_row(
                    name, [sum(holds(v, units) for v in found) for units, found in verdicts.items()]
                )
            if 2 * length > min(len(r.generations) for r in chosen):
                print(
                    "    the recording is too short for A and then B of this length: raise --minutes"
                )
                continue
            for name, rule in RULES.items():
                called = [
                    sum(
                        _replayed_peer(rule, chosen[k % 3], units, rng, length)
                        for k in range(REPLAYS)
                    )
                    for units in EFFECTS.values()
                ]
                _print_row(name, called)


def _print_row(name: str, called: list[int]) -> None:
    print(f"    {name:26}" + "".join(f"{_rate(n, REPLAYS):>22}" for n in called), flush=True)


def _print_live(versions: list[Version], loads: list[bool], count: int, budget: float) -> None:
    """Each version against the first, and the first against the one that is 5 % slower, by `nano ab` itself."""
    print(f"\nlive: nano ab with {budget:.0f} s per comparison, the starts included")
    cells = [(name, 0, at) for at, name in enumerate(VERSIONS) if at]
    cells.append(("-5 %", list(VERSIONS).index("+5 %"), 0))
    for loaded in loads:
        for name, a, b in cells:
            verdicts, seconds = [], []
            with busy_neighbors(loaded):
                for i in range(count):
                    work = WORKS[i % 3]
                    task = Task("call", "live", {"name": work}, (request(work), request(work)))
                    start = time.monotonic()
                    (found,) = compare_versions(
                        (versions[a], versions[b]), [task], Settings(budget_s=budget)
                    )
                    seconds.append(time.monotonic() - start)
                    verdicts += found.verdicts.values()
            truth = UNITS[b] / UNITS[a]
            called = sum(v.kind in _CALLED for v in verdicts)
            apart = sum(not v.interval.low <= 1 <= v.interval.high for v in verdicts)
            holds = sum(v.interval.low <= truth <= v.interval.high for v in verdicts)
            kinds = [v.kind for v in verdicts]
            words = ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))
            rates = "; ".join(
                f"{what} {_rate(n, len(kinds))}"
                for what, n in (
                    ("called", called),
                    ("interval apart from 1", apart),
                    ("holds the truth", holds),
                )
            )
            print(
                f"  {'loaded' if loaded else 'quiet':7}{name:12} {rates}  ({words}; {np.median(seconds):.0f} s each)",
                flush=True,
            )


if __name__ == "__main__":
    if shutil.which("git") is None:
        sys.exit("trust: git is not installed")
    main()
