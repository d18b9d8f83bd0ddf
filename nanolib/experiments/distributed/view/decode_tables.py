"""Decoding over a sharded cache as tables: a line per algorithm, and its parts."""

from __future__ import annotations

import pandas as pd

from nanolib.measurement import Flag
from nanolib.report.overview import cached, ending_of, having, pick

EXPERIMENT = "distributed"
KINDS = ("compute", "wait", "communication")
DECODE_COLUMNS = {
    "ranks": "Ranks",
    "seq_len": "n",
    "dtype": "Type",
    "form": "Algorithm",
    "latency": "Token, ms [95 %]",
    "compute": "Compute, ms [95 %]",
    "wait": "Wait, ms [95 %]",
    "communication": "Communication, ms [95 %]",
    "predicted": "Predicted, ms",
    "bound": "Bound by",
    "efficiency": "Efficiency [range]",
    "rounds": "Steps",
    "sent": "Sent, B",
    "counted": "Counted, B",
    "relative_error": "Error to float64",
    "status": "Status",
    "message": "Why",
    "flags": "Flags",
}
COMPONENT_COLUMNS = {
    "ranks": "Ranks",
    "seq_len": "n",
    "form": "Algorithm",
    "component": "Component",
    "ms": "Slowest rank, ms [95 %]",
    "mean": "Mean of ranks, ms",
    "sd": "sd, ms",
}


def of_ranks(row: pd.Series) -> dict[str, object]:
    """`world_size`, `nodes`, and `ranks`: both in words, where there is more than one machine."""
    world, nodes = int(row["factor.world_size"]), row.get("factor.nodes")
    nodes = 1 if pd.isna(nodes) else int(nodes)
    return {"world_size": world, "nodes": nodes, "ranks": f"{world} on {nodes} nodes" if nodes > 1 else str(world)}


def ranks_words(row: pd.Series) -> str:
    """`4 ranks`, or `4 ranks over 2 nodes`, of a line that has `world_size` and `nodes`."""
    return f"{int(row['world_size'])} ranks" + (f" over {int(row['nodes'])} nodes" if row["nodes"] > 1 else "")


def over_nodes(names: pd.Series, nodes: pd.Series) -> pd.Series:
    """The names, with the number of machines where there are several."""
    nodes = nodes.fillna(1).astype(int)
    return names.where(nodes == 1, names + ", " + nodes.astype(str) + " nodes")


@cached("distributed")
def decode_table(rows: pd.DataFrame) -> pd.DataFrame:
    """One line per form, number of ranks and length.

    Returns:
        Columns: `world_size`, `nodes`, `ranks` (both in words), `seq_len`, `dtype`, `form`; `latency`, `compute`, `wait`,
        `communication` (ms, slowest rank), `efficiency` (time of one rank over ranks × time), each with `_low` and `_high`;
        `predicted` (communication, ms), `bound`, `rounds`, `sent` and `counted` (B per rank), `relative_error`, `status`,
        `message`, `flags`.
    """
    rows = having(rows, EXPERIMENT, "forms")
    lines = []
    for (run_id, case_id), case in rows.groupby(["run_id", "case_id"], sort=False):
        first = case.iloc[0]
        base = {"run_id": run_id, "case_id": case_id}
        base |= {name: first[f"factor.{name}"] for name in ("seq_len", "dtype")} | of_ranks(first)
        base |= ending_of(case)
        forms = [form for form in first["factor.forms"] if len(pick(case, "latency", form))]
        lines += [base | {"form": form} | _form_line(case, form) for form in forms] or [
            base | {"form": "", "flags": []}
        ]
    table = pd.DataFrame(lines)
    if table.empty:
        return table
    names = [f"{name}{end}" for name in ("latency", *KINDS, "efficiency") for end in ("", "_low", "_high")]
    names += ["predicted", "rounds", "sent", "counted", "relative_error", "bound"]
    table = table.assign(**{name: float("nan") for name in names if name not in table})
    return _with_efficiency(table).sort_values(["dtype", "seq_len", "world_size"], kind="stable").reset_index(drop=True)


def _form_line(case: pd.DataFrame, form: str) -> dict[str, object]:
    timed = pick(case, "latency", form).iloc[0]
    line: dict[str, object] = {"flags": list(timed["flags"])} | with_ends("latency", timed)
    shares = {}
    for kind in KINDS:
        for row in pick(case, "part_time", f"{form}: {kind}").to_dict("records"):
            line |= with_ends(kind, row)
            if kind == "communication":
                line["predicted"] = row["predicted"]
        for row in pick(case, "time_share", f"{form}: {kind}").to_dict("records"):
            shares[kind] = row["estimate"]
    if shares:
        sending = max(("wait", "communication"), key=lambda kind: shares[kind])
        bound = "compute" if shares["compute"] >= 0.5 else sending
        line["bound"] = f"{bound} ({shares[bound]:.0%})"
    return line | sent_and_error(case, form)


def sent_and_error(case: pd.DataFrame, form: str) -> dict[str, float]:
    """`rounds`, `sent`, `counted` (B) and `relative_error` of a form, as far as they are known."""
    found = {
        "rounds": pick(case, "rounds", form),
        "sent": pick(case, "wire_bytes", form, "formula"),
        "counted": pick(case, "wire_bytes", form, "interface"),
        "relative_error": pick(case, "relative_error", form),
    }
    return {name: rows["estimate"].iloc[0] for name, rows in found.items() if len(rows)}


def fair(table: pd.DataFrame) -> pd.DataFrame:
    """The lines on which a claim of speed may rest: those with a core for each rank."""
    return table.loc[[Flag.OVERSUBSCRIBED.value not in flags for flags in table["flags"]]]


def efficiency(alone: pd.Series, row: pd.Series, ranks: int) -> dict[str, float]:
    """Time of one rank over `ranks` × time; the range is that of the two intervals, wider than 95 %."""
    ends = (("", "", ""), ("_low", "_low", "_high"), ("_high", "_high", "_low"))
    return {
        f"efficiency{end}": alone[f"latency{above}"] / (ranks * row[f"latency{below}"]) for end, above, below in ends
    }


def with_ends(name: str, row: pd.Series | dict[str, object]) -> dict[str, object]:
    """A row's estimate under a name, its interval, and which row it is."""
    return {name: row["estimate"], f"{name}_low": row["low"], f"{name}_high": row["high"], f"{name}_row": row.get("id")}


def _with_efficiency(table: pd.DataFrame) -> pd.DataFrame:
    """Where one rank was measured alone, what several make of its time shared out."""
    one = table[(table["world_size"] == 1) & table["latency"].notna()]
    known = {(row["seq_len"], row["dtype"], row["form"]): row for _, row in one.iterrows()}
    for at, row in table.iterrows():
        alone = known.get((row["seq_len"], row["dtype"], row["form"]))
        if alone is None or row["world_size"] == 1 or pd.isna(row["latency"]):
            continue
        for name, value in efficiency(alone, row, row["world_size"]).items():
            table.loc[at, name] = value
    return table


@cached("distributed")
def component_table(rows: pd.DataFrame) -> pd.DataFrame:
    """One line per component of a form: columns `ranks`, `seq_len`, `form`, `component`, `ms` (with ends), `mean`, `sd`."""
    rows = having(rows, EXPERIMENT, "world_size")
    lines = []
    for _, row in pick(rows, "part_time").iterrows():
        form, component = row["scope"].split(": ")
        if component in KINDS:
            continue
        ranks = row["details"]["ranks"]
        line = {
            **of_ranks(row),
            "seq_len": row["factor.seq_len"],
            "form": form,
            "component": component,
        }
        line |= {name: sum(rank[name] for rank in ranks) / len(ranks) for name in ("mean", "sd")}
        lines.append(line | with_ends("ms", row))
    return pd.DataFrame(lines)
