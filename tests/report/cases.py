"""Cases as the notebooks measure them, whose intervals need not be symmetric: what verdicts are tried on."""

from nanolib.measurement import Flag, Measurement, exact
from tests.report.rows import SIZES, ended, interval, with_endings


def timed(scope, low, ms, high, **rest):
    """A latency whose interval is not symmetric."""
    details = {"mean": 1.5 * ms, "sd": ms / 5, "cv": 0.2, "p50": ms, "p95": 2 * ms, "p99": 3 * ms}
    rest = {"details": details, "method": "perf_counter", "scope": scope} | rest
    return interval("latency", low, ms, high, **rest)


SHAPE = SIZES | {"causal": False, "options": {}}


def attention_case(name, low, ms, high, tiles=0.0, **shape):
    found = [timed("forward", low, ms, high, flags=shape.pop("flags", ()))]
    found += [exact("sparsity", 0.7, method="mask"), exact("block_sparsity", tiles, method="mask")]
    found.append(interval("mfu", 0.3, 0.37, 0.5, scope="forward"))
    return SHAPE | {"name": name} | shape, found


def quality_case(target, losses, steps=400):
    """The loss of a trained decoder above dense, by scope; some intervals."""
    found = [
        exact("sparsity", target, method="mask"),
        interval("loss", 1.9, 2.0, 2.1, scope="dense"),
    ]
    found += [interval("loss_difference", *ends, scope=scope) for scope, ends in losses.items()]
    factors = {"name": f"w {target}", "pattern": "window", "target": target}
    return SHAPE | factors | {"seeds": 5, "steps": steps}, found


def attention_rows(times, failed=()):
    """Rows by (name, seq_len) → forward ms; `failed` adds cases without numbers."""
    cases = []
    for (name, seq_len), ms in times.items():
        tiles = 0.4 if name.startswith("dense") else 0.8
        cases.append(attention_case(name, 0.95 * ms, ms, 1.05 * ms, tiles, seq_len=seq_len))
    for name, seq_len, *ending in failed:
        cases.append((SHAPE | {"name": name, "seq_len": seq_len}, [ended(*ending)]))
    return with_endings(cases)


MODEL = SIZES | {"attention_type": "dense"}


def model_case(mode, found, **shape):
    weights = [
        exact("parameters", 700, method="count"),
        exact("weight_memory", 5.0, method="count"),
    ]
    return MODEL | {"name": "tiny", "mode": mode, "optimization": "eager"} | shape, [
        *weights,
        *found,
    ]


def inference(low=11, ms=12, high=15, memory=8.0, predicted=4.0, **shape):
    found = [
        timed("inference", low, ms, high, predicted=predicted),
        exact("peak_memory", memory, scope="inference"),
    ]
    return model_case(
        "inference",
        [*found, Measurement("tokens_per_second", 16_000.0, scope="inference")],
        **shape,
    )


def training(phases, memory=60.0, step=(35, 36, 39), **shape):
    found = [
        timed(name, *ends)
        for name, ends in zip(("forward", "backward", "optimizer_step"), phases, strict=True)
    ]
    found += [timed("training_step", *step), exact("peak_memory", memory, scope="training_step")]
    return model_case("training", found, **shape)


CORES = Flag.OVERSUBSCRIBED


def decode_case(algorithms, world=4, flags=(), alone=None, **factors):
    """Each algorithm with its interval, its steps, and the intervals of compute, wait and communication; `alone` is one rank's."""
    found = [timed("one rank", *alone)] if alone else []
    for algorithm, (ends, rounds, parts) in algorithms.items():
        found.append(timed(algorithm, *ends, flags=flags))
        found.append(exact("communication_steps", rounds, scope=algorithm))
        for kind, (low, value, high) in zip(
            ("compute", "wait", "communication"), parts, strict=True
        ):
            of_ranks = {"ranks": [{"mean": value, "sd": 0.1}] * world}
            part = {"scope": f"{algorithm}: {kind}", "details": of_ranks}
            found.append(interval("component_time", low, value, high, **part))
    shape = {
        "seq_len": 4096,
        "dtype": "float32",
        "world_size": world,
        "algorithms": list(algorithms),
        "batch_size": 3,
    }
    return shape | factors, found


COMPUTING = [(8, 8.5, 9), (0.1, 0.2, 0.3), (0.5, 0.6, 0.7)]


def fp8_case(size, precision, low, ms, high, **changes):
    factors = {
        "preset": "p",
        "name": f"size {size}",
        "mode": "inference",
        "precision": precision,
        "compiled": True,
    }
    row = timed("inference", low, ms, high, details={"parameters": size})
    bound = Measurement("converted_share", 0.5, scope="model", details={"amdahl_bound": 1.75})
    return factors | {"seq_len": 64, "batch_size": 3} | changes, [row, bound]


def parity_case(recipe, verdict, difference=None, control=False, steps=400, **rest):
    low, high = (None, None) if difference is None else (difference - 0.002, difference + 0.001)
    details = {"verdict": verdict, "control": control, "margin_nats": 0.0025}
    row = Measurement(
        "loss_difference_from_bf16",
        difference,
        low,
        high,
        0.95,
        3,
        scope=recipe,
        details=details,
        **rest,
    )
    return {"recipe": recipe, "seeds": 3, "steps": steps}, [row]


def rated(name, low, achieved, high, flops=4e6, moved=1e5, **shape):
    rate = interval("flops_per_second", low, achieved, high, scope="forward")
    factors, found = attention_case(name, 9, 10, 11, **shape)
    return factors, [
        *found,
        exact("flops", flops, scope="forward"),
        exact("bytes", moved, scope="forward"),
        rate,
    ]


CEILINGS = [
    (
        {"ceiling": "float32", "device": "cpu"},
        [Measurement("ceiling_flops", 1e11, scope="float32")],
    ),
    ({"ceiling": "copy", "device": "cpu"}, [Measurement("ceiling_bytes", 1e10, scope="copy")]),
]


DECODE = {"name": "tiny", "phase": "decode", "seq_len": 64, "batch_size": 3}


def overhead_case(mode, low, value, high, **factors):
    details = {"threads": 0.1, "cpu": [0.0, 0.01, 0.02], "plain_ms": 4, "pass_ms": 8}
    row = interval("overhead", low, value, high, scope=f"decode {mode}", details=details)
    return DECODE | factors, [row]


def layer_case(layer, operations):
    details = {"layer": layer, "share": 1.0, "operations_ms": operations, "deep_passes": 3}
    row = Measurement(
        "layer_time", sum(operations.values()), 1.0, 200.0, 0.95, 7, scope=layer, details=details
    )
    return DECODE, [row]
