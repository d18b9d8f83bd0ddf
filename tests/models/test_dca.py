import pytest
import torch

from nanolib import NanoConfig, create_model, generate_random_batch
from nanolib.models.attention.dynamic import CHOOSERS
from nanolib.models.attention.reference import masked_attention
from nanolib.models.attention.sparse import Options, choose_mask
from nanolib.models.transformer import KVCache

OPTIONS = {"pattern": "dca", "window": 6, "global_tokens": 4, "random_tokens": 2, "block_size": 4}


def _model(**changes):
    values = {
        "vocab_size": 300,
        "context_length": 64,
        "d_model": 32,
        "num_layers": 2,
        "num_heads": 4,
    }
    config = NanoConfig(**values, attention_type="sparse", attention_options=OPTIONS | changes)
    return create_model(config, seed=1)


def test_decoding_over_a_cache_chooses_what_the_whole_sequence_chose():
    model = _model()
    ids = generate_random_batch(2, 30, 300, seed=2)
    whole = model(ids)
    cache = KVCache(model.config, 2, 30)
    torch.testing.assert_close(model.prefill(ids[:, :18], cache), whole[:, 17])
    for i in range(18, 30):
        torch.testing.assert_close(model.decode(ids[:, i], cache), whole[:, i])


def test_no_choice_tells_of_the_future():
    model = _model()
    ids = generate_random_batch(1, 40, 300, seed=3)
    for changed_at in (13, 30, 39):
        changed = ids.clone()
        changed[0, changed_at:] = (changed[0, changed_at:] + 1) % 300
        a, b = model(ids), model(changed)
        torch.testing.assert_close(a[:, :changed_at], b[:, :changed_at], rtol=0, atol=0)


def test_the_score_learns_and_leaves_the_output_as_it_is():
    model = _model()
    ids = generate_random_batch(2, 40, 300, seed=4)
    model.loss(ids).backward()
    for block in model.blocks:
        assert block.attention.token_score.weight.grad.abs().max() > 0


def test_the_parameters_are_counted():
    model = _model()
    assert sum(p.numel() for p in model.parameters()) == model.config.parameter_count


def test_a_top_k_model_never_sees_the_future_either():
    model = _model(pattern="top_k", sparsity=0.5)
    ids = generate_random_batch(1, 40, 300, seed=5)
    changed = ids.clone()
    changed[0, 21:] = (changed[0, 21:] + 1) % 300
    a, b = model(ids), model(changed)
    torch.testing.assert_close(a[:, :21], b[:, :21], rtol=0, atol=0)


@pytest.mark.parametrize("pattern", sorted(CHOOSERS))
def test_later_keys_change_nothing_that_was_attended_before(pattern):
    generator = torch.Generator().manual_seed(7)
    q, k, v = torch.randn(3, 1, 2, 100, 16, generator=generator).unbind()
    options = Options(pattern=pattern, block_size=16, mass=0.6, window=32)

    def attended(length):
        parts = [x[:, :, :length] for x in (q, k, v)]
        mask = choose_mask(*parts[:2], causal=True, options=options)
        return masked_attention(*parts, torch.stack([mask.elements(head) for head in range(2)]))

    whole = attended(100)
    for length in (17, 33, 50, 97):
        torch.testing.assert_close(attended(length), whole[:, :, :length], rtol=0, atol=1e-9)
