"""Speed-ups of made cases, as if their blocks had been taken in turns and each interval were the widest that both times allow."""

import json

from nanolib.measurement import Flag, Measurement

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
