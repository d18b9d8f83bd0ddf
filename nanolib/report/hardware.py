"""Which machines measured: what each is, can and reached, and the same timings side by side."""

from __future__ import annotations

import pandas as pd

from nanolib.measurement import case_name
from nanolib.numbers import format_number, format_with_interval
from nanolib.report.overview import pick


def hardware_table(rows: pd.DataFrame, machines: pd.DataFrame) -> pd.DataFrame:
    """The hardware matrix: what each machine of the rows is, can, and reached.

    Args:
        rows: Measurements of any runs.
        machines: From the store.

    Returns:
        One line per machine for people: the capability columns, then the measured ceilings.
    """
    lines = []
    used = machines["machine_id"].isin(rows["machine_id"] if len(rows) else [])
    for _, machine in machines[used].iterrows():
        gpus = machine["gpus"] or [{}]
        own = rows[rows["machine_id"] == machine["machine_id"]]
        line = {
            "Machine": machine["machine_id"],
            "CPU": machine["cpu"],
            "Cores": machine["cores"],
            "RAM (GiB)": machine["ram_gib"],
            "GPU": gpus[0].get("name", "—") + (f" × {len(gpus)}" if len(gpus) > 1 else ""),
            "GPU memory (GiB)": gpus[0].get("memory_gib", "—"),
            "Compute capability": gpus[0].get("compute_capability", "—"),
            "Native FP8": "yes" if gpus[0].get("fp8") else "no",
            "torch": machine["torch"],
            **machine["dtypes"],
        }
        for metric, unit in (("ceiling_flops", "FLOP/s"), ("ceiling_bytes", "B/s")):
            newest = pick(own, metric).drop_duplicates("scope", keep="last")
            for _, row in newest.iterrows():
                name = "copy" if metric == "ceiling_bytes" else row["scope"]
                value = format_number(row["estimate"], row["low"], row["high"])
                line[f"{name} ({unit})"] = value
        lines.append(line)
    return pd.DataFrame(lines).fillna("—")


def machine_ratios(rows: pd.DataFrame) -> pd.DataFrame:
    """The same timings on several machines, side by side; empty with one machine.

    Returns:
        One line per timing that at least two machines hold: `Case`, and per machine its latency with the interval, ms.
    """
    found = pick(rows, "latency")
    if found.empty or found["machine_id"].nunique() < 2:
        return pd.DataFrame()
    key = ["experiment", "case_id", "scope", "machine_id"]
    lines: dict[str, dict[str, str]] = {}
    for _, row in found.drop_duplicates(key, keep="last").iterrows():
        case = f"{row['experiment']} {case_name(row['factors'])} {row['scope']}".strip()
        text = format_with_interval(row["estimate"], row["low"], row["high"])
        lines.setdefault(case, {})[row["machine_id"]] = text
    both = [{"Case": case} | texts for case, texts in lines.items() if len(texts) > 1]
    return pd.DataFrame(both).fillna("—")
