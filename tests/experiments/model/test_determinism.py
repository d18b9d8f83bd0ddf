"""Logits of the same tokens, computed in several ways."""

import pytest
import torch

from nanolib.experiments.model import cases as model
from nanolib.experiments.model.steps import _compare_logits, determinism_rows
from tests.experiments import own
from tests.measuring import timed_alone


def _measured(some, others):
    return [row.estimate for row in _compare_logits("batch", some, others)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_difference_is_counted_in_units_of_the_largest_logit(dtype):
    logits = torch.tensor([[[1.5, -6.0, 0.001], [0.25, 0.5, 0.0]]], dtype=dtype)
    assert _measured(logits, logits) == [0, 1]
    others, eps = logits.clone(), torch.finfo(dtype).eps
    others[0, 0, 1] += 3 * 4 * eps  # a unit of 6 is 4 eps
    others[0, 1, 0] = 0.5 + 0.5 * eps  # one above 0.5: half of eps
    assert _measured(logits, others) == [pytest.approx(0.25 / eps * 2 + 1), 0.5]


def test_each_way_is_compared_and_a_cache_that_forgets_is_found(monkeypatch):
    built = own.case().build(0)
    ids = torch.randint(300, (1, 32), generator=torch.Generator().manual_seed(0))
    rows = {(row.metric, row.scope): row for row in determinism_rows(built.eval(), ids)}
    assert {scope for _, scope in rows} == {"run_to_run", "batch", "decode"}
    assert rows["ulp_difference", "run_to_run"].estimate == 0
    for scope in ("batch", "decode"):
        row = rows["ulp_difference", scope]
        assert row.low == row.high == row.estimate < 100 and row.confidence == 1
        assert rows["greedy_agreement", scope].estimate == 1
    monkeypatch.setattr(built.rope, "forward", lambda x, positions: x * (1 + positions.start))
    found = {row.scope: row.estimate for row in determinism_rows(built, ids) if row.unit == "ULP"}
    assert found["batch"] < 100 < found["decode"]


@pytest.mark.parametrize(("seq_len", "count"), [(8, 3), (16, 0)])
def test_it_is_measured_at_the_shortest_length(seq_len, count):
    params = model.Params(device="cpu", seq_lens=[8, 16], budget_s=0.01)
    metrics = [
        row.metric
        for row in timed_alone(own.case("inference", shape=(seq_len, 1)).measure(params, {}))
    ]
    assert metrics.count("ulp_difference") == metrics.count("greedy_agreement") == count
