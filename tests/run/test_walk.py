"""Run every value of the full parameters once, small, or show why it cannot run.

A new attention, pattern, dtype, optimization, precision or algorithm fails here until it is walked.
"""

import re
from functools import partial
from types import SimpleNamespace
from typing import Literal, get_args, get_origin

import pytest
import torch
import yaml
from torch._inductor import list_mode_options

from nanolib.config import ATTENTION_KINDS, DTYPES
from nanolib.experiments import ALL
from nanolib.meters import clock
from nanolib.models.attention.dynamic import CHOOSERS
from nanolib.models.attention.patterns import PATTERNS
from nanolib.models.training import OPTIMIZATIONS
from nanolib.params import read_yaml
from nanolib.paths import checkout
from nanolib.run import sweep
from tests.models.inputs import REQUIRED

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("small_ceilings")]

_ALLOWED = {"float64": 1e-12, "float32": 1e-5, "float16": 2e-3, "bfloat16": 1e-2}  # against float64
WINDOW = {"pattern": "window", "window": 16}
OTHER_DTYPES = [dtype for dtype in DTYPES if dtype != "float32"]
# Notebook → parameters that make the cases of all of its runs small.
SMALL = yaml.safe_load("""
attention:
  seq_lens: [64]
  batch_sizes: [2]
  dtypes: [float32]
  num_heads: 2
  head_dim: 16
  cold_cache: false
  quality_seq_len: 48
  quality_seeds: 2
  quality_steps: 3
  quality_d_model: 32
  quality_layers: 1
model:
  presets: [small]
  overrides: &tiny {num_layers: 1, d_model: 64, num_heads: 2, vocab_size: 512}
  seq_lens: [16]
  batch_sizes: [1]
  dtypes: [float32]
  new_tokens: 2
  generation_batch_sizes: []
  optimizations: [eager]
warmup:
  overrides: *tiny
  seq_len: 16
  steps: 6
  curve_steps: 20
  processes: 5
energy:
  presets: [small]
  overrides: *tiny
  seq_lens: [16]
  new_tokens: 4
  window_s: 1.1
fp8:
  presets: [gpt_125M]
  overrides: *tiny
  compiled: [false]
  seq_len: 16
  batch_size: 1
  parity_seeds: 2
  parity_steps: 10
  d_model: 32
  num_layers: 1
  train_seq_len: 16
  train_batch_size: 2
distributed:
  seq_lens: [64]
  prefill_seq_lens: [32]
  memory_seq_lens: []
  num_heads: 4
  num_kv_heads: 2
  head_dim: 16
""")
TINY = SMALL["model"]["overrides"]
OWN = {"model": "tests.experiments.own:build", "model_options": TINY, "overrides": {}}
# Notebook → further changes of its full parameters for each run, so that each value comes up once.
# Values that would multiply are in several runs.
WALK = {
    "attention": [
        {"batch_sizes": [1]},
        {
            "attention_types": [{"kind": "dense", "backend": "flash"}, {"kind": "sparse"} | WINDOW],
            "dtypes": OTHER_DTYPES,
            "cold_cache": True,
            "quality_attentions": [],
        },
        {  # forward only: a compiled kernel has no backward pass here
            "attention_types": [{"kind": "flex", "block_size": 32} | WINDOW],
            "backward": False,
            "quality_attentions": [],
        },
        {  # a user's own attention, and patterns with required options
            "attention_types": [
                {"kind": "own", "call": "tests.models.inputs:strided_attention"},
                *({"kind": "sparse", "pattern": name} | REQUIRED[name] for name in REQUIRED),
                {"kind": "sparse", "pattern": "prefix_lm", "global_tokens": 10},
                {"kind": "dense", "backend": "flash", "impl": "FA4"},
                {"kind": "flash_attn", "version": 4},
            ],
            "quality_attentions": [],
        },
    ],
    "model": [
        {
            "presets": ["decoder_small", "small", "gpt_125M"],  # one of each kind
            "batch_sizes": [2],
        },
        {"optimizations": list(OPTIMIZATIONS)},
        {"optimizations": ["eager", "checkpoint"], "dtypes": OTHER_DTYPES},
        {
            "overrides": TINY | {"attention_options": WINDOW | {"window": 8, "block_size": 16}},
            "attention_types": ["sparse"],
            "generation_batch_sizes": [3],
        },
    ],
    "warmup": [{"warmup_steps": [0, 2]}, OWN | {"directions": ["forward_backward"]}],
    "energy": [{}, OWN | {"phases": ["decode"], "profiling": ["deep"]}],
    "fp8": [{}, OWN | {"precisions": ["bfloat16"], "parity_recipes": []}],
    "distributed": [
        {"world_sizes": [1, 2], "memory_seq_lens": [32], "dtypes": ["float32"]},
        {"world_sizes": [2], "dtypes": OTHER_DTYPES},
    ],
}
KNOWN = (
    r"SDPA backend \w+ ",
    r"the attention needs flash_attn, which cannot be imported \(version \d: ",
    r"impl FA4 has no cpu kernel",
    r"FlexAttention has no backward pass on CPU",
    r"(cuda_graph|compile_reduce_overhead) needs a CUDA device, and the device is cpu; "
    r"leave it out",
    r"cpu has no (FP8 tensor cores|tf32)",
    r"the memory counter cannot track a compiled kernel",
    r"[\w ]+ took [\d.e-]+ s, and \w+ changes every",
)


def params_of(name, changes):
    values = read_yaml(checkout() / "params" / "full" / f"{name}.yml")
    quick = {"device": "cpu", "budget_s": 0.02, "rel_ci": 0.5, "case_timeout_s": 300.0}
    return ALL[name]().Params(**values | quick | SMALL[name] | changes)


def _cases(experiment, params):
    """List the cases, of a cold process only the first of each direction."""
    return [case for case in experiment.cases(params) if getattr(case, "process", 1) == 1]


def _compile(function, mode="default", compiled=torch.compile, **rest):
    """Compile kernels in the default mode only, and check that torch has the other modes."""
    list_mode_options(mode)
    backend = "inductor" if mode == "default" else "eager"
    return compiled(function, mode=mode, backend=backend, **rest)


@pytest.mark.parametrize(
    ("name", "at"), [(name, at) for name, runs in WALK.items() for at in range(len(runs))]
)
def test_every_case_runs_or_says_why_it_cannot(store, monkeypatch, name, at):
    # Another test checks how much the cache is cleared.
    monkeypatch.setattr(clock, "last_level_bytes", lambda _: 2**20)
    monkeypatch.setattr(torch, "compile", _compile)
    params = params_of(name, WALK[name][at])
    walk = SimpleNamespace(cases=partial(_cases, ALL[name]()))
    rows = sweep.measure(walk, params, store=store).measurements()
    ends = rows[rows.metric == "case_duration"]
    wrong = ends[~ends.status.isin(["ok", "unsupported"])]
    assert wrong.empty, wrong[["status", "message", "factors"]].to_dict("records")
    said = rows[rows.status == "unsupported"].message
    assert not [text for text in said if not any(re.match(known, text) for known in KNOWN)]
    assert (ends.status == "ok").any()
    against = rows[(rows.metric == "relative_error") & (rows.scope == "against_eager")]
    rounded = [factors["optimization"].startswith("autocast") for factors in against.factors]
    assert (against.estimate < [0.1 if low else 1e-4 for low in rounded]).all()
    errors = rows[(rows.metric == "relative_error") & (rows.scope == "forward")]
    assert (errors.estimate < [_ALLOWED[factors["dtype"]] for factors in errors.factors]).all()


def _walked(name, field):
    values = (getattr(params_of(name, changes), field) for changes in WALK[name])
    return {value for of_run in values for value in of_run}


@pytest.mark.parametrize("name", WALK)
def test_nothing_that_can_be_asked_for_is_left_out(name):
    for field, info in ALL[name]().Params.model_fields.items():
        (inner, *_) = get_args(info.annotation) or [None]
        # A model of each kind is walked, and each attention in its own notebook.
        is_list = get_origin(info.annotation) is list and field not in (
            "presets",
            "attention_types",
        )
        if is_list and get_origin(inner) is Literal:
            assert _walked(name, field) == {*get_args(inner)}, field


def test_every_attention_type_and_pattern_is_walked():
    runs = (params_of("attention", changes) for changes in WALK["attention"])
    asked = [kind for params in runs for kind in params.attention_types]
    assert {kind["kind"] for kind in asked} == set(ATTENTION_KINDS)
    assert {kind["pattern"] for kind in asked if kind["kind"] == "sparse"} == {*PATTERNS, *CHOOSERS}
    replaced = [kind["pattern"] for kind in params_of("attention", {}).quality_attentions]
    assert {*replaced} == {*PATTERNS, *CHOOSERS} - {"document", "prefix_lm", "own"}
