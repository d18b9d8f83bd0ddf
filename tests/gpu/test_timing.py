"""How a GPU is timed, on a simulated stream: who waits for whom, a throttled clock, a cold cache, and peak rates."""

import contextlib
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from nanolib.experiments import doctor
from nanolib.experiments.fp8 import cases as fp8_cases
from nanolib.measurement import Flag
from nanolib.meters import ceilings
from nanolib.meters.time import clock as clocks
from nanolib.meters.time import latency, sampler
from nanolib.meters.time.clock import CudaClock, HostClock
from nanolib.models import fp8
from nanolib.models.attention.reference import relative_error
from nanolib.run import peaks_case as cases


class _Nvml:
    """One GPU whose clock falls, and that says why."""

    NVMLError, NVML_CLOCK_SM, NVML_TEMPERATURE_GPU, NVML_FI_DEV_POWER_INSTANT = OSError, 1, 0, 186

    def __init__(self, reasons=0):
        clocks = iter([1980, 1980, 1410, *[1980] * 10_000])
        answers = {
            "nvmlInit": lambda: None,
            "nvmlDeviceGetHandleByUUID": lambda uuid: uuid,
            "nvmlDeviceGetClockInfo": lambda gpu, kind: next(clocks),
            # it has no power of the moment
            "nvmlDeviceGetFieldValues": lambda gpu, fields: [SimpleNamespace(nvmlReturn=3)],
            "nvmlDeviceGetPowerUsage": lambda gpu: 612_000,
            "nvmlDeviceGetTemperature": lambda gpu, kind: 71,
            "nvmlDeviceGetCurrentClocksThrottleReasons": lambda gpu: reasons,
        }
        vars(self).update(answers)


@pytest.fixture(autouse=True)
def _named(monkeypatch):
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda _: SimpleNamespace(uuid="0", L2_cache_size=2**20),
    )


def _measured(monkeypatch, call, reasons=0, budget_s=0.5, **more):
    monkeypatch.setattr(latency, "clock_for", lambda device: CudaClock("cuda:0", _Nvml(reasons)))
    return latency.measure(call, 0.01, budget_s, device="cuda:0", **more)


@pytest.mark.parametrize(
    ("launch_ms", "kernel_ms", "bound"),
    [(0.008, 0.002, True), (0.008, 0.5, False), (2.0, 0.002, True)],
)
def test_where_the_host_takes_longer_it_is_launch_bound_and_both_times_are_stored(
    monkeypatch, launch_ms, kernel_ms, bound
):
    stream = Stream(launch_ms, kernel_ms).installed(monkeypatch)
    row = _measured(monkeypatch, stream.launch)
    both = [row.details[name] for name in ("host_ms", "device_ms")]
    assert both == pytest.approx([launch_ms, kernel_ms])
    assert (Flag.LAUNCH_BOUND in row.flags) == bound
    slower = max(launch_ms, kernel_ms)  # what calls in a row take
    assert row.estimate == pytest.approx(slower, rel=0.01)


def test_a_call_that_waits_for_the_device_has_one_time(monkeypatch):
    stream = Stream(0.01, 0.1).installed(monkeypatch)

    def waits():
        stream.launch()
        stream.synchronize()

    row = _measured(monkeypatch, waits)
    assert "host_ms" not in row.details and Flag.LAUNCH_BOUND not in row.flags


def test_a_device_is_warm_before_it_is_timed(monkeypatch):
    """Its clock ramps up over half a second: each kernel takes twice as long before."""
    stream = Stream(0.01, 1.0).installed(monkeypatch)
    row = _measured(monkeypatch, lambda: stream.launch(2.0 if stream.host_ms < 400 else 1.0))
    assert row.estimate == pytest.approx(1.0) and max(row.samples[1:]) < 1.1


def test_a_first_call_that_compiles_sets_no_pace_and_takes_nothing_of_the_budget(monkeypatch):
    stream = Stream(0.01, 0.1).installed(monkeypatch)
    times = iter([8000.0])
    row = _measured(monkeypatch, lambda: stream.launch(next(times, 0.1)), budget_s=0.3)
    assert row.details["calls_per_block"] * row.details["inner"] == 50
    assert row.n >= 20 and max(row.samples) < 0.2


@pytest.mark.parametrize(
    ("reasons", "words"),
    [(0x40, "heat, in hardware"), (0x04 | 0x80, "power cap, power brake"), (0x01, None)],
)
def test_a_throttled_clock_is_flagged_with_what_the_gpu_says(monkeypatch, reasons, words):
    stream = Stream(0.01, 1.0).installed(monkeypatch)
    row = _measured(monkeypatch, stream.launch, reasons)
    assert (Flag.THROTTLED in row.flags) == (words is not None)
    assert row.details.get("throttled_by") == words
    state = {"clock_mhz": 1980, "clock_least_mhz": 1410, "power_w": 612, "temperature_c": 71}
    assert row.details.items() >= state.items()


def test_a_cold_call_finds_nothing_in_the_cache_and_overwriting_it_is_not_counted(monkeypatch):
    stream = Stream(0.001, 0.0).installed(monkeypatch)
    warm = []  # what lies in the cache

    def call():
        stream.launch(0.2 if warm else 1.0)
        warm.append(1)

    def overwrite(self):
        warm.clear()
        stream.launch(0.05)

    monkeypatch.setattr(clocks.ColdClock, "_overwrite", overwrite)
    monkeypatch.setattr(clocks, "last_level_bytes", lambda _: 8)
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, device, **rest: empty(*size, **rest))
    hot = _measured(monkeypatch, call)
    found = _measured(monkeypatch, call, cold=True)
    assert hot.estimate == pytest.approx(0.2) and found.estimate == pytest.approx(1.0)
    assert hot.method == "cuda_event" and found.method == "cuda_event, cold cache"


def test_on_a_cpu_too_the_cache_is_overwritten_before_each_call(monkeypatch):
    done = []
    clock = clocks.ColdClock(HostClock(), "cpu")
    monkeypatch.setattr(clock, "_overwrite", lambda: done.append("|"))
    rows = clock.time_block([lambda: done.append("a"), lambda: done.append("b")], 2, 3)
    assert "".join(done) == "|a|b" * 6 and np.shape(rows) == (2, 2)


def test_the_last_level_cache_is_all_of_it(tmp_path):
    for cpu, shared in enumerate(["0-1", "0-1", "2-3", "2-3"]):
        for index, (level, size, of) in enumerate(
            [("1", "32K", str(cpu)), ("2", "512K", str(cpu)), ("3", "16384K", shared)]
        ):
            folder = tmp_path / f"cpu{cpu}" / "cache" / f"index{index}"
            folder.mkdir(parents=True)
            for name, text in {"level": level, "size": size, "shared_cpu_list": of}.items():
                (folder / name).write_text(text + "\n")
    assert clocks.last_level_bytes("cpu", tmp_path) == 2 * 16 * 2**20
    unknown = [clocks.last_level_bytes(*one) for one in (("cpu", tmp_path / "none"), ("mps",))]
    assert unknown == [64 * 2**20] * 2
    assert clocks.last_level_bytes("cuda:0") == 2**20


class Stream:
    """It begins a kernel when it is launched or when the one before has ended, whichever is later."""

    def __init__(self, launch_ms, kernel_ms):
        self.host_ms = self.device_ms = 0.0
        self.launch_ms, self.kernel_ms = launch_ms, kernel_ms
        self.held = []  # how far the queue reached, when each first event came, since the device was last held

    def launch(self, kernel_ms=None):
        self.host_ms += self.launch_ms
        kernel_ms = self.kernel_ms if kernel_ms is None else kernel_ms
        self.device_ms = max(self.host_ms, self.device_ms) + kernel_ms

    def event(self, **_):
        made = SimpleNamespace(at=None)
        made.record = lambda *_: setattr(made, "at", max(self.device_ms, self.host_ms))
        made.elapsed_time = lambda other: other.at - made.at
        made.query = lambda: made.at <= self.host_ms
        return made

    def synchronize(self, *_):
        self.host_ms = max(self.host_ms, self.device_ms)

    def sleep(self, cycles):
        self.held.append(cycles)
        self.device_ms = max(self.host_ms, self.device_ms) + cycles / 1e6  # of 1 GHz

    def installed(self, monkeypatch):
        """In the place of torch's, and of the host's clock."""
        for name, own in {
            "Event": self.event,
            "synchronize": self.synchronize,
            "_sleep": self.sleep,
        }.items():
            monkeypatch.setattr(torch.cuda, name, own)
        monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
        own = SimpleNamespace(
            perf_counter=self._seconds, perf_counter_ns=lambda: round(self.host_ms * 1e6)
        )
        for module in (clocks, sampler):
            monkeypatch.setattr(module, "time", own)
        return self

    def _seconds(self):
        return self.host_ms / 1e3


@pytest.fixture
def hopper(monkeypatch):
    for module in (doctor, fp8_cases):
        monkeypatch.setattr(module, "resolve_device", lambda _: "cuda:0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))


def test_tf32_and_8_bits_have_ceilings_of_their_own_where_the_device_has_them(hopper, monkeypatch):
    found = [str(case) for case in doctor.cases(doctor.Params(dtypes=["float32"], sustained_s=30))]
    kinds = ["float32", "tf32", "fp8"]
    assert found == [
        *(f"ceiling {kind}" for kind in (*kinds, "copy")),
        *(f"ceiling {kind} sustained" for kind in kinds),
    ]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (7, 5))
    assert [str(case) for case in doctor.cases(doctor.Params(dtypes=["float32"]))] == [
        "ceiling float32",
        "ceiling copy",
    ]
    assert "8.0" in cases.no_product("tf32", "cuda") and "8.9" in cases.no_product("fp8", "cuda")
    assert "cpu has no tf32" in cases.CeilingCase("cpu", "tf32", 1.0).unsupported()


def test_the_product_of_8_bits_is_that_of_its_operands():
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(64, 64, generator=generator).to(torch.float8_e4m3fn) for _ in range(2))
    columns = b.t().contiguous().t()
    assert relative_error(ceilings._product(a, columns, "fp8")(), a.float() @ b.float()) < 1e-2


def test_products_are_in_tf32_while_they_are_timed_and_as_before_afterwards(monkeypatch):
    products, seen = torch.backends.cuda.matmul, []
    monkeypatch.setattr(ceilings, "_MATRIX", {"cpu": 32})
    real = ceilings._product
    monkeypatch.setattr(
        ceilings, "_product", lambda *of: seen.append(products.fp32_precision) or real(*of)
    )
    before = products.fp32_precision
    rows = [ceilings.measure_ceiling("cpu", name, budget_s=0.02) for name in ("tf32", "float32")]
    ceilings.measure_ceiling("cpu", "tf32", 0.02, sustained=True)
    assert seen == ["tf32", "ieee", "tf32"] and products.fp32_precision == before
    assert rows[0].scope == "tf32" and ceilings.operand_bytes("cpu", "fp8") == 16**2 * (3 + 4)


def test_what_is_sustained_is_the_second_half(monkeypatch):
    """A device that slows down after two of four seconds."""

    class Clock:
        method, at = "simulated", 0

        def time_block(self, phases, calls, inner):
            Clock.at += 1
            return [[1.0 if Clock.at <= 12 else 2.0] for _ in range(calls)]

        def resolution_ms(self):
            return 1e-6

    monkeypatch.setattr(ceilings, "_MATRIX", {"cpu": 100})
    monkeypatch.setattr(latency, "clock_for", lambda _: Clock())
    now = iter(x / 6 for x in range(1000))
    monkeypatch.setattr(
        ceilings, "time", type("time", (), {"perf_counter": staticmethod(lambda: next(now))})
    )
    row = ceilings.measure_ceiling("cpu", "float32", 4.0, sustained=True)
    assert row.estimate == pytest.approx(2 * 100**3 / 2e-3) and row.scope == "float32 sustained"
    assert row.message == "matrix product 100³, the second half of 4 s" and fp8.native("cpu")
