"""Tokens per second count every sequence and every token: sizes are all different, and a call takes 4 ms."""

import contextlib

import pytest

from nanolib.experiments.energy.cases import EnergyCase
from nanolib.experiments.model import cases as model
from nanolib.measurement import Measurement


def _answered(measuring):
    """The rows of a case whose timings take 4 ms each."""
    ms = {"method": "perf_counter", "samples": (4.0,)}
    answer, rows = None, []
    with contextlib.suppress(StopIteration):
        while True:
            made = measuring.send(answer)
            answer = None
            if isinstance(made, Measurement):
                rows.append(made)
            else:
                answer = {
                    name: Measurement("latency", 4.0, 2.0, 5.0, 0.95, 20, scope=name, **ms)
                    for name in (*made.phases, made.total)
                }
    return rows


def test_of_a_model_they_are_of_all_sequences():
    shape = {"seq_lens": [16], "batch_sizes": [3], "new_tokens": 5, "loss_steps": 0}
    sizes = {"num_layers": 2, "d_model": 32, "num_heads": 4}
    params = model.Params(overrides=sizes, generation_batch_sizes=[], **shape)
    cases = [case for case in model.cases(params) if isinstance(case, model.ModelCase)]
    rows = [row for case in cases for row in _answered(case.measure(params, {}))]
    found = {row.scope: row for row in rows if row.metric == "tokens_per_second"}
    tokens = {"inference": 48, "training_step": 48, "prefill": 48, "decode": 3}
    assert found.keys() == tokens.keys()
    for scope, row in found.items():
        rates = [tokens[scope] / seconds for seconds in (5e-3, 4e-3, 2e-3)]
        assert [row.low, row.estimate, row.high] == pytest.approx(rates)


def test_energy_is_that_of_the_attention_which_overrides_name():
    shape = ("decode", 16, 3, 5, "float32")
    case = EnergyCase("cpu", "tiny", "decoder_tiny", {"attention_type": "sparse"}, *shape)
    assert case.model_case.attention_type == "sparse"
