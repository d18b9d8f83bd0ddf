"""What is planned against what is measured, on the cases that the quick suite runs on CPU, the longest left out."""

import resource
import subprocess
import sys

import pytest
import torch

from nanolib.experiments.attention import cases as attention
from nanolib.experiments.model import cases as model
from nanolib.experiments.model import shaped_case
from nanolib.measurement import Status
from nanolib.params import read_yaml
from nanolib.paths import checkout
from nanolib.run import sweep, workload
from nanolib.store import Store

pytestmark = pytest.mark.slow


def _quick(experiment):
    name = experiment.Params.NAME
    params = experiment.Params(**read_yaml(checkout() / "params" / "quick" / f"{name}.yml"))
    cases = [
        case
        for case in experiment.cases(params.replace(device="cpu"))
        if hasattr(case, "batch_size")
    ]
    return [
        case for case in cases if case.seq_len <= 1024
    ]  # where nothing is compiled, each block takes its time


def _measured(rows):
    return {row.scope: row.estimate for row in rows if row.metric == "peak_memory"}


def _far(planned, measured):
    """Scopes whose measured peak is more than 5 % off its plan."""
    assert planned.peaks, planned.reason
    assert set(planned.peaks) == set(measured)
    return {
        scope: (peak / 2**20, measured[scope])
        for scope, peak in planned.peaks.items()
        if peak / 2**20 != pytest.approx(measured[scope], rel=0.05)
    }


@pytest.mark.parametrize(
    "case", [c for c in _quick(attention) if isinstance(c, attention.AttentionCase)], ids=str
)
def test_attention_needs_what_was_planned(case):
    planned = case.plan()
    works = list(case.workloads(*case.inputs(0)))
    for work in works:
        work.call()
    assert not _far(
        planned,
        _measured(row for work in works for row in workload.memory_rows(work, "cpu", planned)),
    )


@pytest.mark.parametrize(
    "case",
    [c for c in _quick(model) if isinstance(c, model.ModelCase) and c.seq_len < 200],
    ids=str,
)
def test_a_model_needs_what_was_planned(case):
    if case.optimisation == "compile":
        pytest.skip("a compiled kernel allocates out of the counter's sight")
    planned = case.plan()
    ids = torch.randint(256, (case.batch_size, case.seq_len + 1))
    step = case.step(case.build(0), ids, 1e-3)
    rows = []
    for work in step.workloads():
        work.call()
        rows += workload.memory_rows(work, "cpu", planned)
    assert not _far(planned, _measured(rows))


def _params(**changes):
    overrides = {"d_model": 64, "num_heads": 4, "num_layers": 4, "vocab_size": 512}
    shape = {
        "seq_lens": [32],
        "batch_sizes": [4],
        "overrides": overrides,
        "loss_steps": 0,
        "new_tokens": 0,
    }
    return model.Params(device="cpu", budget_s=0.05, **shape | changes)


def test_a_case_that_will_not_fit_is_never_started(tmp_path, monkeypatch):
    case = next(
        c for c in model.cases(_params()) if isinstance(c, model.ModelCase) and c.mode == "training"
    )
    need = case.plan().most  # planned before, so that nothing needs a model now
    monkeypatch.setattr(workload, "free_bytes", lambda device: need - 1)
    monkeypatch.setattr(shaped_case, "create_model", lambda *_: pytest.fail("it was started"))
    params = _params(train=True)
    with Store(tmp_path / "results.sqlite") as store:
        monkeypatch.setattr(model, "cases", lambda _: [case])
        rows = sweep.measure(model, params, store=store, progress=False).measurements()
    (ending,) = rows[rows.metric == "case_time"].to_dict("records")
    assert ending["status"] == Status.OOM_PREDICTED
    assert "MiB are free" in ending["message"]


OOM = """
import resource, sys
from nanolib.experiments.attention import cases as attention
from nanolib.run import sweep
from nanolib.store import Store

params = attention.Params(
    device="cpu", budget_s=0.05, seq_lens=[4096, 64], attention_types=[{"kind": "dense", "backend": "math"}], num_heads=8,
    backward=False,
)
cases = [c for c in attention.cases(params) if isinstance(c, attention.AttentionCase)]
attention.cases = lambda _: cases
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 300 * 2**20, resource.RLIM_INFINITY))
with Store(sys.argv[1]) as store:
    rows = sweep.measure(attention, params, store=store, progress=False).measurements()
    ends = rows[rows.metric == "case_time"]
    print(list(zip(ends["factor.seq_len"], ends.status, ends.message)))
"""


@pytest.mark.skipif(
    not hasattr(resource, "RLIMIT_AS") or sys.platform != "linux",
    reason="needs Linux's address limit",
)
def test_running_out_of_memory_is_a_row_and_the_next_case_runs(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", OOM, str(tmp_path / "results.sqlite")],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "(4096, 'oom'" in done.stdout
    assert "(64, 'ok', '')" in done.stdout
