import math

import pytest
import torch

from nanolib import NanoConfig, create_model
from nanolib.measurement import BadInput
from nanolib.meters.flops import count_flops, model_flops
from nanolib.models import EncoderDecoder, text


def _config(**changes):
    shape = {"d_model": 64, "num_layers": 2, "num_heads": 4, "vocab_size": 300, "context_length": 64}
    return NanoConfig(architecture="encoder_decoder", **shape | changes)


def _all(q_len, kv_len, causal):  # torch counts causal attention in full
    return q_len * kv_len


@pytest.mark.parametrize(
    "changes", [{}, {"num_kv_heads": 2, "mlp": "gelu"}, {"tie_embeddings": False, "positional": "none"}]
)
def test_weights_and_work_are_those_of_the_formulas(changes):
    config = _config(**changes)
    model = create_model(config)
    assert isinstance(model, EncoderDecoder)
    assert sum(p.numel() for p in model.parameters()) == config.parameter_count
    for length in (16, 17):
        ids = torch.randint(300, (3, length))
        assert count_flops(lambda ids=ids: model(ids)) == model_flops(config, 3, length, _all)["total"]


def test_work_of_a_token_is_that_of_the_formula():
    config = _config()
    model = create_model(config).eval()
    cache = model.new_cache(2, 10, 4)
    first = model.prefill(torch.randint(300, (2, 10)), cache).argmax(dim=-1)
    got = count_flops(lambda: model.decode(first, cache))
    assert got == model_flops(config, 2, 1, _all, position=10)["total"]


@torch.no_grad()
def test_token_by_token_equals_the_whole_sequence():
    model = create_model(_config(attention_type="dense", dtype="float64"), seed=0).eval()
    source, target = torch.randint(300, (2, 8)), torch.randint(300, (2, 8))
    target[:, 0] = source[:, -1]  # the prompt's last token starts the decoder
    whole = model(torch.cat([source, target], dim=1))
    cache = model.new_cache(2, 8, 7)
    steps = [model.prefill(source, cache), *(model.decode(target[:, i], cache) for i in range(1, 8))]
    torch.testing.assert_close(torch.stack(steps, dim=1), whole, atol=1e-12, rtol=0)
    assert len(list(model.generate(source, 5))) == 5


@torch.no_grad()
def test_the_encoder_sees_its_whole_half_and_the_decoder_no_future():
    model = create_model(_config(), seed=0).eval()
    ids = torch.randint(300, (1, 16))
    before = model(ids)
    changed = ids.clone()
    changed[0, 7] = (changed[0, 7] + 1) % 300  # the source's last token reaches every position
    assert (model(changed) - before).abs().amax(dim=-1).min() > 1e-6
    changed = ids.clone()
    changed[0, -1] = (changed[0, -1] + 1) % 300
    assert torch.equal(model(changed)[:, :-1], before[:, :-1])


def test_it_starts_at_chance_and_learns():
    model = create_model(_config(), seed=0)
    data, generator = text.load(), torch.Generator().manual_seed(0)
    drawn = torch.randint(300, (8, 33), generator=generator)  # the text is another with each version of Python
    assert float(model.loss(drawn).detach()) == pytest.approx(math.log(300), rel=0.02)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(30):
        loss = model.loss(text.batch(data, 8, 33, generator))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert float(loss.detach()) < 4


def test_too_long_a_sequence_is_refused():
    with pytest.raises(BadInput, match="context_length 64"):
        create_model(_config())(torch.zeros(1, 65, dtype=torch.int64))
