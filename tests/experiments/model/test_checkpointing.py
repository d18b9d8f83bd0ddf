"""Some blocks of a stack checkpointed: the same gradient, and a peak that is planned."""

import pytest
import torch

from nanolib.config import NanoConfig
from nanolib.experiments.model.planner import Planner
from nanolib.experiments.model.planning import checked, plan
from nanolib.meters.memory import fake_tensors
from nanolib.models import create_model
from nanolib.run.workload import holding, holdings_by_checkpointing
from tests.experiments.own import TINY


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
