import math

import pytest
import torch

from nanolib import generate_random_batch
from nanolib.measurement import BadInput
from nanolib.models.generation import generation_of
from nanolib.models.training import load_text, next_token_loss, text_batches, train
from nanolib.models.transformer import KVCache
from tests.experiments import own


def _tiny(**changes):
    return own.tiny(1, d_model=32, num_layers=2, **changes)


def _sparse(pattern):
    options = {"window": 6, "global_tokens": 4, "random_tokens": 2, "block_size": 4}
    return {"attention_type": "sparse", "attention_options": options | {"pattern": pattern}}


@pytest.mark.parametrize(
    ("kind", "kv_heads"), [({}, 2), (_sparse("window"), 4), (_sparse("dca"), 1)]
)
def test_prefill_and_decode_agree_with_the_whole_sequence(kind, kv_heads):
    model = _tiny(num_kv_heads=kv_heads, **kind)
    ids = generate_random_batch(2, 20, 300, seed=2)
    whole = model(ids)
    cache = KVCache(model.config, 2, 20)
    torch.testing.assert_close(model.prefill(ids[:, :12], cache), whole[:, 11])
    for i in range(12, 20):
        torch.testing.assert_close(model.decode(ids[:, i], cache), whole[:, i])
    assert cache.length == 20


def test_the_score_of_dca_learns_and_is_counted():
    model = _tiny(**_sparse("dca"))
    next_token_loss(model, generate_random_batch(2, 40, 300, seed=4)).backward()
    for block in model.blocks:
        assert block.attention.token_score.weight.grad.abs().max() > 0
    assert sum(p.numel() for p in model.parameters()) == model.config.parameter_count


def test_generation_continues_greedily():
    model = _tiny()
    ids = generate_random_batch(1, 5, 300, seed=4)
    generation = generation_of(model, ids, 6)
    for step in [generation.prefill, *[generation.decode] * 5]:
        step()
        ids = torch.cat([ids, model(ids)[:, -1:].argmax(dim=-1)], dim=1)
        assert torch.equal(generation.token, ids[:, -1])


def test_the_first_loss_on_text_is_that_of_a_uniform_guess_and_training_lowers_it():
    data = load_text(max_bytes=100_000)
    assert len(data) == 100_000 and bytes(data.numpy()).count(b"def ") > 100
    batches = text_batches(data, 25, 4, 33, torch.Generator().manual_seed(1), "cpu")
    losses = train(_tiny(tie_embeddings=False), batches, 1e-2)  # tied ones favor repeating a token
    assert losses[0] == pytest.approx(math.log(300), rel=0.02)
    assert losses[-5:].mean() < losses[0] - 1.5


def test_a_seed_leaves_the_global_generator_alone():
    before = torch.get_rng_state()
    _tiny()
    assert torch.equal(torch.get_rng_state(), before)


def test_a_users_corpus_is_read_and_one_that_is_too_short_refused(tmp_path):
    (tmp_path / "inner").mkdir()
    for name, written in {"b.txt": b"ef", "a.txt": b"ab", "inner/a.md": b"gh"}.items():
        (tmp_path / name).write_bytes(written)
    data = load_text(str(tmp_path))
    assert bytes(data.numpy()) == b"abefgh"
    assert bytes(load_text(str(tmp_path / "b.txt")).numpy()) == b"ef"
    with pytest.raises(BadInput, match="the text has 6 bytes, and a sequence needs 9"):
        next(text_batches(data, 1, 1, 9, torch.Generator(), "cpu"))
