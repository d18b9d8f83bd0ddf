"""Export results for sharing: a database, JSON, CSV or Markdown, without user name, host name or absolute path."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd

from nanolib.measurement import BadInput
from nanolib.report.page import csv_text, markdown_table, measurement_records, public_runs, records
from nanolib.store import Store
from nanolib.store.export import PUBLIC, export_database, new_file, public_rows

_ENDINGS = (".sqlite", ".json", ".csv", ".md")


def write(store: Store, run_ids: list[str], target: Path) -> None:
    """Write runs to a file in the format of its ending. A failure half-way leaves no file.

    Args:
        store: Where they are.
        run_ids: Which.
        target: `.sqlite`, `.json`, `.csv` or `.md`.

    Raises:
        BadInput: Another ending, no runs, a file that is there already, or one that cannot be written.
    """
    if target.suffix not in _ENDINGS:
        endings = ", ".join(_ENDINGS)
        raise BadInput(f"export: {target.name!r} has no known ending; use one of {endings}")
    if not run_ids:
        raise BadInput("export: there are no runs to write; run: nano run quick")
    if target.exists():
        raise BadInput(f"export: {target} exists; name a new file")
    if not target.absolute().parent.is_dir():
        raise BadInput(f"export: {target.parent} is not a folder; make it or name another")
    if target.suffix == ".sqlite":
        export_database(store, run_ids, target)
        return
    if target.suffix == ".json":
        text = _json(store, run_ids)
    else:
        table = _table(store, run_ids)
        text = csv_text(table) if target.suffix == ".csv" else _markdown(table)
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


def _table(store: Store, run_ids: list[str]) -> pd.DataFrame:
    rows = measurement_records(store.measurements(run_ids))
    table = pd.DataFrame(rows, columns=PUBLIC["measurements"].split())
    for column in ("factors", "details"):
        table[column] = [json.dumps(value) for value in table[column]]
    return table


def _markdown(table: pd.DataFrame) -> str:
    """Return the rows for people: without details, and without the run and the machine if there is only one."""
    single = [name for name in ("run_id", "machine_id") if table[name].nunique() < 2]
    table = table.drop(columns=["details", *single])
    table["flags"] = table["flags"].map(", ".join)
    return markdown_table(table.astype(object).where(table.notna(), "")) + "\n"
