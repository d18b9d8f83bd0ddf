"""What survives `kill -9`: runs of cases of a millisecond, killed at random moments and resumed; many writers of one database.

After each kill the database must pass its integrity check and hold every case that had been told as finished; `--resume` must
complete the run with no case twice. Printed: how many kills, cases and failures; any failure ends with exit code 1.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import pydantic

from nanolib.experiments import params as shared
from nanolib.experiments import sweep
from nanolib.experiments.params import Case
from nanolib.measurement import exact
from nanolib.store import Store


class Params(shared.Params):
    """So many cases."""

    cases: int = pydantic.Field(200, gt=0)


@dataclass(frozen=True)
class Tiny(Case):
    """A case of a millisecond."""

    number: int


def cases(params: Params) -> list[Case]:
    """Numbered."""
    return [Tiny("cpu", number) for number in range(params.cases)]


def measure_case(case: Case, params: Params, ceilings: dict[str, float]):
    """A row, told to the parent when the next case begins: what was told is stored."""
    yield exact("flops", float(case.number))
    time.sleep(0.001)


def _child(database: str, count: int) -> None:
    """Measure all cases, telling each that is stored."""

    def told(done: int, total: int, case: str) -> None:
        print(done, flush=True)

    with Store(database) as store:
        sweep.measure(
            sys.modules[__name__], Params(cases=count, resume=True), store=store, progress=False, told=told
        ).finish()


def _killed_runs(kills: int, count: int, rng: random.Random) -> int:
    """How many times something was lost, broken or twice there."""
    failures = killed = 0
    while killed < kills:
        with tempfile.TemporaryDirectory() as name:
            database = Path(name) / "results.sqlite"
            while killed < kills:
                process = subprocess.Popen(
                    [sys.executable, __file__, "--child", str(database), "--cases", str(count)],
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    text=True,
                    env=os.environ | {"NANOLIB_OUTPUT": name},
                )
                first = process.stdout.readline()  # it has begun
                time.sleep(rng.uniform(0, 0.004 * count))
                process.send_signal(signal.SIGKILL)
                rest = process.stdout.read().split()
                ended = process.wait()
                if ended == 0:
                    break  # it was faster than the kill: the run is whole
                killed += 1
                told = int((rest or [first or 0])[-1])
                failures += _broken(database, told, count, done=False)
            subprocess.run(
                [sys.executable, __file__, "--child", str(database), "--cases", str(count)],
                check=True,
                stdout=subprocess.DEVNULL,
                env=os.environ | {"NANOLIB_OUTPUT": name},
            )
            failures += _broken(database, count, count, done=True)
    return failures


def _broken(database: Path, told: int, count: int, done: bool) -> int:
    with sqlite3.connect(database) as db:
        whole = db.execute("PRAGMA integrity_check").fetchone()[0] == "ok"
        ended = db.execute("SELECT count(*) FROM measurements WHERE metric = 'case_time' AND status = 'ok'").fetchone()[
            0
        ]
        twice = db.execute(
            "SELECT count(*) FROM (SELECT 1 FROM measurements WHERE metric = 'case_time' GROUP BY run_id, case_id"
            " HAVING count(*) > 1)"
        ).fetchone()[0]
        runs = db.execute("SELECT count(*), sum(status = 'done') FROM runs").fetchone()
    wrong = not whole or ended < told or twice or runs[0] != 1 or (done and (ended != count or runs[1] != 1))
    if wrong:
        print(f"FAILED: whole {whole}, {ended} stored of {told} told, {twice} twice, runs {runs}", flush=True)
    return int(bool(wrong))


_WRITER = """
import sys
from nanolib.measurement import exact
from nanolib.schema import Run
from nanolib.store import Store
with Store(sys.argv[1]) as store:
    for number in range(int(sys.argv[3])):
        rows = {"case": ({"number": number}, [exact("flops", 1.0)])}
        machine = {"machine_id": "m", "cpu": "c", "cores": 1, "ram_gib": 1, "gpus": [], "dtypes": {}}
        store.add(Run("writer", machine, label=sys.argv[2], rows=rows))
"""


def _writers(writers: int, runs: int) -> int:
    """Many processes, one database: how many runs are missing, and processes that failed."""
    with tempfile.TemporaryDirectory() as name:
        database = Path(name) / "results.sqlite"
        Store(database).connection.close()
        processes = [
            subprocess.Popen([sys.executable, "-c", _WRITER, str(database), str(number), str(runs)])
            for number in range(writers)
        ]
        failed = sum(process.wait() != 0 for process in processes)
        with sqlite3.connect(database) as db:
            stored = db.execute("SELECT count(*) FROM runs").fetchone()[0]
            measured = db.execute("SELECT count(*) FROM measurements").fetchone()[0]
    return failed + 2 * writers * runs - stored - measured


def main() -> None:
    """Kill, look, resume; then write from many processes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--writers", type=int, default=8)
    parser.add_argument("--runs", type=int, default=1000, help="of each writer")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        _child(options.child, options.cases)
        return
    start = time.perf_counter()
    failures = _killed_runs(options.kills, options.cases, random.Random(options.seed))
    print(
        f"kill -9: {options.kills} kills of runs of {options.cases} cases: {failures} failures, {time.perf_counter() - start:.0f} s"
    )
    start = time.perf_counter()
    lost = _writers(options.writers, options.runs)
    seconds = time.perf_counter() - start
    print(f"{options.writers} processes × {options.runs} runs into one database: {lost} lost, {seconds:.0f} s")
    sys.exit(bool(failures or lost))


if __name__ == "__main__":
    main()
