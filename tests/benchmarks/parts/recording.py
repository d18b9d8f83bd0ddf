"""Record real work in versions that do 0, 3, 5 or 10 % more of it, and replay comparisons."""

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
    PROCESS_PAIRS,
    REL_CI,
    TIMED,
    WARM_UP_S,
    block_calls,
    ends_after,
    is_precise_enough,
)
from nanolib.ab.versions import checked_out
from tests.ab.conftest import Repository
from tests.benchmarks.parts.neighbors import busy_neighbors
from tests.benchmarks.parts.peers import GUARD

WORKS = ("matmul", "block", "decode")
VERSIONS = {"A": 100, "A again": 100, "+3 %": 103, "+5 %": 105, "+10 %": 110}
UNITS = list(VERSIONS.values())
# Of interleaved blocks of two versions, in each pair of processes.
WINDOW_S = Settings.budget_s * TIMED / PROCESS_PAIRS
IN_A_ROW_S = 1.0  # of calls, per version


@contextlib.contextmanager
def work_versions():
    """Revisions of a repository that differ in how many units of work they do, checked out."""
    source = (Path(__file__).parent / "work.py").read_text()
    tags = [f"units-{at}" for at in range(len(UNITS))]
    with tempfile.TemporaryDirectory() as folder:
        made = Repository(Path(folder))
        for tag, units in zip(tags, UNITS, strict=True):
            made.commit(tag, source.replace("UNITS = 100", f"UNITS = {units}"))
        with checked_out(tags, made.folder) as versions:
            yield versions


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
    fork_server_s: float
    fork_s: float


def record(versions, work, loaded, seconds):
    """Both ways of collecting in turn, in processes that are often replaced."""
    generations, forks = [], []
    with busy_neighbors(loaded), Processes(versions, fork=True) as sides:
        end = time.monotonic() + seconds
        while time.monotonic() < end or len(generations) < PROCESS_PAIRS:
            begun = time.monotonic()
            processes = sides.renew()
            for process in processes:
                process.ask(do="function", function=f"work:{work}", setup="")
            call_ms = max(sum(process.time_block(2, keep=False)[-1]) for process in processes)
            forks.append((time.monotonic() - begun) * 2 / len(processes))
            calls = block_calls(call_ms)
            pairs = _interleaved(processes, calls, len(processes) / 2 * WINDOW_S)
            in_a_row = [_in_a_row(process, calls) for process in processes]
            generations.append(Generation(pairs, in_a_row))
            for process in processes:
                process.ask(do="next")
    print(
        f"  recorded {work}: {len(generations)} sets of processes, call {call_ms:.1f} ms",
        flush=True,
    )
    fork_s = float(np.median(forks))
    # the first had to be made
    return Recording(generations, (forks[0] - fork_s) * len(versions) / 2, fork_s)


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
    """Return the blocks that `nano ab` would have measured of A, and of B with `units` of work."""
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


def replay_peer(rule, recording, units, rng, length):
    """Whether another harness's rule calls B slower, after so many series of A and then of B."""
    start = int(rng.integers(len(recording.generations)))
    order = [*recording.generations[start:], *recording.generations[:start]]
    parts = order[:length], order[length : 2 * length]
    a, b = (
        np.concatenate([generation.calls[version] for generation in part]) / 1000 * scale
        for (version, scale), part in zip(_two_versions(units, rng), parts, strict=True)
    )
    ratio = rule(a, b) if units >= UNITS[0] else rule(b, a)
    return ratio - 1 > GUARD


def _two_versions(units, rng):
    """Draw the versions that stand for A and B, and how many times as long their work would take.

    They are any two, since what each does more is divided out. A set of processes is one draw of
    their positions in memory. With either of two versions as A it is two draws, around the truth.
    """
    drawn = rng.choice(len(UNITS), 2, replace=False).tolist()
    return [
        (version, done / UNITS[version])
        for version, done in zip(drawn, (UNITS[0], units), strict=True)
    ]


def _replay_processes(generation, units, rng, budget_s):
    """Take the pairs that one pair of processes measures within the budget."""
    a, b = (generation.pairs[version] * scale for version, scale in _two_versions(units, rng))
    n = min(len(a), max(FEWEST_PAIRS, round(budget_s / Settings.budget_s * len(a))))
    return Pairs(a[:n].tolist(), b[:n].tolist(), [n])
