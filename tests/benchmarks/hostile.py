"""What a database with any value in any column does, merged into a good one and lying in our own.

A merge must be refused in one line that leaves all as it was, or every command must work afterwards; in our own each command
answers or says why not. Printed: how many were refused and how many came in; any failure ends with exit code 1.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import hypothesis
from hypothesis import HealthCheck, Phase, given, settings

from nanolib.measurement import BadInput
from nanolib.store import Store

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.store.hostile import CHANGES, Change, commands_bear, contents, make_good, put


def main() -> None:
    """Try so many changes, each merged and in place."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--examples", type=int, default=500)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument(
        "--report-every", type=int, default=5, help="of so many examples one also makes the report, which takes longest"
    )
    parser.add_argument("--from", dest="source", type=Path, help="a database to change, instead of one made here")
    options = parser.parse_args()
    seen, failed = Counter(), []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_good(folder / "ours.sqlite", "our-")
        if options.source:
            with Store(folder / "theirs.sqlite") as store:
                store.merge(options.source)
                store.connection.execute("PRAGMA journal_mode = DELETE").fetchall()
        else:
            make_good(folder / "theirs.sqlite")

        @hypothesis.seed(options.seed)
        @settings(
            max_examples=options.examples,
            database=None,
            deadline=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(CHANGES)
        def tried(change: Change) -> None:
            ended, failures = _tried(folder, change, report=seen.total() % options.report_every == 0)
            seen[ended] += 1
            if failures:
                failed.append(change)
                print(change, *failures, sep="\n  ", flush=True)

        tried()
    print(f"seed {options.seed}: {', '.join(f'{count} {what}' for what, count in seen.items())}; {len(failed)} failed")
    sys.exit(bool(failed))


def _tried(folder: Path, change: Change, *, report: bool) -> tuple[str, list[str]]:
    """How the merge ended, and what failed then or with the same change in place."""
    hostile, merged, broken = folder / "hostile.sqlite", folder / "merged", folder / "broken"
    failures: list[str] = []
    shutil.copy(folder / "theirs.sqlite", hostile)
    put(hostile, change)
    for output, source in ((merged, folder / "ours.sqlite"), (broken, hostile)):
        shutil.rmtree(output, ignore_errors=True)
        output.mkdir()
        shutil.copy(source, output / "results.sqlite")
    before = contents(merged / "results.sqlite")
    try:
        with Store(merged / "results.sqlite") as store:
            store.merge(hostile)
        ended = "came in"
        failures += commands_bear(merged, report=report)
    except BadInput as error:
        ended = "refused"
        if len(error.lines) != 1 or len(error.lines[0].splitlines()) != 1:
            failures.append(f"more than a line: {error}")
        if contents(merged / "results.sqlite") != before:
            failures.append("something came in though it was refused")
    except Exception as error:  # whatever it is, it is what is looked for
        ended = "ended in a traceback"
        failures.append(repr(error))
    return ended, failures + [f"in place: {line}" for line in commands_bear(broken, report=report)]


if __name__ == "__main__":
    main()
