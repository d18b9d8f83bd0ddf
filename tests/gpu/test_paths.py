"""What only GPUs reach, on stubs of driver and device: none of it has been seen on the hardware."""

import contextlib
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from nanolib.experiments.fp8 import speed
from nanolib.experiments.model.steps import Inferring
from nanolib.meters import links, machine, memory
from nanolib.meters.energy import power
from nanolib.models import NanoConfig, create_model, fp8, optimise
from nanolib.run import sweep
from nanolib.run.outcome import attempt, is_out_of_memory
from nanolib.run.ranks.ranks import RanksCase
from nanolib.store import Store
from tests.run import sample_experiment as sample


class _Error(Exception):
    pass


class _Nvml:
    """Eight GPUs: the third may not be asked, the fifth is in parts, the seventh has power alone and is older."""

    NVMLError = _Error
    NVML_FI_DEV_POWER_INSTANT = 186

    def nvmlInit(self):
        pass

    def nvmlDeviceGetCount(self):
        return 8

    def nvmlDeviceGetHandleByIndex(self, index):
        if index == 2:
            raise _Error("Insufficient Permissions")
        return index

    def nvmlDeviceGetTotalEnergyConsumption(self, handle):
        if handle in (4, 6, 7):
            raise _Error("Not Supported")
        return 5000

    def nvmlDeviceGetFieldValues(self, handle, fields):
        return [SimpleNamespace(nvmlReturn=3)]

    def nvmlDeviceGetPowerUsage(self, handle):
        if handle == 4:
            raise _Error("Not Supported")
        return 70000

    def nvmlDeviceGetCudaComputeCapability(self, handle):
        return (7, 5) if handle == 6 else (9, 0)


def test_a_gpu_that_refuses_loses_no_other():
    sources, missing = power._nvml_sources(_Nvml())
    assert [source.of for source in sources] == [f"gpu {index}" for index in (0, 1, 3, 5, 6, 7)]
    assert "gpu 2 tells neither energy nor power (Insufficient Permissions)" in missing and "gpu 4" in missing
    assert {source.name for source in sources[:4]} == {"nvml_counter"}
    assert [(source.name, source.period_s) for source in sources[4:]] == [("nvml_power", 0.1), ("nvml_power", 1.0)]


def test_after_a_lost_device_cases_have_a_process_of_their_own(tmp_path, monkeypatch):
    class Lost(torch.AcceleratorError):
        def __init__(self):
            Exception.__init__(self, "CUDA error: device-side assert triggered")

    asked = []

    def outcome(experiment, params, case, store, run_id, isolated, stop):
        asked.append(isolated)

        def rows():
            if len(asked) == 1:
                raise Lost
            yield from ()

        return attempt(rows, 10)

    monkeypatch.setattr(sweep, "_outcome", outcome)
    with Store(tmp_path / "results.sqlite") as store:
        params = sample.Params(behaviours=["ok-1", "ok-2", "ok-3"])
        rows = sweep.measure(sample, params, store=store, progress=False).measurements()
    assert asked == [False, True, True]
    assert list(rows[rows.metric == "case_time"].status) == ["error", "ok", "ok"]


def test_a_library_that_finds_no_memory_ran_out_of_memory():
    assert is_out_of_memory(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"))
    assert not is_out_of_memory(RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED"))


def test_ranks_hold_every_gpu_that_they_use(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    case = type("Case", (RanksCase,), {"world_size": 3})
    assert case("cuda:0").devices == ("cuda:0", "cuda:1", "cuda:2") and case("cpu").devices == ("cpu",)
    assert type("Case", (RanksCase,), {"world_size": 8})("cuda:0").devices == tuple(f"cuda:{n}" for n in range(4))


@pytest.mark.parametrize("told", ["GPU-a1", "MIG-a1", "a1"])
def test_a_part_of_a_gpu_keeps_its_own_name(monkeypatch, told):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid=told))
    assert machine.gpu_uuid("cuda:0") == ("GPU-a1" if told == "a1" else told)


def test_an_amd_gpu_has_no_fp8_that_was_measured(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "6.4")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 4))
    assert "AMD" in fp8.native("cuda")


def test_products_in_tf32_are_wanted_by_the_name_that_stays():
    products = torch.backends.cuda.matmul
    before = products.fp32_precision
    products.fp32_precision = "ieee"
    try:
        with speed._tf32(True):
            assert products.fp32_precision == "tf32"
        assert products.fp32_precision == "ieee"
    finally:
        products.fp32_precision = before


def test_nccl_sends_past_every_interface(monkeypatch):
    monkeypatch.setattr(torch.distributed, "get_backend", lambda: "nccl")
    monkeypatch.setattr(links, "only_loopback", lambda: True)
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
    graph = SimpleNamespace(replay=lambda: replays.append(1))
    for name, stub in (
        ("CUDAGraph", lambda: graph),
        ("Stream", lambda: stream),
        ("current_stream", lambda: stream),
        ("stream", lambda _: contextlib.nullcontext()),
        ("graph", lambda _: contextlib.nullcontext()),
    ):
        monkeypatch.setattr(torch.cuda, name, stub)
    monkeypatch.setattr(optimise, "unsupported", lambda *_: "")

    def forward(ids):
        seen.append(torch.is_grad_enabled())
        return ids.float() * 2

    ids = torch.ones(1, 3, dtype=torch.int64)
    call = optimise.optimise("cuda_graph", nn.Linear(1, 1).eval(), forward, ids)
    assert seen == [False] * 4  # three to warm up, one captured
    assert torch.equal(call(torch.full((1, 3), 5)), torch.full((1, 3), 2.0)) and replays == [1]
    assert torch.equal(ids, torch.full((1, 3), 5))  # where the graph reads


@pytest.mark.parametrize("recipe", sorted(fp8.RECIPES))
def test_every_recipe_runs_forward_as_it_is_timed(recipe):
    config = NanoConfig(vocab_size=64, d_model=64, num_layers=1, num_heads=2, context_length=32)
    model = create_model(config, "cpu", seed=0)
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    settings = Float8LinearConfig.from_recipe_name(recipe)
    model = convert_to_float8_training(
        model,
        config=Float8LinearConfig(**{**settings.__dict__, "emulate": True}),
        module_filter_fn=lambda layer, name: isinstance(layer, nn.Linear) and name != "head",
    )
    logits = Inferring(model, torch.zeros(1, 16, dtype=torch.int64), "eager").forward()
    assert logits.shape == (1, 16, 64) and not logits.requires_grad and logits.isfinite().all()
