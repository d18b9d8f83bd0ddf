"""What is planned against what is measured; of models tests/run/test_rows.py says it."""

import resource
import subprocess
import sys

import pytest

from nanolib.experiments.attention import cases as attention
from nanolib.experiments.model import cases as model
from nanolib.experiments.model import look
from nanolib.measurement import Status
from nanolib.params import read_yaml
from nanolib.paths import checkout
from nanolib.run import memory_plan, rows, sweep
from nanolib.store import Store

pytestmark = pytest.mark.slow


def _quick_attention():
    params = attention.Params(**read_yaml(checkout() / "params" / "quick" / "attention.yml"))
    cases = attention.cases(params.replace(device="cpu"))
    return [c for c in cases if isinstance(c, attention.AttentionCase) and c.seq_len <= 1024]


@pytest.mark.parametrize("case", _quick_attention(), ids=str)
def test_attention_needs_what_was_planned(case):
    planned, measured = case.plan(), {}
    for work in list(case.workloads(*case.inputs(0))):
        work.call()
        peak, *_ = rows.memory_rows(work, "cpu", planned)
        measured[work.scope] = peak.estimate * 2**20
    assert planned.peaks, planned.reason
    assert planned.peaks == pytest.approx(measured, rel=0.05)


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
    monkeypatch.setattr(memory_plan, "free_bytes", lambda device: need - 1)
    monkeypatch.setattr(look, "create_model", lambda *_: pytest.fail("it was started"))
    params = _params(train=True)
    with Store(tmp_path / "results.sqlite") as store:
        monkeypatch.setattr(model, "cases", lambda _: [case])
        rows = sweep.measure(model, params, store=store, progress=False).measurements()
    (ending,) = rows[rows.metric == "case_duration"].to_dict("records")
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
    ends = rows[rows.metric == "case_duration"]
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
