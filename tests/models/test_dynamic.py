"""The patterns that depend on the input, against their rules applied tile by tile."""

import itertools
import math

import numpy as np
import pytest
import torch

from nanolib.models.attention import dynamic
from nanolib.models.attention.dynamic import CHOOSERS
from nanolib.models.attention.sparse import Options
from tests.models.inputs import kept_tiles, masked_by, qkv

SIZE = 16
SHAPES = [(80, 80), (75, 75), (37, 90), (1, 50)]
every_shape = pytest.mark.parametrize(
    ("shape", "causal"), list(itertools.product(SHAPES, [True, False]))
)


def _inputs(q_len, kv_len, seed=0):
    return [x.detach() for x in qkv(2, 4, 2, q_len, kv_len, head_dim=8, seed=seed)[:2]]


def _rows(q, k, causal, **options):
    """Per head and row of tiles: tiles kept, the scores of the causal ones, and the row's own."""
    elements, _ = masked_by((q, k), causal, Options(block_size=SIZE, **options))
    tiles, _ = kept_tiles(elements, SIZE)
    offset = k.shape[2] - q.shape[2]
    for b, h in itertools.product(range(2), range(4)):
        queries, keys = q[b, h].double(), k[b, h // 2].double()
        means = [keys[at : at + SIZE].mean(0) for at in range(0, len(keys), SIZE)]
        for row, block in enumerate(queries.split(SIZE)):
            kept = {*tiles[b, h, row].nonzero().flatten().tolist()}
            query = block[0] if causal else block.mean(0)
            first = row * SIZE + offset
            last = first + len(block) - 1
            allowed = [at for at in range(len(means)) if not causal or at * SIZE <= last]
            own = {at for at in range(len(means)) if first // SIZE <= at <= last // SIZE}
            yield kept, {at: float(query @ means[at]) / math.sqrt(8) for at in allowed}, own


@every_shape
@pytest.mark.parametrize("rest", [{"sparsity": 0.5}, {}])
def test_top_k_keeps_its_own_tiles_and_then_the_best(shape, causal, rest):
    for kept, scores, own in _rows(*_inputs(*shape), causal, pattern="top_k", **rest):
        count = max(1, round((1 - rest.get("sparsity", 0.9)) * len(scores)))
        best = sorted(scores, key=lambda at: (at not in own, -scores[at]))
        assert kept == set(best[: max(count, len(own))])


@every_shape
@pytest.mark.parametrize("mass", [0.3, 1.0])
def test_threshold_keeps_its_own_tiles_and_the_fewest_that_hold_the_mass(shape, causal, mass):
    q, k = _inputs(*shape, seed=1)
    for kept, scores, own in _rows(3 * q, k, causal, pattern="threshold", mass=mass):
        others = {at: score for at, score in scores.items() if not (causal and at in own)}
        best = sorted(others, key=lambda at: -others[at])
        weights = torch.tensor([others[at] for at in best], dtype=torch.float64).softmax(dim=0)
        before = dict(zip(best, (weights.cumsum(dim=0) - weights).tolist(), strict=True))
        needed, allowed = (
            {at for at in best if before[at] < mass + slack} for slack in (-1e-5, 1e-5)
        )
        assert (own & set(scores)) | needed <= kept <= own | allowed


def _stand_out(scores, most):
    """The definition: over a standard deviation above the mean, at least one, at most `most`."""
    count = int((scores > scores.mean() + scores.std(unbiased=False)).sum())
    return scores.topk(min(max(1, count), most, len(scores))).indices.tolist()


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("q_len", [90, 20])
@pytest.mark.parametrize("learned", [True, False])
def test_dca_sees_its_window_and_what_it_chose_among_the_tokens_it_may_know(q_len, causal, learned):
    q, k = _inputs(q_len, 90)
    scores = k.norm(dim=-1).mean(dim=1)  # unless a score was learned
    if learned:
        scores = torch.rand(2, 90, generator=torch.Generator().manual_seed(2))
    options = Options(
        pattern="dca", window=5, global_tokens=6, random_tokens=4, block_size=SIZE, seed=3
    )
    mask = CHOOSERS["dca"](q, k, causal, options, scores if learned else None).blocks()
    for b in range(2):
        seen = mask.elements(b, 0, torch.arange(q_len))
        for row in range(q_len):
            position = row + 90 - q_len
            place = (position - row % SIZE) // SIZE
            pool = scores[b, : max(1, place * SIZE)] if causal else scores[b]
            near = {j for j in range(90) if abs(position - j) < 5}
            drawn = np.random.RandomState([3, place]).randint(len(pool), size=4)
            near |= {*_stand_out(pool, 6), *drawn.tolist()}
            wanted = {j for j in near if not causal or j <= position}
            assert {*seen[row].nonzero().flatten().tolist()} == wanted


def test_among_equal_scores_dca_chooses_the_earlier_tokens_whatever_the_length():
    scores = torch.zeros(1, 300, dtype=torch.float64)
    scores[0, torch.arange(0, 200, 3)] = 1.0
    known = torch.tensor([[200]])
    short, long = (
        dynamic._stand_out(scores[:, :n], known, 5)[0, 0].nonzero().flatten() for n in (200, 300)
    )
    assert short.tolist() == long.tolist() == [0, 3, 6, 9, 12]
