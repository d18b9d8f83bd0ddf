"""What survives `kill -9`: runs of cases of a millisecond, and of the quick suite; many writers; and what running cases costs.

After each kill the database must pass its integrity check and hold every case that had been told as finished; `--resume` must
complete the run with no case twice. Printed: how many kills, cases and failures; any failure ends with exit code 1.
"""

from __future__ import annotations

import argparse
import json
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
from typing import ClassVar

import psutil
import pydantic

from nanolib.measurement import exact
from nanolib.run import params as shared
from nanolib.run import sweep
from nanolib.run.case import Case
from nanolib.store import Store

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.processes import said


class Params(shared.Params):
    """So many cases."""

    NAME: ClassVar[str] = "faults"

    cases: int = pydantic.Field(200, gt=0)


@dataclass(frozen=True)
class Tiny(Case):
    """A case of a millisecond."""

    number: int

    def measure(self, params: Params, ceilings: dict[str, float]):
        """A row, told to the parent when the next case begins: what was told is stored."""
        yield exact("flops", float(self.number))
        time.sleep(0.001)


def cases(params: Params) -> list[Case]:
    """Numbered."""
    return [Tiny("cpu", number) for number in range(params.cases)]


def _child(database: str, count: int) -> None:
    """Measure all cases, telling each that is stored."""

    def on_progress(done: int, total: int, case: str) -> None:
        print(done, flush=True)

    with Store(database) as store:
        sweep.measure(
            sys.modules[__name__],
            Params(cases=count, resume=True),
            store=store,
            progress=False,
            on_progress=on_progress,
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


def _killed_suites(kills: int, suite: list[str], rng: random.Random) -> int:
    """The same of `nano run`, of which the runner, a kernel or a rank is killed; each start continues the one before."""
    failures = 0
    with tempfile.TemporaryDirectory() as name:
        database = Path(name) / "results.sqlite"
        command = [sys.executable, "-m", "nanolib.cli", "run", *suite, "--resume", "--no-report", "--output", name]
        known: set[tuple[str, str]] = set()
        for number in range(kills):
            process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            victim = _victim(process, ("nanolib.cli", "ipykernel_launcher", "--multiprocessing-fork")[number % 3], rng)
            tree = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
            if victim is None:
                print(f"kill {number + 1}: the suite ended before it", flush=True)
            else:
                victim.kill()
                if victim.pid != process.pid:
                    process.terminate()  # it would go on with the next notebook, and there are more kills to come
                process.wait()
            _, alive = psutil.wait_procs(tree, timeout=30)
            finished = _finished(database)
            with sqlite3.connect(database) as db:
                whole = db.execute("PRAGMA integrity_check").fetchone()[0] == "ok"
            wrong = not whole or not known <= finished or bool(alive)
            what = victim.what if victim else "nothing"
            print(
                f"kill {number + 1}: {what}: {len(finished)} cases finished, {len(alive)} processes left, "
                f"{'FAILED' if wrong else 'whole'}",
                flush=True,
            )
            failures += wrong
            known = finished
        ended = subprocess.run(command, check=False, capture_output=True, text=True)
        with sqlite3.connect(database) as db:
            twice = db.execute(
                "SELECT count(*) FROM (SELECT 1 FROM measurements WHERE metric = 'case_time' AND status != 'started'"
                " GROUP BY experiment, case_id HAVING count(*) > 1)"
            ).fetchone()[0]
            runs = db.execute("SELECT experiment, status, cases FROM runs").fetchall()
        cases = sum(count for *_, count in runs)
        done = all(status == "done" for _, status, _ in runs) and len({name for name, *_ in runs}) == len(runs)
        whole = (
            ended.returncode == 0
            and done
            and not twice
            and known <= _finished(database)
            and len(_finished(database)) == cases
        )
        print(f"resumed to the end: {cases} cases in {len(runs)} runs, {twice} twice, {'whole' if whole else 'FAILED'}")
        if not whole:
            print(runs, ended.stdout[-2000:], ended.stderr[-2000:])
        return failures + (not whole)


def _victim(process: subprocess.Popen[bytes], kind: str, rng: random.Random) -> psutil.Process | None:
    """A process of the kind among those of a suite, some time after there is one; None if the suite ends before."""
    wait = rng.uniform(5, 45)
    while process.poll() is None:
        found = []
        for one in [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]:
            one.what = said(one)
            found += [one] if kind in one.what else []
        if found and wait <= 0:
            return rng.choice(found)
        time.sleep(0.2)
        wait -= 0.2
    return None


def _finished(database: Path) -> set[tuple[str, str]]:
    with sqlite3.connect(database) as db:
        return set(
            db.execute(
                "SELECT experiment, case_id FROM measurements WHERE metric = 'case_time' AND status != 'started'"
            ).fetchall()
        )


def _cost_of_running(count: int) -> None:
    """What share of the wall time of `nano run` lies outside cases of about a second."""
    lengths = [16 * (1 + number) for number in range(count)]
    wanted = {
        "seq_lens": lengths,
        "attention_types": ["dense"],
        "backward": False,
        "quality_patterns": [],
        "rel_ci": 1e-6,
    }
    wanted |= {"num_heads": 2, "budget_s": 1.0}
    given = [argument for name, value in wanted.items() for argument in ("-p", f"{name}={json.dumps(value)}")]
    given += ["-p", "isolation=none"]
    with tempfile.TemporaryDirectory() as name:
        start = time.perf_counter()
        command = [sys.executable, "-m", "nanolib.cli", "run", "attention", *given, "--no-report", "--output", name]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        took = time.perf_counter() - start
        with sqlite3.connect(Path(name) / "results.sqlite") as db:
            cases, inside = db.execute(
                "SELECT count(*), sum(estimate) FROM measurements WHERE metric = 'case_time'"
            ).fetchone()
    print(
        f"{cases} cases, {inside / cases:.2f} s each: {took:.1f} s in all, {1 - inside / took:.1%} outside cases (goal < 20 %)"
    )


_WRITER = """
import sys
from nanolib.measurement import exact
from nanolib.store import Run
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
    parser.add_argument("--suite-kills", type=int, default=5)
    parser.add_argument(
        "--suite", nargs="+", default=["quick", "attention", "distributed", "warmup"], help="what nano runs"
    )
    parser.add_argument("--second-cases", type=int, default=50)
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
    if options.suite_kills:
        failures += _killed_suites(options.suite_kills, options.suite, random.Random(options.seed))
    if options.second_cases:
        _cost_of_running(options.second_cases)
    sys.exit(bool(failures or lost))


if __name__ == "__main__":
    main()
