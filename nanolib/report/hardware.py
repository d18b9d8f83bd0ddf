"""Show which machines measured: what each is, can do, and reached."""

from __future__ import annotations

import pandas as pd

from nanolib.numbers import format_number
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
