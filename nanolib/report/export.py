"""Results for sharing: a database, JSON or CSV, without user name, host name or absolute path."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd

from nanolib.measurement import BadInput
from nanolib.report.page import csv_text, measurement_records, public_runs, records
from nanolib.store import Store
from nanolib.store.export import PUBLIC, export_database, new_file, public_rows


def write(store: Store, run_ids: list[str], target: Path) -> None:
    """Write runs to a file, in the format that its ending names; a failure half-way leaves no file.

    Args:
        store: Where they are.
        run_ids: Which.
        target: `.sqlite`, `.json` or `.csv`.

    Raises:
        BadInput: Another ending, no runs, a file that is there already, or one that cannot be written.
    """
    texts = {".json": _json, ".csv": _csv}
    if target.suffix not in (".sqlite", *texts):
        raise BadInput(
            f"export: {target.name!r} has no known ending; use one of {', '.join(['.sqlite', *texts])}"
        )
    if not run_ids:
        raise BadInput("export: there are no runs to write; run: nano run quick")
    if target.exists():
        raise BadInput(f"export: {target} exists; name a new file")
    if not target.absolute().parent.is_dir():
        raise BadInput(f"export: {target.parent} is no folder; make it or name another")
    if target.suffix == ".sqlite":
        export_database(store, run_ids, target)
        return
    text = texts[target.suffix](store, run_ids)
    with new_file(target) as file:
        file.write_text(text, encoding="utf-8", errors="backslashreplace")


def _json(store: Store, run_ids: list[str]) -> str:
    runs, machines = store.runs_of(run_ids), store.machines()
    machines = machines[machines["machine_id"].isin(runs["machine_id"])]
    content = {
        "runs": public_runs(runs),
        "machines": list(public_rows("machines", records(machines))),
        "measurements": measurement_records(store.measurements(run_ids)),
    }
    return json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False)


def _csv(store: Store, run_ids: list[str]) -> str:
    rows = measurement_records(store.measurements(run_ids))
    table = pd.DataFrame(rows, columns=PUBLIC["measurements"].split())
    for column in ("factors", "details"):
        table[column] = [json.dumps(value) for value in table[column]]
    return csv_text(table)
