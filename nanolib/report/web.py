"""Write the report as one self-contained web page, which requests nothing and escapes all that it shows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jinja2
import pandas as pd

from nanolib.report import renderer
from nanolib.report.display import Lines, Table
from nanolib.report.section import Part
from nanolib.report.theme import is_empty, variables, with_variables

_PAGE = Path(__file__).parent / "page_files"


def _table(whole: pd.DataFrame, readable: pd.DataFrame) -> Table:
    """Return a table for people, without empty columns; its lines have their sequence lengths."""
    filled = [not set(readable[name]) <= {"", "—"} for name in readable]
    lengths = whole.get("seq_len", pd.Series(float("nan"), index=whole.index))
    return Table(readable.loc[:, filled], lengths.map("{:g}".format).replace("nan", ""))


def as_script(data: Any) -> str:
    """Return JSON that is safe inside a script: without any `<`, since `</script` and `<!--` act even in a string."""
    return json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")


def web_page(
    parts: list[Part],
    specs: dict[str, dict[str, Any]],
    rows: pd.DataFrame,
    runs: pd.DataFrame,
    machines: pd.DataFrame,
    left_out: int,
) -> str:
    """Write the page.

    Args:
        parts: What it says, in order.
        specs: Chart → its Vega-Lite.
        rows: The measurements that it shows.
        runs: Their runs.
        machines: All machines of the store.
        left_out: How many cases are not shown.
    """
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_PAGE), autoescape=True, undefined=jinja2.StrictUndefined
    )
    drawn = [name for part in parts for name, chart in part.charts.items() if not is_empty(chart)]
    used = machines[machines["machine_id"].isin(runs["machine_id"])]
    named = {
        one: f"{cpu}, {gpus[0]['name'] if gpus else 'no GPU'} ({one[:6]})"
        for one, cpu, gpus in used[["machine_id", "cpu", "gpus"]].itertuples(index=False)
    }
    lengths = sorted({int(n) for n in rows.get("factor.seq_len", pd.Series()).dropna()})
    return environment.get_template("page.html.jinja").render(
        parts=parts,
        specs=specs,
        drawn=drawn,
        runs=len(runs),
        count=len(rows),
        left_out=left_out,
        machines=named,
        measured={n: f"{n:,}" for n in lengths},
        lines=Lines,
        table=_table,
        libraries=renderer.javascript().replace("</script", "<\\/script") if drawn else "",
        data=as_script(with_variables({name: specs[name] for name in drawn})),
        style=variables() + (_PAGE / "style.css").read_text(encoding="utf-8"),
        script=(_PAGE / "script.js").read_text(encoding="utf-8"),
    )
