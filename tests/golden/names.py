"""The one table between nanolib and the sheet: nanolib's word → the sheet's, and the few ways by which answers are asked for.

The sheet keeps the words that it was first written with. A word that is renamed in nanolib moves from its list into the mapping
next to it, `{"weight_memory": "footprint"}`, and the sheet does not change. A name that is in neither is an error: say
here what it is called in the sheet, or why it is not in it.
"""

import itertools

from nanolib.experiments import ALL
from nanolib.measurement import METRICS as DECLARED
from nanolib.params import read_yaml
from nanolib.paths import checkout
from tests.measuring import timed_alone


def _same(words):
    return {word: word for word in words.split()}


SUITES = ("quick", "full")
NOTEBOOKS = _same("attention distributed energy fp8 model warmup")

CASES = _same(
    "AttentionCase QualityCase CeilingCase ModelCase WarmupCase EnergyCase SpeedCase"
    " ParityCase ShardedCase MemoryCase"
)

# Classes of which no row is the same everywhere, so that none is run for the sheet: their factors and plans are in it.
NOT_RUN = {
    "CeilingCase",  # rates of this machine
    "WarmupCase",  # times
}

# Classes of which so many rows come first, and the rest is energy.
ONLY_FIRST = {"EnergyCase": 1}

FACTORS = _same(
    "attention_type options seq_len batch_size dtype num_heads num_kv_heads head_dim causal backward"
    " seeds steps d_model num_layers ceiling preset overrides mode"
    " new_tokens direction process warmup_steps curve_steps"
    " precision compiled keep first_seed margin"
    " world_size threads phase algorithm"
) | {
    "optimization": "optimisation",
    "recipe": "arm",
}
NOT_FACTORS = {
    "device",  # always the CPU here
    "name",  # for charts, and made of the others
}

METRICS = _same(
    "parameters flops bytes sparsity block_sparsity converted_share wire_bytes peak_memory loss"
    " loss_difference"
) | {
    "weight_memory": "footprint",
    "communication_steps": "rounds",
    "loss_difference_from_bf16": "parity",
}
_TIMES = "case_duration latency layer_time component_time link_latency warmup_needed overhead"
_TIMES += " speed_up"
_RATES = "flops_per_second mfu ceiling_flops ceiling_bytes tokens_per_second link_bandwidth"
_POWER = "power energy net_energy energy_per_token layer_energy"
_ROUNDING = "relative_error ulp_difference greedy_agreement sqnr"
_SYSTEM = "reserved_memory resident_memory"  # what an allocator or the system gave
LEFT_OUT = _same(" ".join((_TIMES, _RATES, _POWER, _ROUNDING, _SYSTEM)))
MIB = {name for name, metric in DECLARED.items() if metric.unit == "MiB"}  # written in bytes

# Metrics of which not all decimals are the same everywhere. By torch's
# and oneDNN's code for SSE 4.1, AVX2 and AVX-512, on one thread and two, these losses differ by at most 0.00013 nats.
ROUNDED = {"loss", "loss_difference", "loss_difference_from_bf16"}

# What is said of a case before it runs, other than metrics.
PREDICTED = (
    {"of the peak as it is": "of the peak as it is"} | _same("tokens steps amdahl_bound") | METRICS
)
NOT_PREDICTED = {
    "communication steps",  # the rows say it
    "bytes sent per rank",
}

# How rows were made: nanolib's word → the sheet's.
METHODS = (
    {
        word: word
        for word in ("byte text, AdamW", "mean over seeds", "paired by seed, Student's interval")
    }
    | {"kept": "formula"}
    | _same("formula flop_counter mask count live_tensor_bytes plan audit")
)
NOT_METHODS = {
    "interface",  # counted by the system's network
    "computed",  # counted with what a checkpoint computes again
}


# The ways in.


def params_of(suite, notebook):
    """The checked parameters of a notebook in a suite."""
    return ALL[notebook]().Params(
        **read_yaml(checkout() / "params" / suite / f"{notebook}.yml") | {"device": "cpu"}
    )


def rows_of(case, params, collect):
    """The rows that it would store; `collect` takes the place of every timing."""
    if case.unsupported():
        return iter(())
    rows = timed_alone(case.measure(params.collected_by(collect), {}))
    return itertools.islice(rows, ONLY_FIRST.get(type(case).__name__))


# What depends on the machine: who asks for it.
MEMORY = ("nanolib.run.memory_plan.free_bytes",)
TEXT = ("nanolib.models.text.load",)
RANKS = ("nanolib.experiments.distributed.case.measure_on_ranks",)
ON_RANKS = {"ShardedCase"}
RESIDENT = ("nanolib.run.memory_plan.resident_row", "nanolib.meters.memory.resident_row")
