"""Rows as the notebooks store them, made by hand: what reports and pages are tried with."""

import sqlite3

from nanolib.measurement import Flag, Measurement, Status

SLOWER = 1.7
OTHER = "f" * 12  # another machine
EVIL = "<script>alert(1)</script> `x` | \"q\" 'p' \U0001f600 ](http://x)"
SIZES = {"seq_len": 64, "batch_size": 3, "dtype": "float32", "device": "cpu"}


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


def elsewhere(file):
    """The same runs on a machine where all timings take longer and whose texts try to break out."""
    with sqlite3.connect(file) as connection:
        connection.execute("PRAGMA foreign_keys = OFF")
        connection.execute("UPDATE machines SET machine_id = ?, cpu = ?", (OTHER, EVIL))
        connection.execute("UPDATE runs SET machine_id = ?, label = ?", (OTHER, EVIL))
        failed = "UPDATE measurements SET message = ? WHERE status = 'unsupported'"
        connection.execute(failed, (EVIL * 50,))
        _rename(connection, "ffff")
        slower = ", ".join(f"{name} = {name} * {SLOWER}" for name in ("estimate", "low", "high"))
        timed = "metric IN ('latency', 'component_time')"
        connection.execute(f"UPDATE measurements SET {slower} WHERE {timed}")
    connection.close()


def earlier(file):
    """The same runs of the year before, in which the model is another."""
    with sqlite3.connect(file) as connection:
        connection.execute("PRAGMA foreign_keys = OFF")
        connection.execute("UPDATE runs SET started = '2020' || substr(started, 5)")
        other = "factors = replace(factors, 'decoder_nano', 'small'), case_id = run_id || case_id"
        connection.execute(f"UPDATE measurements SET {other} WHERE factors LIKE '%decoder_nano%'")
        _rename(connection, "eeee")
    connection.close()


def _rename(connection, start):
    named = "SELECT name FROM sqlite_master WHERE type = 'table' AND sql LIKE '%run_id%'"
    for (table,) in connection.execute(named).fetchall():
        connection.execute(f"UPDATE {table} SET run_id = ? || substr(run_id, 5)", (start,))


# Cases that differ in these factors share a group.
_NAMES = {"name", "optimization", "precision", "options", "algorithm"}
# Experiment → the factor that tells baselines, and how it begins.
_BASELINES = {
    "attention": ("name", ("dense", "flash_attn")),
    "model": ("optimization", "eager"),
    "fp8": ("precision", "bfloat16"),
    "distributed": ("algorithm", ""),  # each is compared with each other
}


def in_turns(experiment, cases):
    """The cases, id → (factors, measurements), with what each gains over its group's baselines."""
    return {
        case_id: (factors, [*rows, *_gains(experiment, factors, rows, cases)])
        for case_id, (factors, rows) in cases.items()
    }


def _gains(experiment, factors, rows, cases):
    for base, title in _baselines(experiment, factors, rows, cases):
        for own in rows:
            if own.metric == base.metric == "latency" and own.scope == base.scope:
                yield _gain(own, base, title)


def _baselines(experiment, factors, rows, cases):
    """The rows with which those of a case were taken in turns, each with its name."""
    if experiment not in _BASELINES:
        return []
    factor, begins = _BASELINES[experiment]
    return [
        (row, f"eager {other['dtype']}" if experiment == "model" else other[factor])
        for other, others in cases.values()
        if other is not factors and _shape(other) == _shape(factors)
        if other.get(factor, "").startswith(begins)
        for row in others
    ]


def _shape(factors):
    names = _NAMES | ({"dtype"} if "optimization" in factors else set())
    return {name: value for name, value in factors.items() if name not in names}


def _gain(own, base, title):
    ends = base.low / own.high, base.estimate / own.estimate, base.high / own.low
    flags = tuple({*own.flags, *base.flags} & {Flag.BUSY_MACHINE})
    rest = {"method": "rounds", "scope": f"{own.scope} over {title}", "flags": flags}
    return interval("speed_up", *ends, **rest)


def points(chart, *columns):
    """The values of some columns of a chart's data, where a line has the first of them."""
    data = chart.to_dict()["datasets"].values()
    lines = [line for lines in data for line in lines if columns[0] in line]
    return [tuple(line.get(column) for column in columns) for line in lines]
