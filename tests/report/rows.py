"""Rows as the notebooks store them, made by hand: what reports and pages are tried with."""

import json
import sqlite3

from nanolib.measurement import Flag, Measurement, Status
from nanolib.store.schema import TRACE_TABLES

MACHINE = {
    "machine_id": "m1",
    "cpu": "A <b>CPU</b>",
    "cores": 2,
    "ram_gib": 8,
    "gpus": [],
    "dtypes": {},
}
SLOWER = 1.7
OTHER = "f" * 12  # another machine
EVIL = "<script>alert(1)</script> `x` | \"q\" 'p' \U0001f600 \u202ertl ](http://x)"


def interval(metric, low, value, high, **rest):
    return Measurement(metric, value, low, high, 0.95, 20, **rest)


def ended(status=Status.OK, message=""):
    return Measurement("case_duration", 1.0, status=status, message=message)


def with_endings(cases):
    """Case id → factors and measurements; a case whose ending is not among them ended well."""
    return {
        str(at): (factors, found if found[0].metric == "case_duration" else [ended(), *found])
        for at, (factors, found) in enumerate(cases)
    }


def warmup_process(direction, process, steps, times, needed=2.0, message=""):
    """One fresh process: its curve, and of each setting (steps → low, ms, high, mean) what it would report."""
    factors = {
        "direction": direction,
        "process": process,
        "warmup_steps": list(times),
        "steps": steps,
        "seq_len": 64,
    }
    samples = (30.0, 20.0, 10.0, 10.0)
    rows = [interval("latency", 9.5, 10.0, 10.5, scope=direction, samples=samples)]
    details = {"steady_median": None if needed is None else 10.25}
    rows.append(
        Measurement("warmup_needed", needed, scope=direction, message=message, details=details)
    )
    for count, (ms, mean) in times.items():
        rest = {
            "scope": f"{direction} after {count}",
            "details": {"mean": mean, "sd": 3.0, "cv": 0.33},
        }
        rows.append(interval("latency", 0.95 * ms, ms, 1.05 * ms, **rest))
    return factors, rows


SIZES = {"seq_len": 64, "batch_size": 3, "dtype": "float32", "device": "cpu"}


def elsewhere(file):
    """The same runs on another machine, where every timing takes longer."""
    with sqlite3.connect(file) as connection:
        connection.execute("PRAGMA foreign_keys = OFF")
        connection.execute("UPDATE machines SET machine_id = ?, cpu = 'another CPU'", (OTHER,))
        connection.execute("UPDATE runs SET machine_id = ?", (OTHER,))
        for table in ("traces", *TRACE_TABLES):
            connection.execute(f"UPDATE {table} SET trace_id = trace_id / 2")
        named = "SELECT name FROM sqlite_master WHERE type = 'table' AND sql LIKE '%run_id%'"
        for (table,) in connection.execute(named).fetchall():
            connection.execute(f"UPDATE {table} SET run_id = 'ffff' || substr(run_id, 5)")
        slower = ", ".join(f"{name} = {name} * {SLOWER}" for name in ("estimate", "low", "high"))
        timed = "metric IN ('latency', 'component_time')"
        connection.execute(f"UPDATE measurements SET {slower} WHERE {timed}")
    connection.close()


# Experiment → which cases are baselines, what they are called, and what tells groups apart.
_GROUPS = {
    "attention": (
        lambda of: of["name"].startswith(("dense", "flash_attn")),
        lambda of: of["name"],
        ("seq_len", "batch_size", "dtype", "causal", "device"),
    ),
    "model": (
        lambda of: of["optimization"] == "eager",
        lambda of: f"eager {of['dtype']}",
        ("attention_type", "seq_len", "batch_size", "mode", "new_tokens", "device"),
    ),
    "fp8": (
        lambda of: of["precision"] == "bfloat16",
        lambda of: "bfloat16",
        ("name", "mode", "compiled", "seq_len", "batch_size", "m", "k", "n"),
    ),
}


_OF = {
    "attention": "name",
    "model": "optimization",
    "fp8": "precision",
}  # a factor that cases of the group have


def in_turns(experiment, rows):
    """The cases with what each gains over each baseline of its group; rows are id → (factors, measurements)."""
    if experiment == "distributed":
        return {
            case_id: (factors, [*found, *_across(found)])
            for case_id, (factors, found) in rows.items()
        }
    if experiment not in _GROUPS:
        return rows
    is_baseline, title, shape = _GROUPS[experiment]
    groups = {}
    for case_id, (factors, _) in rows.items():
        if factors.get(_OF[experiment]) is not None and "pattern" not in factors:
            groups.setdefault(json.dumps([factors.get(name) for name in shape]), []).append(case_id)
    found = dict(rows)
    for ids in groups.values():
        for own in ids:
            factors, measured = rows[own]
            gained = [
                _gained(row, other, title(rows[base][0]))
                for base in ids
                if base != own and is_baseline(rows[base][0])
                for row in measured
                for other in rows[base][1]
                if row.metric == other.metric == "latency"
                and _phase(row) == _phase(other)
                and row.estimate
            ]
            found[own] = factors, [*measured, *gained]
    return found


def _across(found):
    """Of ranks: each call of a launch over each other of its direction."""
    calls = [
        row
        for row in found
        if row.metric == "latency" and not {"collective", "world_size"} & row.details.keys()
    ]
    for own in calls:
        for base in calls:
            if own is not base and own.scope.partition(" ")[2] == base.scope.partition(" ")[
                2
            ].removesuffix("rank"):
                yield _gained(own, base, base.scope)


def _phase(row):
    return row.scope.removesuffix("_with_cast")


def _gained(own, base, title):
    ends = base.low / own.high, base.estimate / own.estimate, base.high / own.low
    low, estimate, high = (None if end != end else end for end in ends)
    flags = tuple(flag for flag in {*own.flags, *base.flags} if flag is Flag.BUSY_MACHINE)
    scope = f"{own.scope} over {title}"
    return Measurement(
        "speed_up", estimate, low, high, 0.95, 20, method="rounds", scope=scope, flags=flags
    )
