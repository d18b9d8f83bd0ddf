"""Results for sharing: a database, JSON, CSV or Markdown, without user name, host name or absolute path."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pandas as pd

from nanolib.measurement import BadInput
from nanolib.report.page import markdown_table, measurement_records, public_runs, records, run_hosts, safe_cell
from nanolib.sharing import shareable
from nanolib.store import Store

_SHOWN = ["experiment", "factors", "metric", "scope", "estimate", "low", "high", "unit", "n", "predicted", "provenance"]
_SHOWN += ["method", "status", "message", "flags"]


def write(store: Store, run_ids: list[str], target: Path) -> None:
    """Write runs to a file, in the format that its ending names.

    Args:
        store: Where they are.
        run_ids: Which.
        target: `.sqlite`, `.json`, `.csv` or `.md`.

    Raises:
        BadInput: Another ending, no runs, or a file that is there already.
    """
    writers: dict[str, Callable[[Store, list[str], Path], None]] = {
        ".sqlite": lambda store, ids, path: store.copy_to(path, ids),
        ".json": _write_json,
        ".csv": _write_csv,
        ".md": _write_markdown,
    }
    if target.suffix not in writers:
        raise BadInput(f"export: {target.name!r} has no known ending; use one of {', '.join(writers)}")
    if not run_ids:
        raise BadInput("export: there are no runs to write; run: nano run quick")
    if target.exists():
        raise BadInput(f"export: {target} exists; name a new file")
    if not target.absolute().parent.is_dir():
        raise BadInput(f"export: {target.parent} is no folder; make it or name another")
    writers[target.suffix](store, run_ids, target)


def _write_json(store: Store, run_ids: list[str], target: Path) -> None:
    runs, machines = store.runs_of(run_ids), store.machines()
    machines = machines[machines["machine_id"].isin(runs["machine_id"])]
    content = {
        "runs": public_runs(runs),
        "machines": records(machines),
        "measurements": measurement_records(store.measurements(run_ids), runs),
    }
    target.write_text(json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False), encoding="utf-8")


def _flat(store: Store, run_ids: list[str]) -> pd.DataFrame:
    rows = store.measurements(run_ids)
    hosts = run_hosts(store.runs_of(run_ids))
    for column in ("factors", "details", "message"):
        told = [shareable(value, hosts[run_id]) for value, run_id in zip(rows[column], rows["run_id"], strict=True)]
        rows[column] = [value if isinstance(value, str) else json.dumps(value) for value in told]
    return rows


def _write_csv(store: Store, run_ids: list[str], target: Path) -> None:
    rows = _flat(store, run_ids)
    rows = rows[[name for name in rows.columns if not name.startswith("factor.") and name != "id"]]
    rows.map(safe_cell).to_csv(target, index=False)


def _write_markdown(store: Store, run_ids: list[str], target: Path) -> None:
    table = _flat(store, run_ids)[_SHOWN].map(lambda value: ", ".join(value) if isinstance(value, list) else value)
    target.write_text(markdown_table(table.astype(object).where(table.notna(), "")) + "\n", encoding="utf-8")
