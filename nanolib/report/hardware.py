"""Show which machines measured: what each is and reached, and the same timings on each."""

from __future__ import annotations

import pandas as pd

from nanolib.measurement import case_name
from nanolib.numbers import format_number, format_with_interval
from nanolib.report.overview import pick

_PEAKS = {"ceiling_flops": "FLOP/s", "ceiling_bytes": "B/s"}


def hardware_table(rows: pd.DataFrame, machines: pd.DataFrame) -> pd.DataFrame:
    """Return the hardware matrix: what each machine of the rows is and can do, and the rates that it reached.

    Args:
        rows: Measurements of any runs.
        machines: From the store.

    Returns:
        One line per machine for people: the capability columns, then the measured peak rates.
    """
    lines = []
    used = machines["machine_id"].isin(rows["machine_id"] if len(rows) else [])
    for machine in machines[used].to_dict("records"):
        gpus = machine["gpus"]
        gpu = gpus[0] if gpus else {}
        line = {
            "Machine": machine["machine_id"],
            "CPU": machine["cpu"],
            "Cores": machine["cores"],
            "RAM (GiB)": machine["ram_gib"],
            "GPU": gpu.get("name", "—") + (f" × {len(gpus)}" if len(gpus) > 1 else ""),
            "GPU memory (GiB)": gpu.get("memory_gib", "—"),
            "Compute capability": gpu.get("compute_capability", "—"),
            "Native FP8": "yes" if gpu.get("fp8") else "no",
            "torch": machine["torch"],
            **machine["dtypes"],
        }
        own = rows[rows["machine_id"] == machine["machine_id"]]
        for metric, unit in _PEAKS.items():
            for row in pick(own, metric).to_dict("records"):  # the newest comes last
                value = format_number(row["estimate"], row["low"], row["high"])
                line[f"{row['scope']} ({unit})"] = value
        lines.append(line)
    return pd.DataFrame(lines).fillna("—")


def machine_ratios(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the same timings on several machines, next to each other; nothing for one machine.

    Returns:
        One line per timing that at least two machines have: `Case`, and per machine its latency with the interval, ms.
    """
    lines: dict[str, dict[str, str]] = {}
    timed = pick(rows, "latency")
    several = len(timed) and timed["machine_id"].nunique() > 1
    for row in timed.to_dict("records") if several else ():
        case = f"{row['experiment']} {case_name(row['factors'])} {row['scope']}".strip()
        text = format_with_interval(row["estimate"], row["low"], row["high"])
        lines.setdefault(case, {})[row["machine_id"]] = text
    both = [{"Case": case} | texts for case, texts in lines.items() if len(texts) > 1]
    return pd.DataFrame(both).fillna("—")
