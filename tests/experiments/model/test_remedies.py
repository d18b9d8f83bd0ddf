"""What lowers the peak of a training step: planned as it is measured, and what it costs."""

import pytest
import torch

from nanolib.config import NanoConfig
from nanolib.experiments.model import cases as model
from nanolib.experiments.model.planner import Planner
from nanolib.experiments.model.planning import checked, plan
from nanolib.experiments.model.remedies import AS_IT_IS, CHANGED, REMEDIES, RemedyCase
from nanolib.measurement import BadInput, Measurement
from nanolib.meters.memory import fake_tensors
from nanolib.models import create_model
from nanolib.models.optimise import optimise
from nanolib.run.workload import holding, holdings_by_checkpointing
from tests.experiments.own import LLAMA, TINY

PARAMS = model.Params(budget_s=0.01, rel_ci=0.5, device="cpu")


def _case(remedy, preset="decoder_tiny", overrides=TINY, batch=4):
    kind = "dense" if preset in ("decoder_tiny", "encoder_decoder_tiny") else "own"
    return RemedyCase("cpu", preset, preset, overrides, kind, 32, batch, "float32", remedy)


@pytest.mark.parametrize(
    "preset",
    ["decoder_tiny", pytest.param("encoder_decoder_tiny", marks=pytest.mark.thorough), "hf:LlamaForCausalLM"],
)
@pytest.mark.parametrize("remedy", REMEDIES)
def test_both_peaks_are_as_planned_and_the_ratio_is_of_steps_in_turns(remedy, preset):
    if remedy == "checkpoint_half" and preset.startswith("hf:"):
        assert "no way to checkpoint some" in _case(remedy, preset, LLAMA).plan().unsupported
        return
    case = _case(remedy, preset, LLAMA if preset.startswith("hf:") else TINY)
    rows = {(row.metric, row.scope): row for row in case.measure(PARAMS, {})}
    for scope in (AS_IT_IS, CHANGED):
        peak = rows["peak_memory", scope]
        assert peak.estimate == pytest.approx(peak.predicted, rel=0.05)
    before, after = rows["peak_memory", AS_IT_IS].estimate, rows["peak_memory", CHANGED].estimate
    assert after < before
    ratio = rows["ratio", CHANGED]
    assert ratio.method == "interleaved_pairs" and ratio.n == len(ratio.samples) > 0
    assert case.predict()["peak_memory"] == pytest.approx(after, rel=0.05)
    assert case.plan().most >= max(before, after) * 2**20 * 0.99


def test_the_ratio_is_per_token_and_has_an_interval_from_six_pairs_on(monkeypatch):
    def timed(phases, *_, **__):
        def row(scope, series):
            details = {"calls_per_block": 2, "warmup_cut": 2}
            return Measurement("latency", 1.0, samples=tuple(series), scope=scope, details=details)

        as_it_is, changed = phases
        return {
            as_it_is: row(as_it_is, [9, 9, *[2.0, 2.2] * pairs]),
            changed: row(changed, [1, 1, *[3.0, 3.3] * pairs]),
        }

    monkeypatch.setattr("nanolib.experiments.model.remedies.measure_phases", timed)
    for pairs, known in ((6, True), (4, False)):
        (ratio,) = (row for row in _case("half_batch").measure(PARAMS, {}) if row.metric == "ratio")
        assert ratio.estimate == pytest.approx(2 * 1.5) and ratio.n == pairs
        assert (ratio.low is not None) == known and (not known or ratio.low == pytest.approx(3.0))


def test_what_changes_nothing_is_not_tried_and_what_cannot_be_is_told():
    params = model.Params(
        dtypes=["bfloat16"], peak_remedies=["bfloat16", "sgd", "half_batch"], overrides=TINY, seq_lens=[16]
    )
    tried = {case.remedy: case for case in model.cases(params) if isinstance(case, RemedyCase)}
    assert set(tried) == {"sgd", "half_batch"}
    assert "a batch of 1 cannot be halved; give an even one" in tried["half_batch"].unsupported()
    assert not [case for case in model.cases(params.replace(train=False)) if isinstance(case, RemedyCase)]
    with pytest.raises(BadInput, match=r"model.peak_remedies.*'pray' is no remedy; use checkpoint, "):
        model.Params(peak_remedies=["pray"])


@pytest.mark.parametrize("preset", ["decoder_tiny", "encoder_decoder_tiny"])
def test_some_blocks_checkpointed_give_the_same_gradient(preset):
    torch.manual_seed(0)
    one = create_model(NanoConfig.from_preset(preset, **TINY), seed=3)
    ids = torch.randint(0, 300, (2, 17))
    gradients = []
    for checkpointing in (False, 1, 2, True):
        one.checkpointing = checkpointing
        one.zero_grad()
        one.loss(ids).backward()
        gradients.append(torch.cat([p.grad.flatten() for p in one.parameters()]))
    assert all(torch.equal(gradients[0], other) for other in gradients[1:])
    optimise("checkpoint_half", one, one, ids)
    assert one.checkpointing == 1


@pytest.mark.parametrize(
    "preset",
    ["decoder_tiny", *(pytest.param(n, marks=pytest.mark.thorough) for n in ("encoder_decoder_tiny", "gpt_125M"))],
)
@pytest.mark.parametrize("shape", [pytest.param((1, 16), marks=pytest.mark.thorough), (8, 64)])
def test_any_number_of_checkpointed_blocks_follows_from_three_low_stacks(preset, shape):
    batch, length = shape
    small = {"num_layers": 7, "d_model": 64, "num_heads": 4, "vocab_size": 128}
    case = Planner(checked(preset, length, batch, "float32", "dense", small), "adamw", 1)._case("training", *shape)
    tell = holdings_by_checkpointing(case.at_checkpointing)
    for checkpointed in (1, 4, 6):
        with fake_tensors():
            made, works = case.at_checkpointing(checkpointed, 7 - checkpointed)
            whole = holding(next(works), made)
        assert tell(checkpointed, 7 - checkpointed).parts == whole.parts


def test_the_plan_names_the_fewest_blocks_that_make_it_fit():
    small = {"num_layers": 8, "d_model": 64, "num_heads": 4, "vocab_size": 128}
    asked = {"seq_len": 128, "batch_size": 32, "options": small}
    planner = Planner(checked("decoder_tiny", 128, 32, "float32", "dense", small), "adamw", 1)
    lowest, highest = (planner.holding(name, 32, 128).peak for name in ("training, checkpointed", "training"))
    between = (lowest + highest) // 2
    found = plan("decoder_tiny", between, **asked)
    some, of = found.uses[2].checkpointed
    assert of == 8 and 0 < some < 8
    assert f"checkpoint the first {some} of 8 blocks, or batch " in str(found)
    assert planner.checkpointed(between) == (some, 8)
    assert planner.checkpointed(lowest) == (7, 8)  # at the peak the last block computes, checkpointed or not
    assert planner.checkpointed(lowest - 1) == (0, 0)
    assert next(u for u in found.to_dict()["uses"] if u["use"] == "training")["checkpointed_blocks"] == some


def test_remedies_of_a_step_are_planned_with_it():
    case = RemedyCase("cpu", "a model", "decoder_tiny", {}, "dense", 32, 2, "float32", "sgd")
    assert case.alike == case.training_step().alike != case.changed.case_id
