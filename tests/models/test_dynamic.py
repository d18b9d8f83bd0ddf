"""The patterns that depend on the input, against their rules applied tile by tile."""

import math

import pytest
import torch

from nanolib.models.attention.dynamic import CHOOSERS
from nanolib.models.attention.reference import masked_attention
from nanolib.models.attention.sparse import Options, choose_mask
from tests.models.inputs import qkv

SIZE = 16
SHAPES = [(80, 80), (75, 75), (37, 90), (1, 50), (16, 16)]


def _inputs(q_len, kv_len, seed=0):
    return [x.detach() for x in qkv(2, 4, 2, q_len, kv_len, head_dim=8, seed=seed)[:2]]


def _rows(q, k, causal):
    """Head → per row of tiles: scores by key tile, the tiles that causality allows, and the row's own."""
    offset = k.shape[2] - q.shape[2]
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            queries, keys = q[b, h].double(), k[b, h // (q.shape[1] // k.shape[1])].double()
            means = [keys[at : at + SIZE].mean(0) for at in range(0, len(keys), SIZE)]
            rows = []
            for start in range(0, len(queries), SIZE):
                query = queries[start] if causal else queries[start : start + SIZE].mean(0)
                first, last = start + offset, min(start + SIZE - 1 + offset, len(keys) - 1)
                allowed = [at for at in range(len(means)) if not causal or at * SIZE <= last]
                own = {at for at in range(len(means)) if first // SIZE <= at <= last // SIZE}
                rows.append(({at: float(query @ means[at]) / math.sqrt(8) for at in allowed}, own))
            yield rows


def _kept_tiles(mask):
    """Head → per row of tiles, the tiles that are kept."""
    for plan in mask.plans:
        yield [
            {at for start, stop in block.runs for at in range(start // SIZE, -(-stop // SIZE))}
            for block in plan
        ]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rest", [{"sparsity": 0.5}, {"window": 40}, {"window": 3}])
def test_top_k_keeps_its_own_tiles_and_then_the_best(shape, causal, rest):
    q, k = _inputs(*shape)
    mask = choose_mask(
        q, k, causal=causal, options=Options(pattern="top_k", block_size=SIZE, **rest)
    )
    assert len(mask.plans) == 8
    for found, rows in zip(_kept_tiles(mask), _rows(q, k, causal), strict=True):
        for kept, (scores, own) in zip(found, rows, strict=True):
            if "sparsity" in rest:
                count = max(1, round((1 - rest["sparsity"]) * len(scores)))
            else:
                count = min(len(scores), max(1, round(rest["window"] / SIZE)))
            mine = sorted(scores, key=lambda at: (at not in own, -scores[at]))
            if count >= len(own):
                assert kept == set(mine[:count])
            else:  # of several own tiles any will do
                assert len(kept) == count and kept <= own


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("mass", [0.3, 1.0])
def test_threshold_keeps_its_own_tiles_and_the_fewest_that_hold_the_mass(shape, causal, mass):
    q, k = _inputs(*shape, seed=1)
    q = 3 * q
    mask = choose_mask(
        q, k, causal=causal, options=Options(pattern="threshold", mass=mass, block_size=SIZE)
    )
    for found, rows in zip(_kept_tiles(mask), _rows(q, k, causal), strict=True):
        for kept, (scores, own) in zip(found, rows, strict=True):
            others = {at: score for at, score in scores.items() if not (causal and at in own)}
            best = sorted(others, key=lambda at: -others[at])
            weights = torch.tensor([others[at] for at in best], dtype=torch.float64).softmax(dim=0)
            before = dict(zip(best, (weights.cumsum(dim=0) - weights).tolist(), strict=True))
            needed, allowed = (
                {at for at in best if before[at] < mass + slack} for slack in (-1e-5, 1e-5)
            )
            assert (own & set(scores)) | needed <= kept <= own | allowed


def global_tokens(scores, most):
    """The definition for one sequence: more than one standard deviation above the mean, at least one, at most `most`."""
    count = int((scores > scores.mean() + scores.std(unbiased=False)).sum())
    return scores.topk(min(max(1, count), most, len(scores))).indices.sort().values


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("q_len", "kv_len"), [(90, 90), (20, 90)])
@pytest.mark.parametrize("learned", [True, False])
def test_dca_sees_its_window_and_what_it_chose_among_the_tokens_it_may_know(
    q_len, kv_len, causal, learned
):
    q, k = _inputs(q_len, kv_len)
    scores = k.norm(dim=-1).mean(dim=1)  # unless a score was learned
    if learned:
        scores = torch.rand(2, kv_len, generator=torch.Generator().manual_seed(2))
    options = Options(
        pattern="dca", window=5, global_tokens=6, random_tokens=4, block_size=SIZE, seed=3
    )
    mask = CHOOSERS["dca"](q, k, causal, options, scores if learned else None).blocks()
    offset = kv_len - q_len
    for b in range(2):
        seen = mask.elements(4 * b)
        for start in range(0, q_len, SIZE):
            place = (start + offset) // SIZE
            pool = scores[b, : place * SIZE] if causal else scores[b]
            chosen = set()
            if len(pool):
                drawn = torch.randint(
                    len(pool), (4,), generator=torch.Generator().manual_seed(3 * 1_000_003 + place)
                )
                chosen = {*global_tokens(pool, 6).tolist(), *drawn.tolist()}
            for row in range(start, min(start + SIZE, q_len)):
                position = row + offset
                near = {j for j in range(kv_len) if abs(position - j) < 5}
                wanted = {j for j in near | chosen if not causal or j <= position}
                assert set(torch.nonzero(seen[row]).flatten().tolist()) == wanted


def test_the_work_of_chosen_keys_is_that_of_tiles_packed_with_them():
    q, k = _inputs(64, 64)
    scores = torch.zeros(2, 64)
    scores[:, [1, 20]] = 1.0
    options = Options(pattern="dca", window=1, global_tokens=2, random_tokens=0, block_size=SIZE)
    mask = CHOOSERS["dca"](q, k, True, options, scores).blocks()
    plan = mask.plans[0]
    assert [block.keys for block in plan] == [16, 17, 18, 18]  # itself, and one or two chosen ones
    assert mask.work.kept_tiles == 7 and [block.kept for block in plan] == [16, 32, 48, 48]


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
