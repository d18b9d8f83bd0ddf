"""What survives `kill -9` of `nano export`: of each format twenty are killed at random moments.

After each the target must not be there, or be whole, and no file in its folder may hold anything private; an export that follows
must leave nothing but itself. Printed: kills, targets that were there, files left behind; any failure ends with exit code 1.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from nanolib.measurement import Measurement, Status, exact
from nanolib.store import Store
from nanolib.store.schema import Run

SECRET = b"quilla"
MACHINE = {"machine_id": "m", "cpu": "c", "cores": 1, "ram_gib": 1, "gpus": [], "dtypes": {}}


def _fill(path: Path, runs: int, cases: int) -> None:
    """Runs whose texts, all of them, name a folder of a person's."""
    private = "/home/quilla obrien/x"
    with Store(path) as store:
        for _ in range(runs):
            rows = {}
            for number in range(cases):
                ended = Measurement("case_time", 1.0, n=1, status=Status.ERROR, message=f"no '{private}/{number}'")
                sized = exact("flops", number, scope=f"{private}/{number}", samples=tuple(map(float, range(500))))
                rows[f"{number:016x}"] = ({"name": private, "number": number}, [ended, sized])
            store.add(Run("attention", MACHINE, params={"path": private}, label=f"~quilla/{private}", rows=rows))


def _export(target: Path, output: Path, bar: float | None = None) -> float:
    """Seconds that it took; killed after `bar` of them."""
    began = time.perf_counter()
    command = [sys.executable, "-m", "nanolib.cli", "export", str(target), "--run", "all", "--output", str(output)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        process.wait(bar)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGKILL)
    process.wait()
    return time.perf_counter() - began


def _begun(folder: Path, output: Path, ending: str) -> tuple[float, float]:
    """Seconds after which an export begins to write, and after which it is done."""
    target = folder / f"first{ending}"
    command = [sys.executable, "-m", "nanolib.cli", "export", str(target), "--run", "all", "--output", str(output)]
    began = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    while process.poll() is None and not any(folder.iterdir()):
        time.sleep(0.001)
    wrote = time.perf_counter() - began
    if process.wait():
        raise RuntimeError(f"the export to {ending} failed")
    return wrote, time.perf_counter() - began


def main() -> int:
    """Kill, look, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20, help="of each format")
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--cases", type=int, default=200, help="of each run")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rng, failures = random.Random(args.seed), 0
    with tempfile.TemporaryDirectory(prefix="nanolib-exports-") as name:
        output = Path(name) / "out"
        _fill(output / "results.sqlite", args.runs, args.cases)
        for ending in (".sqlite", ".json", ".csv", ".md"):
            folder = Path(name) / ending[1:]
            folder.mkdir()
            wrote, whole_s = _begun(folder, output, ending)
            whole = (folder / f"first{ending}").stat().st_size
            there = left = 0
            for number in range(args.kills):
                target = folder / f"{number}{ending}"
                # nine of ten from just before it begins to write: before that there is nothing to see
                _export(target, output, rng.uniform(0 if number % 10 == 0 else 0.95 * wrote, 1.05 * whole_s))
                failures += target.exists() and target.stat().st_size != whole
                there += target.exists()
                left += sum(path.name.startswith(".") for path in folder.iterdir())
                failures += sum(SECRET in path.read_bytes() for path in folder.rglob("*") if path.is_file())
                target.unlink(missing_ok=True)
            _export(folder / f"last{ending}", output)
            failures += {path.name for path in folder.iterdir()} != {f"first{ending}", f"last{ending}"}
            print(
                f"{ending:8} {args.kills} kills within {whole_s:.1f} s (writing from {wrote:.1f} s on): {there} targets whole, "
                f"{left} times a hidden file was left, {failures} failures so far",
                flush=True,
            )
    return 1 if failures else 0


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
