"""Export results as a database, JSON or CSV, without names of users, hosts and paths."""

import html
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from nanolib.measurement import BadInput, printable
from nanolib.store import Store
from nanolib.store.export import PUBLIC, export_database, new_file, public_rows

_ENDINGS = (".sqlite", ".json", ".csv")


def write(store: Store, run_ids: list[str], target: Path) -> None:
    """Write runs to a file whose ending sets the format. A failed export leaves no partial file.

    Args:
        store: Store with the runs.
        run_ids: IDs of the runs.
        target: Path that ends with `.sqlite`, `.json` or `.csv`.

    Raises:
        BadInput: The ending is unknown, there are no runs, or the file exists.
    """
    if target.suffix not in _ENDINGS:
        endings = ", ".join(_ENDINGS)
        raise BadInput(f"export: {target.name!r} has no known ending; use one of {endings}")
    if not run_ids:
        raise BadInput("export: there are no runs to write; run: nano run quick")
    if target.suffix == ".sqlite":
        export_database(store, run_ids, target)
        return
    runs, machines = store.runs_of(run_ids), store.machines()
    machines = machines[machines["machine_id"].isin(runs["machine_id"])]
    tables = {"runs": runs, "machines": machines, "measurements": store.measurements(run_ids)}
    text = (
        json_text(tables) if target.suffix == ".json" else csv_text(_table(tables["measurements"]))
    )
    with new_file(target) as file:
        file.write_text(text, encoding="utf-8", errors="backslashreplace")


def json_text(tables: Mapping[str, pd.DataFrame], **more: Any) -> str:
    """Return database tables as JSON, without private columns.

    Args:
        tables: Rows of each table, by the name of the table.
        more: Further values of the JSON object.
    """
    content = {name: _public_records(name, rows) for name, rows in tables.items()}
    return json.dumps(content | more, indent=1, ensure_ascii=False, allow_nan=False)


def _table(rows: pd.DataFrame) -> pd.DataFrame:
    records = _public_records("measurements", rows)
    table = pd.DataFrame(records, columns=PUBLIC["measurements"])
    for column in ("factors", "details"):
        table[column] = [json.dumps(value) for value in table[column]]
    return table


def _public_records(name: str, rows: pd.DataFrame) -> list[dict[str, Any]]:
    """Return rows of a database table as JSON records, without private columns and without NaN."""
    records = rows.astype(object).where(rows.notna(), None).to_dict("records")
    return list(public_rows(name, records))


def csv_text(table: pd.DataFrame) -> str:
    """Return a table as CSV. Spreadsheets run none of the cells as a formula."""
    return table.map(safe_cell).rename(columns=safe_cell).to_csv(index=False)


def safe_cell(value: Any) -> Any:
    """Return a cell with a quote before text that a spreadsheet would run as a formula."""
    if isinstance(value, list | tuple):
        value = ", ".join(map(str, value))
    if not isinstance(value, str):
        return value
    acts = value.startswith(("=", "+", "-", "@", "\t", "\r"))
    return ("'" if acts else "") + printable(value)


def markdown_table(table: pd.DataFrame) -> str:
    """Return a table in GitHub's Markdown, with escaped cells."""
    if table.empty:
        return "(nothing was measured)"
    lines = [list(table.columns), ["---"] * len(table.columns), *table.to_numpy().tolist()]
    return "\n".join(
        "| " + " | ".join(markdown_text(str(cell)) for cell in line) + " |" for line in lines
    )


def markdown_text(text: str) -> str:
    """Return the text on one line, escaped so that GitHub shows it unchanged."""
    escaped = html.escape(printable(" ".join(text.split())), quote=False)
    return re.sub(r"([|`\\\[\]*])", r"\\\1", escaped)
