"""Cases as the notebooks measure them, to try verdicts on; intervals need not be symmetric."""

from nanolib.measurement import Flag, Measurement, Provenance, exact
from tests.report.rows import SIZES, interval


def timed(scope, low, ms, high, **rest):
    """A latency whose interval is not symmetric."""
    rest = {"details": {"p99": 3 * ms}, "scope": scope} | rest
    return interval("latency", low, ms, high, **rest)


SHAPE = SIZES | {"causal": False, "options": {}}


def attention_case(name, low, ms, high, tiles=0.0, sparsity=0.7, **shape):
    return SHAPE | {"name": name} | shape, [
        timed("forward", low, ms, high),
        exact("sparsity", sparsity, flags=() if sparsity else (Flag.MASK_IS_DENSE,)),
        exact("block_sparsity", tiles),
    ]


def quality_case(target, ends, steps=400):
    """The loss of a trained decoder above dense, with its interval."""
    return SIZES | {"name": f"window s={target}", "seeds": 5, "steps": steps}, [
        exact("sparsity", target),
        interval("loss", 1.9, 2.0, 2.1, scope="dense"),
        interval("loss_difference", *ends, scope="replaced"),
    ]


MODEL = SIZES | {"attention_type": "dense", "name": "tiny", "optimization": "eager"}


def model_case(mode, found, **shape):
    return MODEL | {"mode": mode} | shape, [exact("weight_memory", 5.0), *found]


def inference():
    rate = interval("tokens_per_second", 12_800, 16_000, 17_450, scope="inference")
    return model_case("inference", [timed("inference", 11, 12, 15), rate])


def rank_case(algorithm, ends, parts=(), world=4, flags=()):
    """An algorithm with its interval and those of compute, wait and communication."""
    found = [timed("decode", *ends, flags=flags)]
    for kind, part in zip(("compute", "wait", "communication"), parts, strict=False):
        found.append(interval("component_time", *part, scope=kind))
    shape = {"seq_len": 4096, "dtype": "float32", "world_size": world, "nodes": 1}
    return shape | {"phase": "decode", "algorithm": algorithm}, found


def decode_cases(algorithms, alone=None, **shape):
    """The cases of a launch; `alone` is the time of one rank."""
    times = ({"dense": alone} if alone else {}) | algorithms
    return [rank_case(algorithm, ends, COMPUTING, **shape) for algorithm, ends in times.items()]


COMPUTING = [(8, 8.5, 9), (0.1, 0.2, 0.3), (0.5, 0.6, 0.7)]
CORES = (Flag.OVERSUBSCRIBED,)


def fp8_case(size, precision, low, ms, high):
    factors = {
        "preset": f"preset {size}",
        "name": f"size {size}",
        "mode": "inference",
        "precision": precision,
        "compiled": True,
        "seq_len": 64,
        "batch_size": 3,
    }
    row = timed("inference", low, ms, high, details={"parameters": size})
    bound = Measurement("converted_share", 0.5, scope="model", details={"amdahl_bound": 1.75})
    return factors, [row, bound]


def parity_case(recipe, verdict, difference, control=False, steps=400, margin=0.0025, **rest):
    details = {"verdict": verdict, "control": control, "margin_nats": margin}
    details["provenance"] = rest.get("provenance", Provenance.MEASURED)
    ends = difference - 0.002, difference, difference + 0.001
    row = interval("loss_difference_from_bf16", *ends, scope=recipe, details=details, **rest)
    return {"recipe": recipe, "seeds": 3, "steps": steps}, [row]


DECODE = {"name": "tiny", "phase": "decode", "seq_len": 64, "batch_size": 3}


def warmup_process(direction, process, means, needed=2.0, message=""):
    """One fresh process: its curve, where two steps after each number of steps have a mean, ms."""
    factors = {
        "name": "tiny",
        "direction": direction,
        "process": process,
        "warmup_steps": list(means),
        "steps": 2,
        "seq_len": 64,
    }
    steps = {count + at: mean * (0.75, 1.25)[at] for count, mean in means.items() for at in (0, 1)}
    curve = tuple(steps.get(at, 10.0) for at in range(8))
    details = {"steady_median": None if needed is None else 10.25}
    rest = {"message": message, "details": details}
    return factors, [
        interval("latency", 9.5, 10.0, 10.5, scope=direction, samples=curve),
        Measurement("warmup_needed", needed, scope=direction, **rest),
    ]
