import signal
import time

import psutil
import pytest

from nanolib.run.suite.warm_kernel import WarmKernel

pytestmark = pytest.mark.notebook


def _below(pid):
    """The processes that were started ahead, once there is a kernel among them."""
    for _ in range(600):
        found = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
        if any("ipykernel_launcher" in " ".join(one.cmdline()) for one in found):
            return found
        time.sleep(0.1)
    raise AssertionError("no kernel came up in a minute")


def test_it_ends_with_its_block_and_writes_nothing(tmp_path):
    with WarmKernel(tmp_path / "outputs") as kernel:
        processes = _below(kernel._process.pid)
    _, alive = psutil.wait_procs(processes, timeout=10)
    assert not alive and not list(tmp_path.iterdir())


def test_what_it_says_is_in_the_log_and_it_is_used_once(tmp_path):
    with (tmp_path / "log").open("a", encoding="utf-8") as log, WarmKernel(tmp_path) as kernel:
        assert kernel.is_waiting
        process = kernel.papermill([str(tmp_path / "missing.ipynb"), str(tmp_path / "out.ipynb")], log)
        assert process.wait(60) != 0
        assert not kernel.is_waiting
    assert "missing.ipynb" in (tmp_path / "log").read_text(encoding="utf-8")
    assert not (tmp_path / "out.ipynb").exists()


def test_one_that_died_in_the_meantime_is_not_used(tmp_path):
    with (tmp_path / "log").open("a", encoding="utf-8") as log, WarmKernel(tmp_path) as kernel:
        kernel._process.kill()
        kernel._process.wait()
        assert not kernel.is_waiting
        assert kernel.papermill(["anything"], log).returncode == -signal.SIGKILL


@pytest.mark.thorough  # a run that measures all goes this way
def test_the_next_kernel_starts_when_every_case_of_the_last_has_ended_and_the_report_beside_the_summary(
    tmp_path, monkeypatch
):
    from nanolib.experiments import ALL
    from nanolib.run.suite import runner
    from nanolib.run.suite.jobs import plan
    from nanolib.store import Store

    small = {"seq_lens": [16], "num_heads": 2, "attention_types": ["dense"], "quality_patterns": [], "budget_s": 0.02}
    scheduling = {"label": "", "resume": False}
    jobs = [*plan(ALL, ("attention",), small, scheduling), *plan(ALL, ("summary",), {}, scheduling)]
    started, measured, kernels = [], [], []

    class Recorded(WarmKernel):
        def __init__(self, output, *more):
            with Store(output / "results.sqlite") as store:
                rows = store.measurements()
            started.append(int((rows["metric"] == "case_time").sum()))
            super().__init__(output, *more)
            kernels.append(self)

    monkeypatch.setattr(runner, "WarmKernel", Recorded)
    ended, _ = runner.run_jobs(jobs, tmp_path, measured=lambda runs: measured.append((list(runs), len(started))))
    assert [end.status for end in ended] == ["done", "done"]
    # the first job's own, and the summary's, made ready when nothing was left to measure
    assert started == [
        0,
        ended[0].cases,
    ]
    assert measured == [([ended[0].run_id], 2)]
    assert len(kernels) == 2 and not any(kernel.is_waiting for kernel in kernels)
    assert not any(psutil.pid_exists(kernel._process.pid) for kernel in kernels)
