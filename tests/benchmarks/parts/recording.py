"""Record real work in versions that do 0, 3, 5 or 10 % more of it, and replay comparisons from that."""

import contextlib
import random
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from nanolib.ab.pairs import Pairs, Settings
from nanolib.ab.processes import CHILDREN, Processes
from nanolib.ab.schedule import (
    FEWEST_PAIRS,
    MIN_PAIRS,
    PROCESS_PAIRS,
    REL_CI,
    TIMED,
    WARM_UP_S,
    _compare,
    block_calls,
    ends_after,
    is_precise_enough,
    next_look,
    precise_enough,
)
from nanolib.stats.compare import THRESHOLD, Kind
from nanolib.stats.intervals import TooFewSamples
from tests.ab.conftest import Repository
from tests.benchmarks.parts.neighbors import busy_neighbors
from tests.benchmarks.parts.peers import GUARD

WORKS = ("matmul", "block", "decode")
VERSIONS = {"A": 100, "A again": 100, "+3 %": 103, "+5 %": 105, "+10 %": 110}
UNITS = list(VERSIONS.values())
# Of interleaved blocks of two versions, in each pair of processes.
WINDOW_S = Settings.budget_s * TIMED / PROCESS_PAIRS
IN_A_ROW_S = 1.0  # of calls, per version
BEYOND = (Kind.REGRESSED, Kind.IMPROVED)


def tag(version):
    """The git tag of one of `VERSIONS`."""
    return f"units-{list(VERSIONS).index(version)}"


@contextlib.contextmanager
def repository():
    """A repository whose revisions differ in how many units of work they do."""
    source = (Path(__file__).parent / "work.py").read_text()
    with tempfile.TemporaryDirectory() as folder:
        made = Repository(Path(folder))
        for version, units in VERSIONS.items():
            made.commit(tag(version), source.replace("UNITS = 100", f"UNITS = {units}"))
        yield made.folder


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
    """What one work did under one load.

    Attributes:
        generations: Its sets of processes.
        fork_server_s: How long the process takes from which others are forked.
        fork_s: How long two forked processes take, their first calls included.
    """

    generations: list[Generation]
    fork_server_s: float = 0.0
    fork_s: float = 0.0


def request(work):
    """What a version is asked for."""
    return {"do": "function", "function": f"work:{work}", "setup": ""}


def record(versions, work, loaded, seconds):
    """Both ways of collecting in turn, in processes that are often replaced."""
    recording, forks = Recording([]), []
    with busy_neighbors(loaded), Processes(versions, 120, fork=True) as sides:
        end = time.monotonic() + seconds
        while time.monotonic() < end or len(recording.generations) < PROCESS_PAIRS:
            begun = time.monotonic()
            processes = sides.renew()
            for process in processes:
                process.ask(**request(work), rows=False)
            call_ms = max(sum(process.time_block(2, keep=False)[-1]) for process in processes)
            forks.append((time.monotonic() - begun) * 2 / len(processes))
            calls = block_calls(call_ms)
            pairs = _interleaved(processes, calls, len(processes) / 2 * WINDOW_S)
            in_a_row = [_in_a_row(process, calls) for process in processes]
            recording.generations.append(Generation(pairs, in_a_row))
            for process in processes:
                process.ask(do="next")
    recording.fork_s = float(np.median(forks))
    # the first had to be made
    recording.fork_server_s = (forks[0] - recording.fork_s) * len(versions) / 2
    sets = f"{len(recording.generations)} sets of processes"
    print(f"  recorded {work}: {sets}, call {call_ms:.1f} ms", flush=True)
    return recording


def _interleaved(sides, calls, seconds):
    rows = []
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        row = [0.0] * len(sides)
        for i in random.sample(range(len(sides)), len(sides)):
            row[i] = float(np.median(sides[i].time_block(calls, keep=False)))
        rows.append(row)
    return np.array(rows).T


def _in_a_row(side, calls):
    times = []
    end = time.monotonic() + IN_A_ROW_S
    while time.monotonic() < end:
        times += [call for (call,) in side.time_block(calls, keep=False)]
    return np.array(times)


def replay_ab(recording, units, rng, budget_s):
    """Return the blocks that `nano ab` would have measured of A and of B, which does `units` of work."""
    pairs, spent_s = Pairs(), 0.0
    for number, at in enumerate(rng.permutation(len(recording.generations)), 1):
        generation = recording.generations[at]
        found = _replay_processes(generation, units, rng, budget_s)
        pairs += found
        if (number - 1) % CHILDREN == 0:
            spent_s += recording.fork_server_s
        timed_s = len(found.a) / generation.pairs.shape[1] * WINDOW_S
        spent_s += recording.fork_s + WARM_UP_S + timed_s
        if ends_after(number, spent_s, budget_s) or is_precise_enough({"": pairs}, REL_CI):
            break
    return pairs


def judge(pairs, threshold=THRESHOLD):
    """Decide as `nano ab` does; it gives no verdict on too few pairs."""
    try:
        return _compare(pairs, Settings(threshold=threshold))
    except TooFewSamples:
        return None


def is_called(verdict, units, kinds=(*BEYOND, Kind.SUSPECT)):
    """Whether B is called slower, or faster if it does less."""
    if verdict is None:
        return False
    return verdict.kind in kinds and (verdict.ratio > 1) == (units >= UNITS[0])


def replay_peer(rule, recording, units, rng, length):
    """Whether the rule of another harness calls B slower, after so many series of A and then of B."""
    start = int(rng.integers(len(recording.generations)))
    order = [*recording.generations[start:], *recording.generations[:start]]
    parts = order[:length], order[length : 2 * length]
    a, b = (
        np.concatenate([generation.calls[version] for generation in part]) / UNITS[version] / 1000
        for version, part in zip(_two_versions(rng), parts, strict=True)
    )
    a, b = a * UNITS[0], b * units
    ratio = rule(a, b) if units >= UNITS[0] else rule(b, a)
    return ratio - 1 > GUARD


def _two_versions(rng):
    """Draw the versions that stand for A and B: any two, since what each does more is divided out.

    A set of processes is one draw of their positions in memory. With either of two versions as A it
    is two draws, around the truth.
    """
    return rng.choice(len(UNITS), 2, replace=False).tolist()


def _replay_processes(generation, units, rng, budget_s):
    """Take pairs of one pair of processes until they are precise enough or used up."""
    a, b = (
        generation.pairs[version] / UNITS[version] * done
        for version, done in zip(_two_versions(rng), (UNITS[0], units), strict=True)
    )
    most, n = max(FEWEST_PAIRS, round(budget_s / Settings.budget_s * len(a))), MIN_PAIRS
    while n < most and not precise_enough(a[:n], b[:n], REL_CI):
        n = next_look(n)
    n = min(n, most, len(a))
    return Pairs(a[:n].tolist(), b[:n].tolist(), [n])
