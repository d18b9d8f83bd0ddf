"""Cases of attention: names, measurements of a user's functions, refusals, and losses."""

import pytest
import torch

from nanolib.experiments.attention import cases as attention
from nanolib.measurement import BadInput, Flag
from nanolib.meters.memory import LiveBytes
from tests.measuring import timed_alone

CALL = "tests.models.inputs:strided_attention"
MASK = "tests.models.inputs:even_distance"
SHAPE = {"seq_lens": [48], "num_heads": 2, "head_dim": 8, "quality_attentions": [], "device": "cpu"}


def _case(kind, **changes):
    params = attention.Params(attention_types=[kind], budget_s=0.01, rel_ci=0.5, **SHAPE | changes)
    return attention.cases(params)[-1], params


@pytest.mark.parametrize(
    ("kind", "counted"),
    [
        ({"kind": "own", "call": CALL}, False),
        ({"kind": "sparse", "pattern": "own", "mask_mod": MASK}, True),
    ],
)
@pytest.mark.parametrize("causal", [True, False])
def test_what_a_user_brings_is_a_case_like_all_others(kind, counted, causal):
    case, params = _case(kind, causal=causal)
    assert not case.unsupported_reason()
    rows = {(row.metric, row.scope): row for row in timed_alone(case.measure(params, {}))}
    assert rows["relative_error", "forward"].estimate < 1e-5
    assert {"forward", "backward"} <= {scope for metric, scope in rows if metric == "latency"}
    assert (("flops", "forward") in rows) == counted == (("sparsity", "") in rows)
    if "mask_mod" in kind:
        h, q, k = torch.meshgrid(torch.arange(2), torch.arange(48), torch.arange(48), indexing="ij")
        kept = ((q - k) % (2 + h) == 0) & ((k <= q) | (not causal))
        assert rows["flops", "forward"].estimate == 4 * 8 * int(kept.sum())


def test_code_of_a_user_is_left_alone_before_a_run(monkeypatch):
    monkeypatch.setattr(attention, "import_callable", lambda *_: pytest.fail("it was imported"))
    for kind in (
        {"kind": "own", "call": "not.there:attend"},
        {"kind": "flex", "pattern": "own", "mask_mod": "not.there:mask"},
    ):
        case, _ = _case(kind)
        assert case.runs_code and set(case.formulas()) == {"bytes"} and not case.plan().peaks


def _own(name):
    return _case({"kind": "own", "call": f"tests.models.inputs:{name}"})


@pytest.mark.parametrize("name", ["returns_nothing", "returns_float64"])
def test_a_function_that_returns_something_else_is_refused(name):
    wanted = r"returned .*; return shape \[1, 2, 48, 8\] in torch.float32"
    with pytest.raises(BadInput, match=wanted):
        case, _ = _own(name)
        case.attend(case.inputs(0))


def test_outputs_that_are_not_numbers_end_a_case_before_it_is_timed():
    case, params = _own("returns_nan")
    with pytest.raises(ValueError, match="infinite values or NaN"):
        list(timed_alone(case.measure(params, {})))


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ({"kind": "dense", "backend": "flash", "impl": "FA4"}, "dense (flash FA4)"),
        ({"kind": "flex", "pattern": "window", "backend": "flash"}, "flex flash window"),
        (
            {"kind": "sparse", "window": 8, "global_tokens": 4, "block_size": 8},
            "local_global 8 4 block_size=8",
        ),
        ({"kind": "sparse", "pattern": "document", "document_lengths": [5, 9]}, "document 5+9"),
        ({"kind": "flex", "sparsity": 0.9, "seed": 0}, "flex local_global s=0.9 seed=0"),
    ],
)
def test_a_kind_has_a_name_of_its_own(kind, name):
    assert _case(kind)[0].name == name


@pytest.mark.parametrize(("block_size", "removes"), [(128, False), (8, True)])
def test_a_mask_that_removes_nothing_is_flagged_beside_what_was_asked(block_size, removes):
    kind = {"kind": "sparse", "pattern": "top_k", "sparsity": 0.75, "block_size": block_size}
    case, params = _case(kind, backward=False)
    rows = timed_alone(case.measure(params, {}))
    row = next(row for row in rows if row.metric == "sparsity")
    assert (row.estimate > 0) == removes == (Flag.MASK_IS_DENSE not in row.flags)
    assert row.predicted == 0.75


def test_the_check_of_a_long_sequence_needs_no_mask_of_all_pairs():
    case, _ = _case({"kind": "dense"}, seq_lens=[8192], num_heads=1, backward=False)
    inputs = case.inputs(0)
    with LiveBytes() as counter:
        row = case._error(case.attend(inputs), inputs, None)
    assert row.estimate < 1e-5 and counter.peak < 8192**2


def test_the_version_of_flash_attn_that_is_found_is_part_of_the_case(monkeypatch):
    monkeypatch.setattr(attention, "flash_attn_version", lambda version="auto": 4)
    case, _ = _case({"kind": "flash_attn"})
    assert (case.options, case.name) == ({"version": 4}, "flash_attn (4)")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "sparsity"),
    [({"sparsity": 0.75}, 0.75), ({"pattern": "dca"}, None), ({"window": 64}, 0)],
)
def test_a_pattern_has_a_sparsity_and_its_losses_an_interval_over_seeds(
    monkeypatch, options, sparsity
):
    """Of two decoders that have learnt nothing. What removes nothing costs nothing."""
    monkeypatch.setattr(attention, "_HELD_OUT_BATCHES", 2)
    monkeypatch.setattr(attention, "_BATCH", 2)
    shape = {"seq_len": 64, "d_model": 32, "num_layers": 1, "seeds": 2, "steps": 2}
    given = {"pattern": "window", "block_size": 4} | options
    case = attention.QualityCase("cpu", "", given, **shape)
    rows = {row.metric: row for row in case.measure(None, {})}
    found, loss = rows["sparsity"], rows["loss_difference"]
    assert found.predicted == options.get("sparsity")
    assert sparsity is None or found.estimate == pytest.approx(sparsity, abs=0.05 * sparsity)
    assert loss.low <= loss.estimate <= loss.high and len(loss.samples) == 2
    assert sparsity != 0 or loss.estimate == pytest.approx(0, abs=2e-3)
