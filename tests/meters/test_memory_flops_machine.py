import hashlib
import json
import os
import platform
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from nanolib import NanoConfig, create_model, generate_random_batch
from nanolib.measurement import BadInput, Flag, Measurement, Status
from nanolib.meters import ceilings, machine, memory
from nanolib.meters.ceilings import measure_ceilings, rate
from nanolib.meters.flops import count_flops, model_flops
from nanolib.meters.machine import Machine, resolve_device, this_machine
from nanolib.meters.memory import LiveBytes, measure_memory, peak_memory
from nanolib.meters.time.clock import clock_for, synchronizer
from nanolib.models import attention

KIB = 1024


def test_live_bytes_follow_birth_and_death():
    with LiveBytes() as counter:
        a = torch.empty(KIB, dtype=torch.uint8)
        b = torch.empty(2 * KIB, dtype=torch.uint8)
        del a
        c = torch.empty(KIB // 2, dtype=torch.uint8)
    assert counter.peak == 3 * KIB and counter.current == 2.5 * KIB
    del b, c
    assert counter.current == 0


def test_views_and_in_place_results_count_once():
    with LiveBytes() as counter:
        x = torch.zeros(KIB, dtype=torch.uint8)
        y = x.view(2, -1)[0]
        y.add_(1)
        x.t()
    assert counter.peak == KIB


def test_the_peak_of_a_product_and_its_gradient_is_pinned():
    x = torch.randn(64, 64, requires_grad=True)
    w = torch.randn(64, 64)
    one = 64 * 64 * 4

    def step():
        ((x @ w).relu() @ w).sum().backward()
        x.grad = None

    rows = {row.metric: row for row in measure_memory(step, existing=(x, w))}
    again = {row.metric: row for row in measure_memory(step, existing=(x, w))}
    assert rows["peak_memory"].estimate == again["peak_memory"].estimate
    assert rows["peak_memory"].details["before"] == 2 * one / 2**20
    # x, w, the activation kept for the backward, two gradients in flight; the sum's scalars beside them
    assert 5 * one <= rows["peak_memory"].estimate * 2**20 <= 5 * one + 64


def test_the_resident_peak_sees_what_was_touched():
    def touch():
        torch.ones(512 * 2**20, dtype=torch.uint8)  # much beside what a process of many tests gives back meanwhile

    row = next(row for row in measure_memory(touch) if row.metric == "resident_memory")
    if row.status is Status.UNSUPPORTED:
        pytest.skip(row.message)
    assert 300 <= row.estimate <= 700


def test_a_system_without_clear_refs_says_so(monkeypatch, tmp_path):
    monkeypatch.setattr(memory, "_PROC", tmp_path / "nowhere")
    row = measure_memory(lambda: None)[1]
    assert row.status is Status.UNSUPPORTED and row.estimate is None and "does not tell" in row.message


@pytest.mark.parametrize("mlp", ["swiglu", "gelu"])
@pytest.mark.parametrize("kv_heads", [2, 4])
def test_model_flops_agree_with_torchs_count_to_the_digit(mlp, kv_heads):
    config = NanoConfig(vocab_size=100, d_model=32, num_layers=2, num_heads=4, num_kv_heads=kv_heads, mlp=mlp)
    ids = generate_random_batch(2, 16, 100)
    # torch counts causal attention in full, so the formula is given all pairs
    assert (
        count_flops(lambda: create_model(config)(ids)) == model_flops(config, 2, 16, lambda q, kv, _: q * kv)["total"]
    )


def test_attention_flops_agree_with_torchs_count_to_the_digit():
    q = torch.randn(2, 4, 32, 16)
    counted = count_flops(lambda: attention.attend("dense", q, q, q, causal=False))
    assert counted == attention.work("dense", 32, 32, causal=False).flops(2, 4, 16)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("pattern", ["window", "local_global", "random", "strided", "bigbird"])
def test_sparse_attention_computes_what_its_tiles_say(pattern, causal):
    """It must skip the work it claims to skip."""
    q = torch.randn(1, 1, 320, 16)
    options = {
        "pattern": pattern,
        "window": 96 if pattern == "strided" else 32,
        "global_tokens": 8,
        "random_tokens": 32,
        "block_size": 32,
    }
    counted = count_flops(lambda: attention.attend("sparse", q, q, q, causal=causal, options=options))
    work = attention.work("sparse", 320, 320, causal=causal, options=options)
    assert counted == 4 * 16 * work.kept_tiles * 32 * 32
    assert work.kept_tiles < 0.6 * work.total_tiles


def test_the_machine_is_told_without_names_and_its_id_is_of_the_hardware():
    here = this_machine()
    text = json.dumps(here.to_dict())
    assert platform.node() not in text and os.path.expanduser("~") not in text  # noqa: PTH111
    assert len(here.machine_id) == 12 and here.machine_id == this_machine().machine_id
    assert here.cores >= 1 and here.dtypes["float32"]


def test_devices_resolve_or_are_told():
    assert resolve_device("cpu") == "cpu"
    with pytest.raises(BadInput, match="device: 'cuda:99' is not here; use auto or one of cpu"):
        resolve_device("cuda:99")


def test_a_rate_turns_the_interval_round():
    latency = Measurement("latency", 2.0, 1.0, 4.0, 0.95, 20, (2.0, 4.0))
    row = rate("tokens_per_second", 8, latency)
    assert (row.low, row.estimate, row.high, row.samples) == (2000, 4000, 8000, (4000, 2000))


def test_ceilings_are_measured_for_each_dtype_and_the_copy():
    rows = list(measure_ceilings("cpu", ["float32"], budget_s=0.05))
    assert {(row.metric, row.scope) for row in rows} - {("ceiling_flops", "float32 by torch")} == {
        ("ceiling_flops", "float32"),
        ("ceiling_bytes", "copy"),
    }
    assert all(row.estimate > 1e6 for row in rows)


def test_what_was_there_before_is_not_born_by_a_view_or_in_place():
    x = torch.zeros(256, 256)
    with peak_memory() as peak:
        x.t().add_(1)
        x[:8, :8] @ x[:8, :8]
    assert peak.live == 8 * 8 * 4


def test_the_device_named_is_the_one_that_is_asked(monkeypatch):
    asked = []
    for name in ("synchronize", "reset_peak_memory_stats", "memory_allocated", "max_memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda device, name=name: asked.append((name, str(device))) or 0)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: asked.append(("reserved", str(device))) or 0)
    with peak_memory("cuda:1"):
        pass
    synchronizer("cuda:1")()
    assert clock_for("cuda:1").device == torch.device("cuda", 1)
    assert len(asked) == 7 and {device for _, device in asked} == {"cuda:1"}


# memory that is left


@pytest.fixture
def group(monkeypatch, tmp_path):
    def make(limit, used, cached):
        (tmp_path / "memory.max").write_text(f"{limit}\n")
        (tmp_path / "memory.current").write_text(f"{used}\n")
        (tmp_path / "memory.stat").write_text(f"anon 5\ninactive_file {cached}\nactive_file 9\n")
        monkeypatch.setattr(memory, "_CGROUP", tmp_path)

    system = SimpleNamespace(available=5000, total=9000)
    monkeypatch.setattr(memory.psutil, "virtual_memory", lambda: system)
    monkeypatch.setattr(memory, "_CGROUP", tmp_path / "none")
    return make


def test_what_is_free_is_the_lesser_of_the_system_and_the_control_group(group):
    assert memory.free_bytes() == 5000 and memory.total_bytes() == 9000
    group(8000, 6000, 1500)  # what the cache of files holds is given back
    assert memory.free_bytes("cpu") == 3500 and memory.total_bytes("cpu") == 8000
    group(80000, 6000, 0)
    assert memory.free_bytes() == 5000 and memory.total_bytes() == 9000
    group(1000, 6000, 0)
    assert memory.free_bytes() == 0
    group("max", 6000, 0)
    assert memory.free_bytes() == 5000 and memory.total_bytes() == 9000
    assert memory.free_bytes("meta") is None and memory.total_bytes("meta") is None


def test_what_is_free_on_a_gpu_includes_what_its_allocator_holds_unused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (100, 1000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 50)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 30)
    assert memory.free_bytes("cuda:0") == 120 and memory.total_bytes("cuda:0") == 1000


def test_the_resident_peak_is_what_the_kernel_says_above_the_start(monkeypatch, tmp_path):
    monkeypatch.setattr(memory, "_PROC", tmp_path)

    def status(rss, most):
        (tmp_path / "status").write_text(f"Name: x\nVmHWM:\t {most} kB\nVmRSS:\t {rss} kB\n")

    status(100, 100)
    with memory.resident_peak() as peak:
        status(100, 340)
    assert (peak.before, peak.resident) == (100 * 1024, 240 * 1024)
    assert (tmp_path / "clear_refs").read_text() == "5"
    with memory.resident_peak() as peak:
        status(50, 50)
    assert peak.resident == 0

    def touch():
        status(100, 340 + 1024)

    status(100, 340)
    row = measure_memory(touch, scope="forward")[1]
    assert row.estimate == pytest.approx((264 + 1000) / 1024) and row.details["before"] == pytest.approx(100 / 1024)
    assert (row.n, row.samples, row.scope) == (1, (row.estimate,), "forward")
    (tmp_path / "status").write_text("Name: x\n")
    assert "no VmRSS" in measure_memory(lambda: None)[1].message


def test_a_gpus_allocator_gives_both_peaks_in_mib(monkeypatch):
    for name, value in (
        ("synchronize", None),
        ("reset_peak_memory_stats", None),
        ("memory_allocated", 2**20),
        ("max_memory_allocated", 3 * 2**20),
        ("max_memory_reserved", 5 * 2**20),
    ):
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    live, reserved = measure_memory(lambda: None, device="cuda:0", scope="s", predicted_bytes=4 * 2**20)
    assert (live.metric, live.estimate, live.predicted, live.scope) == ("peak_memory", 3.0, 4.0, "s")
    assert (reserved.metric, reserved.estimate, reserved.predicted) == ("reserved_memory", 5.0, None)
    assert live.details == reserved.details == {"before": 1.0} and live.method == reserved.method == "cuda_allocator"


def test_a_plan_stands_beside_what_was_live():
    row = measure_memory(lambda: torch.zeros(KIB, KIB), predicted_bytes=2**21)[0]
    assert (row.metric, row.estimate, row.predicted, row.method) == ("peak_memory", 4.0, 2.0, "live_tensor_bytes")
    assert measure_memory(lambda: None)[0].predicted is None


# the machine


MACHINE = Machine(
    cpu="A CPU", cores=8, ram_gib=32, gpus=(), system="Linux x86_64", driver="", torch="2.13", threads=4, governor=""
)


def test_a_machines_id_is_of_its_hardware_alone():
    one = MACHINE.machine_id
    assert one == hashlib.sha256(b'["A CPU", 8, 32, "Linux x86_64", []]').hexdigest()[:12]
    for rest in ({"torch": "9"}, {"threads": 1}, {"governor": "x"}, {"driver": "5"}, {"dtypes": {"a": "b"}}):
        assert replace(MACHINE, **rest).machine_id == one
    gpu = {"name": "G", "memory_gib": 80}
    others = ({"cpu": "B"}, {"cores": 9}, {"ram_gib": 31}, {"system": "x"}, {"gpus": (gpu,)})
    assert len({replace(MACHINE, **rest).machine_id for rest in others} | {one}) == 6
    told = replace(MACHINE, gpus=(gpu,)).to_dict()
    assert told["gpus"] == [gpu] and told["cores"] == 8 and len(told["machine_id"]) == 12


def test_this_machine_is_read_from_where_the_system_tells_it(monkeypatch, tmp_path):
    (tmp_path / "cpuinfo").write_text("processor: 0\nmodel name\t: Some CPU: the 3rd\nflags\t: fpu avx512f amx_bf16\n")
    real = machine.Path
    monkeypatch.setattr(machine, "Path", lambda name: tmp_path / "cpuinfo" if name == "/proc/cpuinfo" else real(name))
    monkeypatch.setattr(machine.psutil, "virtual_memory", lambda: SimpleNamespace(total=31.6 * 2**30))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(machine, "_driver", lambda: "of no GPU")
    found = this_machine()
    assert (found.gpus, found.driver) == ((), "") and machine._cpu_flags() == {"fpu", "avx512f", "amx_bf16"}
    assert (found.cpu, found.ram_gib, found.torch) == ("Some CPU: the 3rd", 32, torch.__version__)
    assert found.threads == torch.get_num_threads() and found.cores == len(os.sched_getaffinity(0))
    assert found.system == f"{platform.system()} {platform.machine()}"
    (tmp_path / "governor").write_text("performance\n")
    assert machine._first_line(str(tmp_path / "governor")) == "performance" and machine._first_line("/no/such") == ""
    (tmp_path / "cpuinfo").unlink()
    assert machine._cpu_flags() == set() and machine._cpu_model() == (platform.processor() or platform.machine())


def test_the_cores_are_those_that_this_process_may_use(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3, 5, 8}, raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    assert this_machine().cores == 3
    monkeypatch.delattr(os, "sched_getaffinity")  # Linux alone has it
    assert this_machine().cores == 64
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert this_machine().cores == 1


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ("fpu", ("vector", "emulated", "emulated")),
        ("avx512f", ("avx512", "emulated", "emulated")),
        ("avx512f avx512_bf16 avx512_fp16", ("avx512", "avx512", "avx512")),
        ("avx512f avx512_bf16 amx_bf16 amx_fp16", ("avx512", "amx", "amx")),
    ],
)
def test_what_computes_a_type_follows_the_cpus_flags(monkeypatch, flags, told):
    monkeypatch.setattr(machine, "_cpu_flags", lambda: set(flags.split()))
    names = ("float32", "bfloat16", "float16")
    assert machine._dtypes(()) == dict(zip(names, told, strict=True)) | {"float8": "emulated"}


@pytest.mark.parametrize(
    ("capability", "told"),
    [
        ("6.1", ("emulated", "emulated", "vector", "emulated")),
        ("7.0", ("emulated", "emulated", "tensor_cores", "emulated")),
        ("8.0", ("tensor_cores", "tensor_cores", "tensor_cores", "emulated")),
        ("8.9", ("tensor_cores",) * 4),
        ("9.0", ("tensor_cores",) * 4),
        ("12.0", ("tensor_cores",) * 4),
    ],
)
def test_what_computes_a_type_follows_the_gpus_generation(capability, told):
    names = ("tf32", "bfloat16", "float16", "float8")
    found = machine._dtypes(({"compute_capability": capability},))
    assert found == {"float32": "vector"} | dict(zip(names, told, strict=True))


@pytest.mark.parametrize(("minor", "fp8"), [(8, False), (9, True)])
def test_a_gpu_is_told_by_its_properties(monkeypatch, minor, fp8):
    properties = SimpleNamespace(name="G", major=8, minor=minor, total_memory=79.7 * 2**30, uuid="abc")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    assert machine._gpu(0) == {"name": "G", "memory_gib": 80, "compute_capability": f"8.{minor}", "fp8": fp8}
    assert machine.gpu_uuid("cuda:0") == "GPU-abc"


def test_the_driver_is_what_nvml_says_or_why_it_does_not(monkeypatch):
    class Error(Exception):
        pass

    def lost():
        raise Error("Driver Not Loaded")

    nvml = SimpleNamespace(NVMLError=Error, nvmlInit=lambda: None, nvmlSystemGetDriverVersion=lambda: "580.1")
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    assert machine._driver() == "580.1"
    nvml.nvmlInit = lost
    assert machine._driver() == "unknown (Driver Not Loaded)"


def test_auto_is_the_first_accelerator_and_cuda_the_first_gpu(monkeypatch):
    assert resolve_device("auto") == "cpu"
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert resolve_device("auto") == resolve_device("mps") == "mps"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert resolve_device("auto") == resolve_device("cuda") == "cuda:0" and resolve_device("cuda:1") == "cuda:1"
    with pytest.raises(BadInput, match="device: 'xpu' is not here; use auto or one of cpu, cuda:0, cuda:1, mps"):
        resolve_device("xpu")


def test_the_space_left_on_a_disk_is_in_gib(monkeypatch, tmp_path):
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda path: SimpleNamespace(free=3 * 2**30))
    assert machine.free_disk_gib(tmp_path) == 3.0
    assert set(machine.versions()) == {"python", "torch", "platform"}


# ceilings and rates


@pytest.mark.parametrize(
    ("ms", "said"), [((4.0, 2.0), "matrix product 64³, by oneDNN"), ((2.0, 4.0), "matrix product 64³")]
)
def test_the_ceiling_is_the_faster_product(monkeypatch, ms, said):
    times = iter(ms)
    monkeypatch.setattr(ceilings, "_MATRIX", {"cpu": 64})
    monkeypatch.setattr(
        ceilings,
        "measure",
        lambda fn, *_, **__: Measurement("latency", next(times), 1.0, 8.0, 0.95, 20, (2.0,), method="m"),
    )
    found, *torchs = ceilings.measure_ceilings("cpu", ["float32"], copy=False)
    # what torch alone reaches is said beside it
    slower = [("float32 by torch", 2 * 64**3 * 250)] if ms[0] > ms[1] else []
    assert [(row.scope, row.estimate) for row in torchs] == slower
    assert (found.estimate, found.message, found.scope) == (2 * 64**3 * 500, f"{said}, in a burst of 2 s", "float32")


def test_ceilings_are_two_operations_per_product_and_two_bytes_per_byte(monkeypatch):
    asked = []

    def measured(fn, rel_ci, budget_s, *, device):
        fn()
        asked.append((rel_ci, budget_s, device))
        return Measurement("latency", 10.0, 5.0, 20.0, 0.95, 20, (10.0,), method="m")

    monkeypatch.setattr(ceilings, "measure", measured)
    monkeypatch.setattr(ceilings, "_MATRIX", {"cpu": 64})
    monkeypatch.setattr(ceilings, "_COPY_BYTES", {"cpu": 2**21})
    found = {row.scope: row for row in ceilings.measure_ceilings("cpu", ["float32", "float64", "bfloat16"], 0.03, 4.0)}
    assert found["float32"].estimate == found["float64"].estimate == 2 * 64**3 * 100
    assert found["bfloat16"].estimate == 2 * 32**3 * 100 and found["copy"].estimate == 2 * 2**21 * 100
    assert found["float32"].message == "matrix product 64³, in a burst of 4 s"
    assert found["copy"].message == "copy of 2 MiB"
    assert (found["copy"].low, found["copy"].high) == (found["copy"].estimate / 2, found["copy"].estimate * 2)
    assert asked == [(0.03, 4.0, "cpu")] * 5  # float32 by torch and by oneDNN
    assert [row.scope for row in ceilings.measure_ceilings("cpu", ["float32"], copy=False)] == ["float32"]


def test_a_rate_without_an_interval_has_none_and_keeps_what_it_came_from():
    latency = Measurement(
        "latency", 2.0, n=1, samples=(2.0,), method="perf_counter", scope="decode", flags=(Flag.SLOWDOWN,)
    )
    row = rate("tokens_per_second", 8, latency, message="how")
    assert (row.low, row.high, row.estimate, row.n, row.message) == (None, None, 4000.0, 1, "how")
    assert (row.scope, row.method, row.flags) == ("decode", "amount/perf_counter", (Flag.SLOWDOWN,))
    assert rate("tokens_per_second", 8, latency, scope="other").scope == "other"


@pytest.mark.parametrize(
    ("device", "dtype", "size", "mib"),
    [
        ("cpu", "float32", 1536, 128),
        ("cpu", "float64", 1536, 128),
        ("cpu", "bfloat16", 768, 128),
        ("cuda:1", "bfloat16", 8192, 1024),
        ("meta", "float32", 4096, 512),
    ],
)
def test_a_ceilings_work_is_as_large_as_its_device_wants(monkeypatch, device, dtype, size, mib):
    for name in ("randn", "empty"):
        real = getattr(torch, name)
        monkeypatch.setattr(torch, name, lambda *shape, device, real=real, **kw: real(*shape, device="meta", **kw))
    second = Measurement("latency", 1000.0, 1000.0, 1000.0)
    monkeypatch.setattr(ceilings, "measure", lambda call, rel_ci, budget_s, device: second)
    product, copy = ceilings.measure_ceilings(device, [dtype])
    assert (product.estimate, product.message) == (2.0 * size**3, f"matrix product {size}³, in a burst of 2 s")
    assert (copy.estimate, copy.message) == (2.0 * mib * 2**20, f"copy of {mib} MiB")


# FLOPs by formula


def test_an_encoder_decoders_flops_agree_with_torchs_count():
    config = NanoConfig(
        vocab_size=100, d_model=32, num_layers=2, num_heads=4, num_kv_heads=2, architecture="encoder_decoder"
    )
    model = create_model(config)
    for length in (16, 17):
        ids = generate_random_batch(2, length, 100)
        counted = count_flops(lambda ids=ids: model(ids))
        assert counted == model_flops(config, 2, length, lambda q, kv, _: q * kv)["total"]


@pytest.mark.parametrize("architecture", ["decoder", "encoder_decoder"])
def test_flops_after_a_prompt_agree_with_torchs_count(architecture):
    config = NanoConfig(
        vocab_size=100, d_model=32, num_layers=2, num_heads=4, num_kv_heads=2, architecture=architecture
    )
    model = create_model(config).eval()
    prompt, more = generate_random_batch(2, 12, 100), generate_random_batch(2, 1, 100, seed=1)
    with torch.no_grad():
        cache = model.new_cache(2, 12, 4)
        model.prefill(prompt, cache)
        counted = count_flops(lambda: model.decode(more[:, 0], cache))
    assert counted == model_flops(config, 2, 1, lambda q, kv, _: q * kv, position=12)["total"]


def test_the_parts_of_a_models_flops_are_those_of_the_formula():
    config = NanoConfig(vocab_size=10, d_model=8, num_layers=3, num_heads=4, num_kv_heads=2, mlp="gelu", d_ff=20)
    parts = model_flops(config, 2, 5, lambda q, kv, causal: 15.0 if causal else 25.0)
    assert parts == {
        "projections": 3 * 2 * 2 * 5 * (2 * 64 + 2 * 8 * 4),
        "attention": 3 * 4 * 2 * 4 * 2 * 15,
        "mlp": 3 * 2 * 10 * 2 * 8 * 20,
        "head": 2 * 2 * 5 * 8 * 10,
        "total": sum(value for name, value in parts.items() if name != "total"),
    }


@pytest.mark.parametrize(
    ("architecture", "position", "asked"),
    [
        ("decoder", 0, [(7, 7, True)]),
        ("decoder", 5, [(7, 12, True)]),
        ("encoder_decoder", 0, [(3, 3, False), (4, 4, True)]),
        ("encoder_decoder", 5, [(7, 8, True)]),
    ],
)
def test_attention_is_asked_what_it_keeps_of_each_part(architecture, position, asked):
    config = NanoConfig(vocab_size=10, d_model=8, num_layers=1, num_heads=2, architecture=architecture)
    calls = []
    model_flops(config, 1, 7, lambda *call: calls.append(call) or 0.0, position=position)
    assert calls == asked
