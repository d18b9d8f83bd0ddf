"""Tokens per second count every sequence and every token: sizes are all different, and a call takes 4 ms."""

import contextlib

import pytest

from nanolib.experiments.energy.cases import EnergyCase
from nanolib.experiments.model import cases as model
from nanolib.measurement import Measurement

SHAPE = {
    "seq_lens": [16],
    "batch_sizes": [3],
    "overrides": {"num_layers": 2, "d_model": 32, "num_heads": 4},
}


def _four_ms(*_, scope="", **__):
    return Measurement(
        "latency", 4.0, 2.0, 5.0, 0.95, 20, samples=(4.0,), method="perf_counter", scope=scope
    )


def _answered(measuring):
    """The rows of a case whose timings take 4 ms each."""
    answer, rows = None, []
    with contextlib.suppress(StopIteration):
        while True:
            made = measuring.send(answer)
            answer = None
            if isinstance(made, Measurement):
                rows.append(made)
            else:
                answer = {name: _four_ms(scope=name) for name in (*made.phases, made.total)}
    return rows


def rates(rows):
    found = [row for row in rows if row.metric == "tokens_per_second"]
    return {row.scope: (row.low, row.estimate, row.high) for row in found}


def test_of_a_model_they_are_of_all_sequences():
    rest = {"loss_steps": 0, "generation_batch_sizes": []}
    params = model.Params(new_tokens=5, **rest, **SHAPE)
    found = {}
    for case in model.cases(params):
        if isinstance(case, model.ModelCase):
            found |= rates(_answered(case.measure(params, {})))
    of_all, of_one = (48 / 5e-3, 48 / 4e-3, 48 / 2e-3), (3 / 5e-3, 3 / 4e-3, 3 / 2e-3)
    expected = {"inference": of_all, "training_step": of_all, "prefill": of_all, "decode": of_one}
    assert {scope: pytest.approx(ends) for scope, ends in expected.items()} == found


@pytest.mark.parametrize(
    ("phase", "tokens"), [("decode", 3), ("prefill", 48), ("training_step", 48)]
)
def test_of_a_window_they_are_of_all_sequences(phase, tokens):
    shape = ({"attention_type": "sparse"}, phase, 16, 3, 5, "float32")
    case = EnergyCase("cpu", "tiny", "decoder_tiny", *shape)
    assert case.tokens == tokens and case.model_case.attention_type == "sparse"
