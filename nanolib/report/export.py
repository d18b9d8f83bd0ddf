"""Export results as a database or JSON, without names of users, hosts and paths."""

import html
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from nanolib.measurement import BadInput, printable
from nanolib.paths import put_in_place
from nanolib.store import Store
from nanolib.store.export import export_database, public_row


def write(store: Store, run_ids: list[str], target: Path) -> None:
    """Write runs to a file whose ending sets the format. A failed export leaves no partial file.

    Args:
        store: Store with the runs.
        run_ids: IDs of the runs.
        target: Path that ends with `.sqlite` or `.json`.

    Raises:
        BadInput: The ending is unknown, there are no runs, or the file exists.
        OSError: The file cannot be written.
        sqlite3.Error: The database cannot be written.
    """
    if target.suffix not in (".sqlite", ".json"):
        raise BadInput(f"export: {target.name!r} has no known ending; use .sqlite or .json")
    if not run_ids:
        raise BadInput("export: there are no runs to write; run: nano run quick")
    if target.exists():
        raise BadInput(f"export: {target} exists; name a new file")
    with put_in_place(target) as file:
        if target.suffix == ".sqlite":
            export_database(store, run_ids, file)
        else:
            runs, machines = store.runs_of(run_ids), store.machines()
            machines = machines[machines["machine_id"].isin(runs["machine_id"])]
            rows = store.measurements(run_ids)
            text = json_text({"runs": runs, "machines": machines, "measurements": rows})
            file.write_text(text, encoding="utf-8", errors="backslashreplace")


def json_text(tables: Mapping[str, pd.DataFrame], **more: Any) -> str:
    """Return database tables as JSON, without private data.

    Args:
        tables: Rows of each table, by the name of the table.
        more: Further values of the JSON object.
    """
    content = {name: _public(rows).to_dict("records") for name, rows in tables.items()}
    return json.dumps(content | more, indent=1, ensure_ascii=False, allow_nan=False)


def _public(rows: pd.DataFrame) -> pd.DataFrame:
    """Return rows of a database table without private data, samples and NaN."""
    columns = [name for name in rows if name not in ("id", "samples")]
    rows = rows[[name for name in columns if not name.startswith("factor.")]]
    records = rows.astype(object).where(rows.notna(), None).to_dict("records")
    return pd.DataFrame(map(public_row, records), columns=rows.columns, dtype=object)


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
        return "The table is empty."
    lines = [list(table.columns), ["---"] * len(table.columns), *table.to_numpy().tolist()]
    return "\n".join(
        "| " + " | ".join(markdown_text(str(cell)) for cell in line) + " |" for line in lines
    )


def markdown_text(text: str) -> str:
    """Return the text on one line, escaped so that GitHub shows it unchanged."""
    escaped = html.escape(printable(" ".join(text.split())), quote=False)
    return re.sub(r"([|`\\\[\]*])", r"\\\1", escaped)
