"""Tokens per second count every sequence and every token: sizes are all different."""

import pytest

from nanolib.experiments.energy.cases import EnergyCase
from nanolib.experiments.model import cases as model
from tests.measuring import timed_alone


def test_of_a_model_they_are_of_all_sequences():
    params = model.Params(
        overrides={"num_layers": 2, "d_model": 32, "num_heads": 4},
        seq_lens=[16],
        batch_sizes=[3],
        new_tokens=5,
        generation_batch_sizes=[],
        budget_s=0.01,
    )
    cases = [case for case in model.cases(params) if isinstance(case, model.ModelCase)]
    rows = [row for case in cases for row in timed_alone(case.measure(params, {}))]
    found = {(row.metric, row.scope): row.estimate for row in rows}
    for scope, tokens in {"inference": 48, "training_step": 48, "prefill": 48, "decode": 3}.items():
        rate, ms = found["tokens_per_second", scope], found["latency", scope]
        assert rate * ms / 1e3 == pytest.approx(tokens)


def test_energy_is_that_of_the_attention_which_overrides_name():
    shape = (16, 3, "decode", 5, "float32")
    case = EnergyCase("cpu", "tiny", "decoder_tiny", {"attention_type": "sparse"}, *shape)
    assert case.model_case.attention_type == "sparse"
