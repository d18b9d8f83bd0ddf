"""Real work timed in versions that do 0, 3, 5 or 10 % more of it, in both ways of collecting: what `trust.py` replays."""

from __future__ import annotations

import contextlib
import random
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from nanolib.ab.children import VersionProcess
from nanolib.ab.pairs import Settings
from nanolib.ab.processes import Processes
from nanolib.ab.schedule import PROCESS_PAIRS, TIMED, block_calls
from nanolib.ab.versions import Version
from parts.neighbors import busy_neighbors
from tests.ab.conftest import Repository

WORKS = ("matmul", "block", "decode")
VERSIONS = {"A": 100, "A again": 100, "+3 %": 103, "+5 %": 105, "+10 %": 110}
UNITS = list(VERSIONS.values())
# Of interleaved blocks of two versions, in each pair of processes.
WINDOW_S = Settings.budget_s * TIMED / PROCESS_PAIRS
IN_A_ROW_S = 1.0  # of calls, per version


def tag(version: str) -> str:
    """The git tag of one of `VERSIONS`."""
    return f"units-{list(VERSIONS).index(version)}"


@contextlib.contextmanager
def repository() -> Iterator[Path]:
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


def request(work: str) -> dict[str, object]:
    """What a version is asked for."""
    return {"do": "function", "function": f"work:{work}", "setup": ""}


def record(versions: list[Version], work: str, loaded: bool, seconds: float) -> Recording:
    """Both ways of collecting in turn, in processes that are often replaced."""
    with busy_neighbors(loaded), Processes(versions, 120, fork=True) as sides:
        recording = Recording([])
        end, forks = time.monotonic() + seconds, []
        while time.monotonic() < end or len(recording.generations) < PROCESS_PAIRS:
            begun = time.monotonic()
            processes = sides.renew()
            for process in processes:
                process.ask(**request(work), rows=False)
            call_ms = max(sum(process.time_block(2, keep=False)[-1]) for process in processes)
            forks.append((time.monotonic() - begun) * 2 / len(processes))
            calls = block_calls(call_ms)
            pairs = _interleaved(processes, calls, len(processes) / 2 * WINDOW_S)
            recording.generations.append(
                Generation(pairs, [_in_a_row(process, calls) for process in processes])
            )
            for process in processes:
                process.ask(do="next")
        recording.fork_s = float(np.median(forks))
        recording.fork_server_s = (
            (forks[0] - recording.fork_s) * len(processes) / 2
        )  # the first had to be made
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
    end = time.monotonic() + IN_A_ROW_S
    while time.monotonic() < end:
        times += [call for (call,) in side.time_block(calls, keep=False)]
    return np.array(times)
