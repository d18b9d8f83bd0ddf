"""What a call must move, counted from what its operations take and change."""

import pytest
import torch

from nanolib.experiments.model.steps import Training
from nanolib.measurement import MemoryKind
from nanolib.meters.flops import BytesRead
from nanolib.stats.intervals import Interval
from tests.experiments import own
from tests.experiments.own import TINY


def test_the_bytes_of_a_training_step_are_those_that_its_operations_take_and_change():
    case = own.case("training", shape=(16, 2))
    step = Training(case.build(0), torch.randint(300, (2, 17)), "eager")
    step()  # the states are there then
    weights, moved = [*step.model.parameters()], 0
    for phase in ("forward", "backward"):
        with BytesRead(weights) as read:
            step.phases[phase]()
        moved += read.bytes
    gradients = [weight.grad for weight in weights]
    states = [state for state in step.kinds()[MemoryKind.STATES] if state.dim()]
    taken = {x: x.clone() for x in (*weights, *gradients, *states)}
    step.phases["optimizer_step"]()
    changed = [x for x, before in taken.items() if not torch.equal(x, before)]
    assert case.formulas()["bytes"] == moved + sum(x.nbytes for x in (*gradients, *taken, *changed))


def test_a_step_is_predicted_by_the_peak_rates_if_both_are_known():
    rates = {name: Interval(rate, rate, rate) for name, rate in (("float32", 1e12), ("copy", 1e9))}
    case = own.case("training", shape=(16, 1))
    found = case.formulas(rates)
    assert found["latency"] == pytest.approx(found["bytes"] / 1e6)
    assert not any("latency" in case.formulas({name: rates[name]}) for name in rates)


@pytest.mark.parametrize(("n", "keys"), [(40, 15), (10, 10)])
def test_a_token_of_a_window_reads_the_windows_keys(n, keys):
    options = {"attention_options": {"pattern": "window", "window": 16, "block_size": 8}}
    given = {"mode": "generation", "overrides": TINY | options, "shape": (n, 3), "new_tokens": 1}
    dense, window = (own.case(attention_type=name, **given) for name in ("dense", "sparse"))
    a_key = 2 * TINY["num_layers"] * 3 * TINY["d_model"] * 4
    assert dense.formulas()["bytes"] - window.formulas()["bytes"] == (n - keys) * a_key


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"tie_embeddings": False},
        {"num_kv_heads": 2, "mlp": "gelu"},
        {"attention_options": {"pattern": "dca", "window": 8}},
    ],
)
def test_its_bytes_are_those_of_the_weights_it_reads_and_of_the_cache(more):
    kind = "sparse" if "attention_options" in more else "dense"
    given = {"overrides": TINY | more, "shape": (32, 2), "attention_type": kind, "new_tokens": 2}
    case = own.case("generation", **given)
    model = case.build(0)
    prompt = torch.arange(64).view(2, 32)
    with torch.inference_mode():
        cache = model.new_cache(2, 32, 2)
        model.prefill(prompt, cache)
        with BytesRead(model.parameters()) as read:
            model.decode(prompt[:, 0], cache)
    per_token = 2 * case.config.num_layers * case.config.kv_heads * case.config.head_dim
    assert case.formulas()["bytes"] == read.bytes + 4 * prompt.numel() * per_token
