"""What only GPUs reach, on stubs of driver and device: none of it has been seen on the hardware."""

import contextlib
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from nanolib.measurement import Unsupported
from nanolib.meters import links, memory
from nanolib.meters.energy import meter, power
from nanolib.models import NanoConfig, create_model, optimize
from nanolib.models.generation import generation_of
from nanolib.run import sweep
from nanolib.run.ranks import answer, failure, results_in
from nanolib.run.timeout import DeviceLost, Outcome, is_out_of_memory
from tests.measuring import rows_of
from tests.run import sample_experiment as sample


def _refuse(indices, value, why="Not Supported"):
    def answer(index):
        if index in indices:
            raise OSError(why)
        return index if value is None else value

    return answer


# Eight GPUs: the third may not be asked, the fifth is in parts, the seventh has power alone and is older.
NVML = SimpleNamespace(
    NVMLError=OSError,
    NVML_FI_DEV_POWER_INSTANT=186,
    nvmlInit=lambda: None,
    nvmlDeviceGetCount=lambda: 8,
    nvmlDeviceGetHandleByIndex=_refuse((2,), None, "Insufficient Permissions"),
    nvmlDeviceGetUUID=lambda gpu: f"GPU-{gpu}",
    nvmlDeviceGetTotalEnergyConsumption=_refuse((4, 6, 7), 5000),
    nvmlDeviceGetFieldValues=lambda gpu, fields: [SimpleNamespace(nvmlReturn=3)],
    nvmlDeviceGetPowerUsage=_refuse((4,), 70000),
    nvmlDeviceGetCudaComputeCapability=lambda gpu: (7, 5) if gpu == 6 else (9, 0),
)


def test_a_gpu_that_refuses_loses_no_other():
    found = power.find_sources(nvml=NVML, rapl_root=Path("nowhere"))
    sources, missing = found.sources, found.missing["NVIDIA (NVML)"]
    assert [source.of for source in sources] == [f"gpu {index}" for index in (0, 1, 3, 5, 6, 7)]
    assert "gpu 2 reports neither energy nor power (Insufficient Permissions)" in missing
    assert "gpu 4" in missing and {source.name for source in sources[:4]} == {"nvml_counter"}
    powers = [(source.name, source.period_s) for source in sources[4:]]
    assert powers == [("nvml_power", 0.1), ("nvml_power", 1.0)]


def test_the_gpu_under_test_is_marked_whatever_its_number_here(monkeypatch):
    """With CUDA_VISIBLE_DEVICES=5,1 torch's first GPU is the driver's sixth; part of a GPU has no meter of its own."""
    uuids = {"cuda:0": "5", "cuda:1": "1"}
    properties = {device: SimpleNamespace(uuid=uuid) for device, uuid in uuids.items()}
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties.get)
    asked = []
    monkeypatch.setattr(
        meter, "find_sources", lambda under_test: asked.append(under_test) or power.Found([], {})
    )
    for device in (*uuids, "cpu"):
        meter.EnergyMeter(device=device)
    assert asked == ["GPU-5", "GPU-1", ""]
    for uuid, marked in {"GPU-5": ["gpu 5 (under test)"], "": [], "MIG-4": []}.items():
        names = [one.of for one in power.find_sources(nvml=NVML, under_test=uuid).sources]
        assert [name for name in names if "under test" in name] == marked


def test_after_a_lost_device_cases_have_a_process_of_their_own(tmp_path, monkeypatch):
    asked = []

    def here(_, cases, *more):
        asked.append("here")
        outcome = Outcome()
        with contextlib.suppress(DeviceLost), outcome.within(10):
            raise torch.AcceleratorError("CUDA error: device-side assert triggered")
        return {cases[0].case_id: outcome}

    def alone(_, cases, *more):
        asked.append("alone")
        return {cases[0].case_id: Outcome()}

    monkeypatch.setattr(sweep, "run_here", here)
    monkeypatch.setattr(sweep, "run_in_process", alone)
    params = sample.Params(behaviors=["ok-1", "ok-2", "ok-3"])
    rows = rows_of(sample, params, tmp_path)
    assert asked == ["here", "alone", "alone"]
    assert list(rows[rows.metric == "case_duration"].status) == ["error", "ok", "ok"]


def test_a_library_that_finds_no_memory_ran_out_of_memory():
    failed = "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"
    assert is_out_of_memory(RuntimeError(failed))
    assert not is_out_of_memory(RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED"))


def test_nccl_sends_past_every_interface(monkeypatch):
    monkeypatch.setattr(torch.distributed, "get_backend", lambda: "nccl")
    monkeypatch.setattr(links, "has_private_network", lambda: True)
    assert links.count_bytes(lambda: pytest.fail("it was called")) is None


def test_what_earlier_cases_left_in_reserve_is_given_back_before_a_peak(monkeypatch):
    order = []
    for name in ("synchronize", "empty_cache", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda *_, name=name: order.append(name))
    for name in ("memory_allocated", "max_memory_allocated", "max_memory_reserved"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: 7)
    with memory.peak_memory("cuda:0") as peak:
        assert order == ["synchronize", "empty_cache", "reset_peak_memory_stats"]
    assert (peak.live, peak.reserved) == (7, 7)


def test_a_graph_for_inference_captures_no_backward_pass(monkeypatch):
    seen, replays = [], []
    stream = SimpleNamespace(wait_stream=lambda _: None)
    for name in ("Stream", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, lambda: stream)
    for name in ("stream", "graph"):
        monkeypatch.setattr(torch.cuda, name, contextlib.nullcontext)
    graph = SimpleNamespace(replay=lambda: replays.append(1))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: graph)
    monkeypatch.setattr(optimize, "unsupported", lambda *_: "")

    def forward(ids):
        seen.append(torch.is_grad_enabled())
        return ids.float() * 2

    ids = torch.ones(1, 3, dtype=torch.int64)
    call = optimize.optimize("cuda_graph", nn.Linear(1, 1).eval(), forward, ids)
    assert seen == [False] * 4  # three to warm up, one captured
    assert torch.equal(call(torch.full((1, 3), 5)), torch.full((1, 3), 2.0)) and replays == [1]
    assert torch.equal(ids, torch.full((1, 3), 5))  # where the graph reads


def test_who_waited_until_nccl_gave_up_is_not_blamed(tmp_path):
    """Its watchdog writes a line and aborts the process that waited. The other one is ended, and says where."""
    log = "[rank0]:[E] [Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=3) ran for 60000 milliseconds"
    (tmp_path / "log").write_text(log)
    for rank, stack in enumerate(("", '  File "/somewhere/model.py", line 7 in step\n')):
        (tmp_path / f"{rank}.stack").write_text(stack)
    failed = failure([{}, {}], tmp_path, None, (0, -6))
    assert failed.details["rank"] == 1 and "did not join a collective" in str(failed)
    assert "in step (model.py:7)" in str(failed)
    (tmp_path / "log").write_text("")  # no such line: it was killed
    assert str(failure([{}, {}], tmp_path, None, (0, -6))) == "rank 0 of 2 was killed by SIGABRT"


def test_ranks_name_their_gpu_to_nccl(tmp_path, monkeypatch):
    made = {}
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: made.update(device=device))
    begin = lambda backend, **given: made.update(given, backend=backend)  # noqa: E731
    monkeypatch.setattr(torch.distributed, "init_process_group", begin)
    asked = {"device": "cuda", "threads": torch.get_num_threads(), "rank_timeout_s": 5.0}
    asked |= {"world_size": 2, "module": "builtins", "function": "dict", "request": {"a": 7}}
    store = torch.distributed.FileStore(str(tmp_path / "store"), 2)
    assert answer(asked, store, 1)
    expected = {"backend": "nccl", "device_id": torch.device("cuda", 1), "rank": 1}
    assert made.items() >= expected.items()
    assert results_in(store, 2) == [{}, {"answer": {"a": 7}}]


@pytest.mark.parametrize("changes", [{}, {"num_kv_heads": 1, "positional": "none"}])
def test_decoding_by_a_graph_is_eager_decoding(monkeypatch, changes):
    """Capturing is simulated: the call is made as often as warming up makes it, and again for each replay."""
    captures = []

    def captured(call):
        captures.append([call() for _ in range(4)])
        return SimpleNamespace(replay=call), captures[-1][-1]

    monkeypatch.setattr(optimize, "captured", captured)
    sizes = {"num_layers": 2, "d_model": 32, "num_heads": 2, "vocab_size": 97, "context_length": 9}
    model = create_model(
        NanoConfig.from_preset("decoder_tiny", **sizes | changes), "cpu", seed=0
    ).eval()
    prompt = torch.randint(97, (2, 5), generator=torch.Generator().manual_seed(1))
    eager = generation_of(model, prompt, 4)
    # any memory may contain it
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", lambda *a, **more: torch.full(*a, torch.nan, **more))
        graph = generation_of(model, prompt, 4, captured=True)
    for _ in range(3):
        eager.prefill(), graph.prefill()
        for _ in range(6):  # and beyond the last token it begins anew
            eager.decode(), graph.decode()
            assert torch.equal(eager.token, graph.token)
            assert eager.cache.length == graph.cache.length
    assert len(captures) == 1  # whatever the position
    for one, other in zip(eager.cache.tensors, graph.cache.tensors, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


def test_what_has_no_static_step_is_not_captured():
    sizes = {"num_layers": 1, "d_model": 32, "num_heads": 2}
    sparse = create_model(NanoConfig(attention_type="sparse", **sizes))
    for model in (nn.Linear(1, 1), sparse):
        with pytest.raises(Unsupported, match="use a preset with dense attention"):
            generation_of(model, torch.zeros(1, 1, dtype=torch.int64), 1, captured=True)
