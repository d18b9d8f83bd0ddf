"""How summary, compare, merge and clean fare as the database grows: a thousand measurements to a million, 100 per run.

The rows are those of a real run (a small one, made here), repeated with their figures jittered. Memory is this process's peak.
Then: how long deleting takes where runs keep millions of rows over time.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import sqlite3
import tempfile
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nanolib.compare.compare import compare_rows
from nanolib.experiments import sections
from nanolib.experiments.attention import cases as attention
from nanolib.experiments.model import cases as model
from nanolib.experiments.summary.cases import select_runs
from nanolib.measurement import exact
from nanolib.report.page import build
from nanolib.run import sweep
from nanolib.store import Run, Store

PER_RUN = 100


def main() -> None:
    """Print a line per size."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--most", type=int, default=1_000_000, help="measurements")
    parser.add_argument(
        "--from", dest="source", help="a database whose runs are repeated, instead of a small one made here"
    )
    parser.add_argument("--trace-rows", type=int, default=50_000_000)
    options = parser.parse_args()
    print("measurements   runs  file MB |  page s  page MB | all s  MB | compare s | merge s | clean s | peak MB")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        source = Path(options.source) if options.source else _small_run(folder)
        size = 1000
        while size <= options.most:
            _line(folder, source, size)
            size *= 10
        _deleting(folder, options.trace_rows)


def _deleting(folder: Path, count: int) -> None:
    """Delete most, and half, of the runs of a database that rows over time make large: 1.3 GB with what is set here."""
    for kept in (1, 10):
        path = folder / "traces.sqlite"
        with Store(path) as store:
            for number in range(20):
                _fill_trace(store, str(number), count // 20)
            size = _mb(path)
            gone, seconds = _timed(lambda store=store, kept=kept: store.cleanup_old_runs(None, max_runs=kept))
        print(
            f"deleting {len(gone)} of 20 runs from {size:,.0f} MB: {seconds:.1f} s, {_mb(path):,.0f} MB stay",
            flush=True,
        )
        path.unlink()


def _fill_trace(store: Store, run_id: str, count: int) -> None:
    machine = {"machine_id": "m", "cpu": "c"}
    store.add(Run("energy", machine, run_id=run_id, rows={"case": ({"seq_len": 8}, [exact("flops", 1)])}))
    db = store.connection
    db.execute("BEGIN")
    trace_id = random.getrandbits(63)
    db.execute("INSERT INTO traces VALUES (?, ?, 'case', '[\"a\"]')", (trace_id, run_id))
    numbers = "WITH RECURSIVE n(x) AS (SELECT 0 UNION ALL SELECT x + 1 FROM n WHERE x < ?)"
    for table, values in (("ops", "x / 90, x % 6, 0, x * 7919 % 1000000"), ("statistics", "x / 90, x % 6, 0, x / 7.0")):
        db.execute(f"{numbers} INSERT INTO {table} SELECT ?, x, {values} FROM n", (count // 2 - 1, trace_id))
    db.execute("COMMIT")


def _line(folder: Path, source: Path, size: int) -> None:
    path = folder / f"{size}.sqlite"
    with Store(path) as store:
        runs = _fill(store, source, size)
        page, seconds = _timed(
            lambda: build(store, select_runs(store, ["newest"]), folder / "newest", sections(), pictures=False)
        )
        everything, all_s = _timed(
            lambda: build(store, select_runs(store, ["all"]), folder / "all", sections(), pictures=False)
        )
        last = list(store.runs("experiment = ?", ("attention",)).run_id)[-2:]
        two = [store.measurements([run_id], samples=True) for run_id in last]
        _, compare_s = _timed(lambda: compare_rows(two[0], two[-1]))
        with Store(folder / f"{size}-merged.sqlite") as other:
            _, merge_s = _timed(lambda: other.merge(path))
            _, clean_s = _timed(lambda: other.cleanup_old_runs(max_runs=max(1, runs // 2)))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(
        f"{size:12,} {runs:6,} {_mb(path):8.1f} | {seconds:7.2f} {_mb(page):8.2f} | {all_s:5.1f} {_mb(everything):4.2f} |"
        f" {compare_s:9.2f} | {merge_s:7.2f} | {clean_s:7.2f} | {peak:7.0f}",
        flush=True,
    )


def _timed(call: Callable[[], Any]) -> tuple[Any, float]:
    start = time.perf_counter()
    return call(), time.perf_counter() - start


def _mb(path: Path) -> float:
    return path.stat().st_size / 1e6


def _small_run(folder: Path) -> Path:
    path = folder / "source.sqlite"
    small = {
        "presets": ["decoder_tiny"],
        "overrides": {"num_layers": 1, "d_model": 64, "num_heads": 2, "vocab_size": 300},
    }
    kinds = [{"kind": "dense", "backend": "flash"}, {"kind": "sparse", "pattern": "window", "window": 64}]
    with Store(path) as store:
        for experiment, params in (
            (
                attention,
                attention.Params(seq_lens=[64, 128, 256], attention_types=kinds, budget_s=0.1, quality_patterns=[]),
            ),
            (model, model.Params(**small, seq_lens=[32, 64], budget_s=0.1, loss_steps=5)),
        ):
            sweep.measure(experiment, params, store=store, progress=False).finish()
    return path


def _fill(store: Store, source: Path, size: int) -> int:
    """Repeat the runs of another database, a hundred measurements each, with later dates and jittered figures."""
    store.merge(source)
    db, rng = store.connection, random.Random(0)
    columns = [row[1] for row in db.execute("PRAGMA table_info(measurements)") if row[1] != "id"]
    shown = ", ".join(columns)
    jittered = ", ".join(f"{name} * :factor" if name in ("estimate", "low", "high") else name for name in columns[1:])
    originals = [(run_id, _first_cases(db, run_id)) for (run_id,) in db.execute("SELECT run_id FROM runs").fetchall()]
    have, made = db.execute("SELECT count(*) FROM measurements").fetchone()[0], 0
    db.execute("BEGIN")
    while have < size:
        run_id, (cases, count) = originals[made % len(originals)]
        new = str(uuid.uuid4())
        started = (
            f"{2001 + made // 10_000}-01-01T{made % 10_000 // 3600:02d}:{made // 60 % 60:02d}:{made % 60:02d}+00:00"
        )
        names = [row[1] for row in db.execute("PRAGMA table_info(runs)")][1:]
        values = ", ".join({"started": ":started", "launch": ":new"}.get(name, name) for name in names)
        bound = {"new": new, "started": started, "old": run_id}
        db.execute(f"INSERT INTO runs SELECT :new, {values} FROM runs WHERE run_id = :old", bound)
        db.execute(
            f"INSERT INTO measurements ({shown}) SELECT :new, {jittered} FROM measurements"
            " WHERE run_id = :old AND case_id IN (SELECT value FROM json_each(:cases))",
            bound | {"factor": 1 + rng.gauss(0, 0.01), "cases": cases},
        )
        have, made = have + count, made + 1
    db.execute("COMMIT")
    return made + len(originals)


def _first_cases(db: sqlite3.Connection, run_id: str) -> tuple[str, int]:
    """As many of the run's cases as hold about a hundred measurements, as JSON, and how many they hold."""
    chosen, held = [], 0
    query = "SELECT case_id, count(*) FROM measurements WHERE run_id = ? GROUP BY case_id ORDER BY min(id)"
    for case_id, count in db.execute(query, (run_id,)):
        if chosen and held + count > PER_RUN:
            break
        chosen.append(case_id)
        held += count
    return json.dumps(chosen), held


if __name__ == "__main__":
    main()
