import math

import pytest
import torch

from nanolib.experiments.fp8 import cases as fp8
from nanolib.experiments.fp8 import small_decoder
from nanolib.experiments.fp8.small_decoder import ParityCase, _error_rows, parity_verdict
from nanolib.experiments.fp8.view import parity_table, speed_table
from nanolib.models import create_model
from nanolib.models import fp8 as casts
from tests.measuring import rows_of

SMALL = {
    "presets": ["gpt_125M"],
    "overrides": {"num_layers": 1, "d_model": 64, "num_heads": 2, "vocab_size": 256},
    "seq_len": 64,
    "batch_size": 2,
    "budget_s": 0.05,
    "parity_steps": 10,
    "d_model": 32,
    "num_layers": 1,
    "train_seq_len": 16,
    "train_batch_size": 2,
}


def _parity(recipe, steps=10):
    shape = {"seq_len": 16, "batch_size": 2, "d_model": 32, "num_layers": 1}
    return ParityCase("cpu", recipe, 2, 0, steps, **shape, margin=0.0025)


def _difference(recipe):
    *_, row = _parity(recipe).measure(fp8.Params(), {})
    return row


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    params = fp8.Params(
        **SMALL,
        precisions=["float32", "tf32", "bfloat16", "fp8_tensorwise"],
        parity_recipes=["bf16_again", "fp8_tensorwise", "scale_off_by_1024"],
        device="cpu",
    )
    return rows_of(fp8, params, tmp_path_factory.mktemp("fp8"))


def test_no_row_shows_an_fp8_speed_without_the_hardware(rows):
    table = speed_table(rows).set_index("precision")
    refused = table.loc["fp8_tensorwise"]
    assert refused["status"] == "unsupported" and math.isnan(refused["latency"])
    assert "no FP8 tensor cores" in refused["message"]
    assert table.loc["tf32", "status"] == "unsupported" and table.loc["bfloat16", "latency"] > 0
    (ratio,) = rows[rows.metric == "speed_up"].to_dict("records")
    assert ratio["factor.precision"] == "float32"
    assert ratio["scope"] == "training_step over bfloat16"


def test_the_parts_of_a_peak_are_what_lives_then(rows):
    is_peak = (rows["factor.precision"] == "float32") & (rows.metric == "peak_memory")
    (peak,) = rows[is_peak].to_dict("records")
    assert "gradients" not in {kind for kind, *_ in peak["details"]["parts"]}  # they come later
    line = speed_table(rows).set_index("precision").loc["float32"]
    assert min(line.weights, line.optimizer, line.activations) > 0.1
    parts = line.weights + line.optimizer + line.activations
    inputs = sum(size for kind, *_, size in peak["details"]["parts"] if kind == "inputs")
    assert parts == pytest.approx(peak["estimate"] - inputs / 2**20)


def test_each_recipe_has_the_error_of_its_products_next_to_its_loss(rows):
    found = rows[rows.metric == "sqnr"]
    assert set(found.provenance) == {"emulated"}
    assert found.groupby("factor.recipe").size().to_dict() == {
        "fp8_tensorwise": 7 * 3,
        "scale_off_by_1024": 7 * 3,
    }
    assert "blocks.0.mlp.down weight_gradient" in set(found.scope)
    table = parity_table(rows)
    assert set(table.provenance) == {"emulated"} and list(table.control) == [False, False, True]
    again, fp8_recipe, control = table.sqnr
    assert math.isnan(again) and 20 < fp8_recipe < 40 and control < 1


def test_the_error_of_a_product_is_that_of_its_own_casts():
    g = torch.Generator().manual_seed(0)
    operands = [torch.randn(size, generator=g) for size in ((48, 32), (16, 32), (48, 16))]
    errors = {
        casts_of: {row.scope: row.estimate for row in _error_rows("a", casts_of, *operands)}
        for casts_of in ("tensorwise", "rowwise_with_gw_hp", "e5m2_everywhere")
    }
    bit = errors["tensorwise"]["a output"] - errors["e5m2_everywhere"]["a output"]
    assert 4 < bit < 8  # one bit of mantissa: 6 dB
    assert errors["rowwise_with_gw_hp"]["a weight_gradient"] == 200  # float32


def test_a_last_bit_of_the_weights_changes_the_loss_little():
    recipes = ("bf16", "bf16_again")
    loss, again = (small_decoder._last_loss(_parity(name, 40), 3, "") for name in recipes)
    assert again != loss and again == pytest.approx(loss, rel=1e-3)


def test_a_recipe_that_changes_nothing_differs_by_nothing(monkeypatch):
    """The pairing holds: with bf16's own casts under another name, differences are exactly zero."""
    monkeypatch.setitem(casts.RECIPES, "tensorwise", casts.recipe_of(casts.BF16))
    small_decoder._last_loss.cache_clear()
    row = _difference("fp8_tensorwise")
    small_decoder._last_loss.cache_clear()
    assert row.samples == (0.0, 0.0) and row.details["verdict"] == "equivalent"


def test_a_loss_that_is_not_finite_is_worse_without_a_number(monkeypatch):
    monkeypatch.setattr(
        small_decoder, "_last_loss", lambda case, *_: 1.0 if case.recipe == "bf16" else math.nan
    )
    row = _difference("no_scaling")
    assert row.estimate is None and row.details["verdict"] == "worse"
    assert "infinite or NaN in 2 of 2" in row.message


@pytest.mark.parametrize(
    ("mean", "spread", "verdict"),
    [
        (0.0, 0.001, "equivalent"),
        (0.0025, 0.0005, "equivalent"),  # surely above zero, and surely within the margin
        (0.025, 0.005, "worse"),
        (-0.025, 0.005, "better"),
        (0.005, 0.03, "inconclusive"),
    ],
)
def test_what_is_said_of_differences(mean, spread, verdict):
    differences = [mean + spread * share for share in (-1, 1, 0.5, 0, -0.5)]
    assert parity_verdict(differences, 0.006) == verdict


def test_the_converted_share_is_of_all_flops():
    case = next(case for case in fp8.cases(fp8.Params(**SMALL)) if getattr(case, "recipe", ""))
    model = create_model(case.model_case.config, "meta")
    casts.convert(model, case.recipe, excluded_modules=case.keep, emulate=True)
    d, n = 64, 64
    row = case.converted_share(model, dict.fromkeys(casts.linear_layers(model), 2 * n))
    linear = 2 * n * (4 * d * d + 2 * d * 4 * d)
    rest = 2 * n * d * 256 + 4 * 2 * (n * (n + 1) // 2) * 32  # the head, and attention
    assert row.estimate == pytest.approx(linear / (linear + rest))
    assert row.details["kept"] == ["head"]
    assert row.details["amdahl_bound"] == pytest.approx(1 / (1 - row.estimate / 2))
