"""What only GPUs reach, on stubs of driver and device: none of it has been seen on the hardware."""

import functools
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
from torch import nn

from nanolib.measurement import Unsupported
from nanolib.meters import energy, power
from nanolib.models import NanoConfig, create_model, generation
from nanolib.models.generation import generation_of
from nanolib.run.outcome import is_out_of_memory
from nanolib.run.ranks import answer, results_in

NVML = MagicMock(
    NVMLError=OSError,
    nvmlDeviceGetCount=lambda: 8,
    nvmlDeviceGetHandleByIndex=lambda index: index,
    nvmlDeviceGetUUID=lambda gpu: f"GPU-{gpu}",
    nvmlDeviceGetTotalEnergyConsumption=lambda gpu: 5000,
)


def test_only_the_gpu_under_test_is_metered_whatever_its_number_here(monkeypatch):
    """With CUDA_VISIBLE_DEVICES=5,1 torch's first GPU is the driver's sixth; MIG has no meter."""
    uuids = {"cuda:0": "5", "cuda:1": "1", "cuda:2": "MIG-4"}
    properties = lambda device: SimpleNamespace(uuid=uuids[device])  # noqa: E731
    monkeypatch.setattr("torch.cuda.get_device_properties", properties)
    find = functools.partial(power.find_sources, nvml=NVML)
    monkeypatch.setattr(energy, "find_sources", find)
    for device, metered in {"cuda:0": "5", "cuda:1": "1", "cuda:2": "", "cpu": "01234567"}.items():
        names = [track.source.of for track in energy.EnergyMeter(device=device).tracks]
        found = [name for name in names if "gpu" in name]
        assert found == [f"gpu {number}" for number in metered]


def test_a_library_that_finds_no_memory_ran_out_of_memory():
    failed = "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"
    assert is_out_of_memory(RuntimeError(failed))
    assert not is_out_of_memory(RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED"))


def test_ranks_name_their_gpu_to_nccl(tmp_path, monkeypatch):
    chosen, begin, gpu = MagicMock(), MagicMock(), torch.device("cuda", 1)
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr("torch.cuda.set_device", chosen)
    monkeypatch.setattr("torch.distributed.init_process_group", begin)
    monkeypatch.setattr("torch.distributed.barrier", MagicMock())
    asked = {"device": "cuda", "threads": torch.get_num_threads(), "rank_timeout_s": 5.0}
    asked |= {"world_size": 2, "module": "builtins", "function": "dict", "request": {"a": 7}}
    store = torch.distributed.FileStore(str(tmp_path / "store"), 2)
    assert answer(asked, store, 1)
    chosen.assert_called_once_with(gpu)
    assert begin.call_args.args == ("nccl",)
    assert begin.call_args.kwargs.items() >= {"device_id": gpu, "rank": 1}.items()
    assert results_in(store, 2) == [{}, {"answer": {"a": 7}}]


@pytest.mark.parametrize("changes", [{}, {"num_kv_heads": 1}])
def test_decoding_by_a_graph_is_eager_decoding(monkeypatch, changes):
    """Capturing is simulated: the call is made as in warming up, and again for each replay."""
    captures = []

    def captured(call):
        captures.append([call() for _ in range(4)])
        return SimpleNamespace(replay=call)

    monkeypatch.setattr(generation, "capture_graph", captured)
    config = NanoConfig(
        num_layers=2, d_model=32, num_heads=2, vocab_size=97, context_length=9, **changes
    )
    model, prompt = create_model(config, seed=0).eval(), torch.arange(10).reshape(2, 5)
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
    config = NanoConfig(attention_type="sparse", num_layers=1, d_model=32, num_heads=2)
    for model in (nn.Linear(1, 1), create_model(config)):
        with pytest.raises(Unsupported, match="use a preset with dense attention"):
            generation_of(model, torch.zeros(1, 1, dtype=torch.int64), 1, captured=True)
