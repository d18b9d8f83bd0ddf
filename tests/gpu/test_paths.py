"""What only GPUs reach, on stubs of driver and device: none of it has been seen on the hardware."""

import contextlib
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from nanolib.experiments.fp8 import speed
from nanolib.experiments.model.steps import Inferring
from nanolib.measurement import Unsupported
from nanolib.meters import links, machine, memory
from nanolib.meters.ceilings import tf32_products
from nanolib.meters.energy import meter, power
from nanolib.meters.time import stopwatch
from nanolib.meters.time.clock import CudaClock
from nanolib.meters.time.together import Together
from nanolib.meters.time.turns import Timing
from nanolib.models import NanoConfig, create_model, fp8, optimise
from nanolib.models.attention.reference import relative_error
from nanolib.models.generation import generation_of
from nanolib.run import sweep
from nanolib.run.outcome import attempt, is_out_of_memory
from nanolib.run.ranks import launcher
from nanolib.run.ranks import rank as one_rank
from nanolib.run.ranks.ranks import RanksCase, _failure
from nanolib.run.workload import timed_alone
from nanolib.store import Store
from tests.gpu.streams import Stream
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

    def nvmlDeviceGetUUID(self, handle):
        return f"GPU-{handle}"

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


def test_the_gpu_under_test_is_marked_whatever_its_number_here(monkeypatch):
    """With CUDA_VISIBLE_DEVICES=5,1 torch's first GPU is the driver's sixth; part of a GPU has no meter of its own."""
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="5" if device == "cuda:0" else "1")
    )
    asked = []
    monkeypatch.setattr(meter, "find_sources", lambda under_test: asked.append(under_test) or power.Found([], {}))
    for device in ("cuda:0", "cuda:1", "cpu"):
        meter.EnergyMeter(device=device)
    assert asked == ["GPU-5", "GPU-1", ""]
    names = [[source.of for source in power._nvml_sources(_Nvml(), uuid)[0]] for uuid in (*asked, "MIG-4")]
    assert [[name for name in some if "under test" in name] for some in names] == [
        ["gpu 5 (under test)"],
        ["gpu 1 (under test)"],
        [],
        [],
    ]


@pytest.mark.parametrize(("launch_ms", "kernel_ms", "each"), [(0.01, 2.0, 2.0), (0.008, 0.002, 0.008)])
def test_events_tell_what_the_device_did_and_launching_where_that_takes_longer(monkeypatch, launch_ms, kernel_ms, each):
    stream = Stream(launch_ms, kernel_ms).installed(monkeypatch)
    twice = lambda: (stream.launch(), stream.launch())  # noqa: E731
    blocks = CudaClock("cuda:1").time_block([stream.launch, twice], 3, 4)
    for once, two in blocks[1:]:  # the first follows an empty queue
        assert once == pytest.approx(each, rel=0.01) and two == pytest.approx(2 * each, rel=0.01)


def test_after_a_lost_device_cases_have_a_process_of_their_own(tmp_path, monkeypatch):
    class Lost(torch.AcceleratorError):
        def __init__(self):
            Exception.__init__(self, "CUDA error: device-side assert triggered")

    asked = []

    def outcome(experiment, params, cases, run, isolated, stop):
        asked.append(isolated)

        def rows():
            if len(asked) == 1:
                raise Lost
            yield from ()

        return {cases[0].case_id: attempt(rows, 10)}

    monkeypatch.setattr(sweep, "_attempt", outcome)
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
        with tf32_products(True):
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


def test_who_waited_until_nccl_gave_up_is_not_blamed(tmp_path):
    """Its watchdog writes a line and aborts the process that waited; the one that was waited for is told to end, and says where."""
    log = "[rank0]:[E] [Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=3) ran for 60000 milliseconds"
    (tmp_path / launcher.LOG).write_text(log)
    (tmp_path / "0.ended").write_text(str(-6))
    for rank, stack in enumerate(("", '  File "/somewhere/model.py", line 7 in step\n')):
        (tmp_path / f"{rank}.stack").write_text(stack)
    failed = _failure(tmp_path, 2, None, 0)
    assert (
        failed.details["rank"] == 1 and "let the others wait" in str(failed) and "in step (model.py:7)" in str(failed)
    )
    (tmp_path / launcher.LOG).write_text("")  # no such line: it was killed
    assert str(_failure(tmp_path, 2, None, 0)) == "rank 0 of 2 was killed by SIGABRT"


def test_ranks_name_their_gpu_to_nccl(tmp_path, monkeypatch):
    made = {}
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: made.update(device=device))
    monkeypatch.setattr(
        torch.distributed, "init_process_group", lambda backend, **given: made.update(given, backend=backend)
    )
    monkeypatch.setattr(torch.distributed, "barrier", lambda: None)
    monkeypatch.setattr(one_rank, "_function", lambda _: lambda request: {"answer": request})
    monkeypatch.setattr(one_rank.os, "_exit", lambda code: made.update(code=code))
    asked = {"device": "cuda", "threads": torch.get_num_threads(), "hang_s": 5.0, "body": "any:body", "request": 7}
    one_rank.main(tmp_path, asked)
    assert (made["backend"], made["device_id"], made["code"]) == ("nccl", torch.device("cuda", 1), 0)
    assert (tmp_path / "1.json").read_text() == '{"answer": 7}'


def test_collectives_are_timed_by_calls_that_nccl_has(monkeypatch):
    """NCCL has no list form of gathering that does not copy."""
    called = []
    for name in ("all_reduce", "all_gather_into_tensor", "all_to_all_single"):
        monkeypatch.setattr(torch.distributed, name, lambda *_, name=name: called.append(name))
    monkeypatch.setattr(torch.distributed, "all_gather", lambda *_: pytest.fail("the list form"))
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    monkeypatch.setattr(
        links,
        "time_together",
        lambda calls, *_, **__: Together({name: call() or [1.0] for name, call in calls.items()}, [False]),
    )
    links.time_collectives(0.1, device="cpu", seed=0)
    assert {*called} == {"all_reduce", "all_gather_into_tensor", "all_to_all_single"}


def test_a_peak_on_a_gpu_leaves_out_what_other_forms_hold(monkeypatch):
    own = torch.zeros(100)
    told = {"memory_allocated": 5000, "max_memory_allocated": 5900, "max_memory_reserved": 6000}
    told |= dict.fromkeys(("synchronize", "empty_cache", "reset_peak_memory_stats"))
    for name, value in told.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    with memory.peak_memory("cuda:0", own, own[:10]) as peak:
        assert peak.method == "cuda_allocator"
    assert peak.own == 900 + own.nbytes


def test_ranks_on_gpus_share_no_memory():
    case = type("Case", (RanksCase,), {"world_size": 4})
    assert case("cuda:0").sharing == 1 and case("cpu").sharing == 4 and case("cpu", nodes=2).sharing == 2


def test_a_product_in_8_bits_is_timed_without_what_was_prepared(monkeypatch):
    """The scales' reciprocals are made once, before."""
    timed = {}
    monkeypatch.setattr(fp8, "native", lambda _: "")
    monkeypatch.setattr(torch, "compile", lambda call, **_: call)
    monkeypatch.setattr(torch, "_scaled_mm", lambda a, b, **_: a.float() @ b.float(), raising=False)
    params = SimpleNamespace(seed=0, trace=False, timed=lambda _, phases: timed.update(phases) or Timing(phases))
    measuring = speed.ShapeCase("cpu", 16, 32, 48, "fp8").measure(params, {})
    for answer in (None, {"product": 0}, None, {"product_with_cast": 0}):
        measuring.send(answer)
    reciprocals = []
    monkeypatch.setattr(torch.Tensor, "reciprocal", lambda x: reciprocals.append(1) or torch.reciprocal(x))
    timed["product"]()
    assert not reciprocals
    timed["product_with_cast"]()
    assert reciprocals  # its operand is cast each time


@pytest.mark.parametrize("precision", ["tf32", "fp8_tensorwise"])
def test_a_rate_has_no_share_of_another_types_ceiling(monkeypatch, precision):
    asked = []
    monkeypatch.setattr(speed, "rate_rows", lambda latency, flops, dtype, ceilings: asked.append(dtype) or iter(()))
    monkeypatch.setattr(speed, "tf32_products", lambda wanted: contextlib.nullcontext())
    monkeypatch.setattr(fp8, "convert", lambda *_, **__: None)
    tiny = {"num_layers": 1, "d_model": 32, "num_heads": 2, "vocab_size": 256}
    case = speed.SpeedCase("cpu", "x", "gpt_125M", tiny, precision, "forward", False, 8, 1, ())
    timing = {"rel_ci": 0.5, "budget_s": 0.01}
    params = SimpleNamespace(seed=0, corpus="", trace=False, timed=lambda _, phases: Timing(phases, **timing))
    list(timed_alone(case.measure(params, {"float32": 1.0, "bfloat16": 1.0})))
    assert asked == [speed.product_of(precision)]


def test_a_device_without_float64_is_compared_on_the_host(monkeypatch):
    class OnMps:
        device = SimpleNamespace(type="mps")

        def cpu(self):
            return torch.ones(3)

    assert relative_error(OnMps(), OnMps()) == 0


def test_marks_on_a_device_without_events_wait_for_its_work(monkeypatch):
    waited = []
    monkeypatch.setattr(torch.mps, "synchronize", lambda: waited.append(1))
    watch = stopwatch.stopwatch_for("mps")
    begin = watch.mark()
    watch.pause()
    watch.resume()
    assert watch.nanoseconds(begin, watch.mark()) >= 0 and len(waited) == 3


@pytest.mark.parametrize("changes", [{}, {"num_kv_heads": 1, "positional": "none"}])
def test_decoding_by_a_graph_is_eager_decoding(monkeypatch, changes):
    """Capturing is simulated: the call is made as often as warming up makes it, and again for each replay."""
    captures = []

    def captured(call):
        captures.append([call() for _ in range(4)])
        return SimpleNamespace(replay=call), captures[-1][-1]

    monkeypatch.setattr(optimise, "captured", captured)
    overrides = {"num_layers": 2, "d_model": 32, "num_heads": 2, "vocab_size": 97, "context_length": 9} | changes
    model = create_model(NanoConfig.from_preset("decoder_tiny", **overrides), "cpu", seed=0).eval()
    prompt = torch.randint(97, (2, 5), generator=torch.Generator().manual_seed(1))
    eager = generation_of(model, prompt, 4)
    monkeypatch.setattr(
        torch, "empty", lambda *args, **more: torch.full(*args, torch.nan, **more)
    )  # any memory may hold it
    graph = generation_of(model, prompt, 4, captured=True)
    monkeypatch.undo()
    monkeypatch.setattr(optimise, "captured", captured)
    for _ in range(3):
        eager.prefill(), graph.prefill()
        for _ in range(6):  # and beyond the last token it begins anew
            eager.decode(), graph.decode()
            assert torch.equal(eager.token, graph.token) and eager.cache.length == graph.cache.length
    assert len(captures) == 1  # whatever the position
    for one, other in zip(eager.cache.tensors, graph.cache.tensors, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


def test_what_has_no_static_step_is_not_captured():
    sparse = create_model(NanoConfig(num_layers=1, d_model=32, num_heads=2, attention_type="sparse"))
    for model in (nn.Linear(1, 1), sparse):
        with pytest.raises(Unsupported, match="a CUDA graph decodes presets with dense attention"):
            generation_of(model, torch.zeros(1, 1, dtype=torch.int64), 1, captured=True)
