"""Whose word can be trusted: `nano ab` beside other harnesses on this machine, quiet and loaded: `make bench`.

Real work is timed in versions that do 0, 3, 5 or 10 % more of it. One recording per work and load holds both ways of
collecting: blocks interleaved, and one version after the other. From it comparisons are replayed, all at the same time of
measuring, in which any two versions stand for A and B, since what each does more is known and taken off; how often each
harness calls B slower is printed with its exact 95 % interval. `--live N` adds N real `nano ab` comparisons per cell, as long as
a user would wait for them; `--minutes` says how long the recording may take.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import multiprocessing
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from parts.peers import RULES, asv_interval
from scipy.stats import binomtest

from nanolib.regression.client import CHILDREN, VersionProcess
from nanolib.regression.rounds import (
    ENOUGH_GENERATIONS,
    GENERATIONS,
    MIN_PAIRS,
    TIMED,
    Pairs,
    Settings,
    Task,
    block_calls,
    compare_versions,
    next_look,
    precise_enough,
)
from nanolib.regression.worktree import Version, checked_out
from nanolib.stats.compare import Kind, compare_paired, confirm, hodges_lehmann

WORKS = ("matmul", "block", "decode")
VERSIONS = {"A": 100, "A again": 100, "+3 %": 103, "+5 %": 105, "+10 %": 110}
EFFECTS = list(VERSIONS)[1:]
UNITS = list(VERSIONS.values())
ALARMS = (Kind.REGRESSED, Kind.SUSPECT)
REPLAYS = 200


def main() -> None:
    """Record, replay, and print."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--minutes", type=float, default=12.0, help="of recording, over all cells")
    options.add_argument("--live", type=int, default=1, help="comparisons per cell through nano ab itself")
    options.add_argument(
        "--budget", type=float, default=60.0, help="seconds for a live comparison, both rounds included"
    )
    options.add_argument(
        "--recordings", metavar="FILE", help="JSON: replay these where the file is there, else keep ours in it"
    )
    options.add_argument("--load", nargs="*", choices=("quiet", "loaded"), default=["quiet", "loaded"])
    chosen = options.parse_args()
    loads = [loaded for loaded in (False, True) if ("quiet", "loaded")[loaded] in chosen.load]
    with _repository() as repository, checked_out(list(map(_tag, VERSIONS)), repository) as versions:
        cells = [(work, loaded) for loaded in loads for work in WORKS]
        if chosen.recordings and Path(chosen.recordings).is_file():
            recordings = _load_recordings(Path(chosen.recordings))
        else:
            seconds = chosen.minutes * 60 / len(cells)
            recordings = {}
            for work, loaded in cells:
                recordings[work, loaded] = _record(versions, work, loaded, seconds)
                if chosen.recordings:
                    _save_recordings(recordings, Path(chosen.recordings))
        _print_ratios(recordings)
        _print_rates(recordings)
        _print_time_to_trust(recordings)
        if chosen.live:
            _print_live(versions, loads, chosen.live, chosen.budget)


def _tag(version: str) -> str:
    return f"units-{list(VERSIONS).index(version)}"


@contextlib.contextmanager
def _repository() -> Iterator[Path]:
    """A repository whose revisions differ in how many units of work they do."""
    git = ["git", "-c", "user.name=trust", "-c", "user.email=trust@localhost", "-c", "commit.gpgsign=false"]
    source = (Path(__file__).parent / "parts" / "work.py").read_text()
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        subprocess.run([*git, "init", "--quiet", made], check=True)
        for version, units in VERSIONS.items():
            (folder / "work.py").write_text(source.replace("UNITS = 100", f"UNITS = {units}"))
            subprocess.run([*git, "-C", made, "add", "work.py"], check=True)
            subprocess.run([*git, "-C", made, "commit", "--quiet", "--allow-empty", "-m", version], check=True)
            subprocess.run([*git, "-C", made, "tag", _tag(version)], check=True)
        yield folder


def _burn() -> None:
    """Work on one core that comes and goes."""
    rng = random.Random(0)
    while True:
        end = time.monotonic() + rng.uniform(0.2, 2.0)
        while time.monotonic() < end:
            sum(range(10_000))
        time.sleep(rng.uniform(0.2, 2.0))


@contextlib.contextmanager
def _load(wanted: bool) -> Iterator[None]:
    if not wanted:
        yield
        return
    process = multiprocessing.get_context("spawn").Process(target=_burn, daemon=True)
    process.start()
    try:
        yield
    finally:
        process.kill()
        process.join()


@dataclass
class Generation:
    """What one set of processes, one per version, gave.

    Attributes:
        pairs: Block medians, ms, shape [versions, blocks], interleaved.
        calls: Per version, call times, ms, one version after the other.
    """

    pairs: np.ndarray
    calls: list[np.ndarray]


@dataclass
class Recording:
    """What one work did under one load: `start_s` is how long it takes to start two versions, `fork_s` to fork them."""

    generations: list[Generation]
    start_s: float
    fork_s: float


def _save_recordings(recordings: dict[tuple[str, bool], Recording], path: Path) -> None:
    cells = [
        {
            "work": work,
            "loaded": loaded,
            "start_s": recording.start_s,
            "fork_s": recording.fork_s,
            "generations": [
                {"pairs": generation.pairs.tolist(), "calls": [calls.tolist() for calls in generation.calls]}
                for generation in recording.generations
            ],
        }
        for (work, loaded), recording in recordings.items()
    ]
    path.write_text(json.dumps(cells), encoding="utf-8")


def _load_recordings(path: Path) -> dict[tuple[str, bool], Recording]:
    def generation(cell: dict) -> Generation:
        return Generation(np.array(cell["pairs"]), [np.array(calls) for calls in cell["calls"]])

    return {
        (cell["work"], cell["loaded"]): Recording(
            [generation(one) for one in cell["generations"]], cell["start_s"], cell["fork_s"]
        )
        for cell in json.loads(path.read_text(encoding="utf-8"))
    }


# Of interleaved blocks of two versions, in each pair of processes.
_WINDOW_S = Settings.budget_s * TIMED / 2 / GENERATIONS
_IN_A_ROW_S = 1.0  # of calls, per version
_MOST_SETS = 100  # of processes, until an interval is given up


def _request(work: str) -> dict[str, object]:
    return {"do": "function", "function": f"work:{work}", "setup": ""}


def _record(versions: list[Version], work: str, loaded: bool, seconds: float) -> Recording:
    """Both ways of collecting in turn, in processes that are often replaced."""
    recording = Recording([], 0.0, np.inf)
    end = time.monotonic() + seconds
    with _load(loaded), contextlib.ExitStack() as stack:
        sides = [stack.enter_context(VersionProcess(version, 120, forks=True)) for version in versions]
        while time.monotonic() < end or len(recording.generations) < 2 * GENERATIONS:
            start = time.monotonic()
            for side in sides:
                side.retire()
            for pair in (sides[:2], sides[2:]):
                began = time.monotonic()
                for side in pair:
                    side.begin()
                for side in pair:
                    side.begun()
                    side.send(**_request(work), rows=False)
                for side in pair:
                    side.receive()
                recording.fork_s = min(recording.fork_s, time.monotonic() - began)
            if not recording.generations:
                recording.start_s = (time.monotonic() - start) * 2 / len(sides)
            call_ms = max(sum(side.time_block(2, keep=False)[-1]) for side in sides)
            calls = block_calls(call_ms)
            pairs = _interleaved(sides, calls, len(sides) / 2 * _WINDOW_S)
            recording.generations.append(Generation(pairs, [_in_a_row(side, calls) for side in sides]))
            for side in sides:
                side.ask(do="next")
    print(
        f"  recorded {work}{', loaded' if loaded else ''}: {len(recording.generations)} sets of processes, call {call_ms:.1f} ms",
        flush=True,
    )
    return recording


def _interleaved(sides: list[VersionProcess], calls: int, seconds: float) -> np.ndarray:
    rows = []
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        row = [0.0] * len(sides)
        for i in random.sample(range(len(sides)), len(sides)):
            row[i] = float(np.median(sides[i].time_block(calls, keep=False)))
        rows.append(row)
    return np.array(rows).T


def _in_a_row(side: VersionProcess, calls: int) -> np.ndarray:
    times: list[float] = []
    end = time.monotonic() + _IN_A_ROW_S
    while time.monotonic() < end:
        times += [call for (call,) in side.time_block(calls, keep=False)]
    return np.array(times)


# what was recorded, and replays of it


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


def _replayed_ab(recording: Recording, effect: int, rng: np.random.Generator, share: float) -> Kind:
    """Two rounds as nano ab would end them, with such a share of its time; every set of processes is in one of them only."""
    own = rng.permutation(len(recording.generations))
    rounds = []
    for chosen in (own[:GENERATIONS], own[GENERATIONS : 2 * GENERATIONS]):
        rounds.append(sum((_replayed_pairs(recording.generations[g], effect, rng, share) for g in chosen), Pairs()))
        first = compare_paired(*rounds[0].data())
        if first.kind is Kind.EQUIVALENT:
            return first.kind
    return confirm(first, compare_paired(*rounds[1].data()), compare_paired(*sum(rounds, Pairs()).data())).kind


def _drawn(rng: np.random.Generator) -> Sequence[int]:
    """Which versions stand for A and for B: any two, since what each does more is known and taken off.

    A set of processes is one draw only of how they came to lie; with either of two versions as A it is two, around the truth.
    """
    return rng.choice(len(UNITS), 2, replace=False).tolist()


def _replayed_pairs(generation: Generation, effect: int, rng: np.random.Generator, share: float) -> Pairs:
    """Pairs of one pair of processes until they are precise enough or used up."""
    a, b = (
        generation.pairs[version] / UNITS[version] * units
        for version, units in zip(_drawn(rng), (UNITS[0], UNITS[effect]), strict=True)
    )
    most, n = max(1, round(share * len(a))), MIN_PAIRS
    while n < most and not precise_enough(a[:n], b[:n], Settings.precision):
        n = next_look(n)
    n = min(n, most)
    return Pairs(a[:n].tolist(), b[:n].tolist(), [n])


def _in_turn(recording: Recording, at: int, version: int, units: int) -> list[np.ndarray]:
    """Calls of all sets of processes from one on, ms, as if the version did so many units of work."""
    order = [*recording.generations[at:], *recording.generations[:at]]
    return [generation.calls[version] / UNITS[version] * units for generation in order]


def _replayed_peer(rule: Callable, recording: Recording, effect: int, rng: np.random.Generator, length: int) -> bool:
    """A for so many sets of processes in a row, then B for as many."""
    start, (a, b) = int(rng.integers(len(recording.generations))), _drawn(rng)
    first = _in_turn(recording, start, a, UNITS[0])[:length]
    then = _in_turn(recording, start, b, UNITS[effect])[length : 2 * length]
    return rule(np.concatenate(first) / 1000, np.concatenate(then) / 1000)


def _print_rates(recordings: dict[tuple[str, bool], Recording]) -> None:
    rng = np.random.default_rng(0)
    for share in (0.2, 0.6, 1.0):
        measuring = 2 * GENERATIONS * _WINDOW_S * share  # two rounds of A and B
        length = round(measuring / 2 / _IN_A_ROW_S)
        print(
            f"\nB called slower (ours: regressed or suspect), {measuring:.0f} s of measuring, {REPLAYS} replays per cell"
        )
        for loaded in (False, True):
            chosen = [r for (_, ld), r in recordings.items() if ld is loaded]
            if not chosen:
                continue
            print(f"  {'loaded' if loaded else 'quiet'}: " + "".join(f"{e:>22}" for e in EFFECTS))
            ours = [[_replayed_ab(chosen[k % 3], e, rng, share) for k in range(REPLAYS)] for e in range(1, 5)]
            _print_row("nano ab", [sum(kind in ALARMS for kind in kinds) for kinds in ours])
            _print_row("nano ab, regressed alone", [sum(kind is Kind.REGRESSED for kind in kinds) for kinds in ours])
            if 2 * length > min(len(r.generations) for r in chosen):
                print("    the recording is too short for A and then B of this length: raise --minutes")
                continue
            for name, rule in RULES.items():
                called = [
                    sum(_replayed_peer(rule, chosen[k % 3], e, rng, length) for k in range(REPLAYS))
                    for e in range(1, 5)
                ]
                _print_row(name, called)


def _print_row(name: str, called: list[int]) -> None:
    print(f"    {name:26}" + "".join(f"{_rate(n, REPLAYS):>22}" for n in called), flush=True)


def _print_time_to_trust(recordings: dict[tuple[str, bool], Recording]) -> None:
    """Seconds until the interval of the ratio is ±2 %, starting of processes included, and how often it then holds."""
    rng = np.random.default_rng(1)
    print(
        "\ntime to trust: seconds until the ratio's interval is ± 2 %, starts included; how often it then holds the true +5 %"
    )
    for loaded in (False, True):
        ours, theirs = [], []
        for (_, ld), recording in recordings.items():
            if ld is loaded:
                ours += [_ours_until(recording, rng) for _ in range(REPLAYS // 3)]
                theirs += [_asv_until(recording, rng) for _ in range(REPLAYS // 3)]
        if not ours:
            continue
        print(f"  {'loaded' if loaded else 'quiet'}")
        for name, results in (("nano ab", ours), ("asv (99 % of single calls)", theirs)):
            seconds = [s for s, _ in results if np.isfinite(s)]
            holds = _rate(sum(h for _, h in results), len(results))
            reached = (
                f"{np.median(seconds):5.1f} s" if len(seconds) > len(results) / 2 else "not reached in the recording"
            )
            print(f"    {name:28} {reached}   holds {holds}")
        print("    the others give no interval of a ratio: pyperf, torch and a plain mean ± sd spread, hyperfine ± σ")


def _ours_until(recording: Recording, rng: np.random.Generator) -> tuple[float, bool]:
    """Sets of processes one after the other; the first imports by itself, and then every so many are forked from one that does."""
    pairs, seconds = Pairs(), 0.0
    for i, chosen in enumerate(rng.choice(len(recording.generations), _MOST_SETS)):
        generation = recording.generations[chosen]
        found = _replayed_pairs(generation, 3, rng, 1.0)
        pairs += found
        seconds += recording.start_s if i == 0 or (i - 1) % CHILDREN == 0 else recording.fork_s
        seconds += len(found.a) / generation.pairs.shape[1] * _WINDOW_S
        if len(pairs.generations) >= ENOUGH_GENERATIONS:
            a, b = pairs.data()
            low, _, high = np.exp(hodges_lehmann(np.log(b / a)))
            if (high - low) / 2 <= 0.02:
                return seconds, bool(low <= 1.05 <= high)
    return np.inf, False


def _asv_until(recording: Recording, rng: np.random.Generator) -> tuple[float, bool]:
    """A until its interval is tight enough, then B: the halves add in quadrature; each side takes two processes."""
    at = int(rng.integers(len(recording.generations)))
    seconds, medians, halves = 0.0, [], []
    for version, units in zip(_drawn(rng), (UNITS[0], UNITS[3]), strict=True):
        calls, n = np.concatenate(_in_turn(recording, at, version, units)), 10
        while n < len(calls) and asv_interval(calls[:n]) > 0.02 / np.sqrt(2):
            n = next_look(n)
        if n >= len(calls):
            return np.inf, False
        sets = math.ceil(calls[:n].sum() / 1000 / _IN_A_ROW_S)
        at = (at + sets) % len(recording.generations)  # B follows when A is done
        seconds += 2 * recording.start_s + calls[:n].sum() / 1000
        medians.append(np.median(calls[:n]))
        halves.append(asv_interval(calls[:n]))
    ratio, half = medians[1] / medians[0], np.hypot(*halves)
    return seconds, bool(abs(ratio / 1.05 - 1) <= half)


def _print_live(versions: list[Version], loads: list[bool], count: int, budget: float) -> None:
    print(f"\nlive: nano ab with {budget:.0f} s per comparison, both rounds and the starts included")
    for loaded in loads:
        for effect, version in zip(EFFECTS, versions[1:], strict=True):
            kinds, seconds = [], []
            with _load(loaded):
                for i in range(count):
                    request = _request(WORKS[i % 3])
                    task = Task("call", "live", {"name": WORKS[i % 3]}, (request, request))
                    start = time.monotonic()
                    (found,) = compare_versions((versions[0], version), [task], Settings(budget_s=budget))
                    seconds.append(time.monotonic() - start)
                    kinds += [verdict.kind for verdict in found.verdicts.values()]
            alarms = _rate(sum(kind in ALARMS for kind in kinds), len(kinds))
            words = ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))
            print(
                f"  {'loaded' if loaded else 'quiet':7}{effect:8} slower: {alarms}  ({words}; {np.median(seconds):.0f} s each)",
                flush=True,
            )


if __name__ == "__main__":
    if shutil.which("git") is None:
        sys.exit("trust: git is not installed")
    main()
