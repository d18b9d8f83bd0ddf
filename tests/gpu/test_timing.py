"""How a GPU is timed, on a simulated stream: waits, a throttled clock, a cold cache, peak rates."""

import contextlib
import itertools
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest

from nanolib.experiments import doctor
from nanolib.measurement import Flag
from nanolib.meters import clock as clocks
from nanolib.meters import latency, sampler
from nanolib.models.attention.reference import relative_error
from nanolib.run import peaks


class Stream:
    """It begins a kernel at its launch or when the one before has ended, whichever is later."""

    def __init__(self, monkeypatch, launch_ms, kernel_ms):
        """In the place of torch's, and of the host's clock."""
        self.host_ms = self.device_ms = 0.0
        self.launch_ms, self.kernel_ms = launch_ms, kernel_ms
        monkeypatch.setattr("torch.cuda.Event", self.event)
        monkeypatch.setattr("torch.cuda.synchronize", self.synchronize)
        monkeypatch.setattr("torch.cuda._sleep", self.sleep)
        monkeypatch.setattr("torch.cuda.device", lambda _: contextlib.nullcontext())
        host = SimpleNamespace(
            perf_counter=lambda: self.host_ms / 1e3,
            perf_counter_ns=lambda: round(self.host_ms * 1e6),
        )
        for module in (clocks, sampler):
            monkeypatch.setattr(module, "time", host)

    def launch(self, kernel_ms=None):
        self.host_ms += self.launch_ms
        self.sleep(1e6 * (self.kernel_ms if kernel_ms is None else kernel_ms))

    def event(self, enable_timing):
        assert enable_timing
        made = SimpleNamespace(at=None)
        made.record = lambda: setattr(made, "at", max(self.device_ms, self.host_ms))

        def elapsed_time(end):
            assert end.query(), "the event is still to come"
            return end.at - made.at

        made.elapsed_time = elapsed_time
        made.query = lambda: made.at <= self.host_ms
        return made

    def synchronize(self, *_):
        self.host_ms = max(self.host_ms, self.device_ms)

    def sleep(self, cycles):
        self.device_ms = max(self.host_ms, self.device_ms) + cycles / 1e6  # of 1 GHz


@pytest.fixture
def measured(monkeypatch):
    """Time a call on a GPU whose clock falls, and that says why; it has no power of the moment."""
    properties = SimpleNamespace(uuid="0")
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda _: properties)

    def measure(launch_ms, kernel_ms, call=Stream.launch, reasons=0, budget_s=0.5, cold=False):
        clock_mhz = itertools.chain([1980, 1980, 1410], itertools.repeat(1980))
        nvml = MagicMock(
            NVMLError=OSError,
            nvmlDeviceGetClockInfo=lambda gpu, kind: next(clock_mhz),
            nvmlDeviceGetFieldValues=lambda gpu, fields: [SimpleNamespace(nvmlReturn=3)],
            nvmlDeviceGetPowerUsage=lambda gpu: 612_000,
            nvmlDeviceGetTemperature=lambda gpu, kind: 71,
            nvmlDeviceGetCurrentClocksThrottleReasons=lambda gpu: reasons,
        )
        clock, stream = clocks.CudaClock("cuda:0", nvml), Stream(monkeypatch, launch_ms, kernel_ms)
        monkeypatch.setattr(latency, "clock_for", lambda device: clock)
        monkeypatch.setattr(latency, "resolve_device", str)
        on_cpu = lambda clock, device: clocks.ColdClock(clock, "cpu")  # noqa: E731
        monkeypatch.setattr(latency, "ColdClock", on_cpu)
        return latency.measure(lambda: call(stream), 0.01, budget_s, device="cuda:0", cold=cold)

    return measure


def test_each_phase_has_its_own_time_on_its_own_device(monkeypatch):
    stream, chosen = Stream(monkeypatch, 0.0, 0.0), []
    device = lambda name: contextlib.nullcontext(chosen.append(str(name)))  # noqa: E731
    monkeypatch.setattr("torch.cuda.device", device)
    phases = [lambda: stream.launch(3.0), lambda: stream.launch(5.0)]
    rows = clocks.clock_for("cuda:1").time_block(phases, 2, 2)
    assert rows == [[3.0, 5.0], [3.0, 5.0]] and chosen == ["cuda:1"]


@pytest.mark.parametrize(
    ("launch_ms", "kernel_ms", "bound"),
    [(0.008, 0.002, True), (0.008, 0.5, False)],
)
def test_where_the_host_takes_longer_it_is_launch_bound_and_both_times_are_stored(
    measured, launch_ms, kernel_ms, bound
):
    row = measured(launch_ms, kernel_ms)
    both = [row.details[name] for name in ("host_ms", "device_ms")]
    assert both == pytest.approx([launch_ms, kernel_ms])
    assert (Flag.LAUNCH_BOUND in row.flags) == bound and Flag.THROTTLED not in row.flags
    slower = max(launch_ms, kernel_ms)  # what calls in a row take
    assert row.estimate == pytest.approx(slower, rel=0.01)


def test_a_call_that_waits_for_the_device_has_one_time(measured):
    row = measured(0.01, 0.1, lambda stream: (stream.launch(), stream.synchronize()))
    assert "host_ms" not in row.details and Flag.LAUNCH_BOUND not in row.flags


def test_neither_compiling_nor_a_clock_that_ramps_up_is_timed_or_takes_of_the_budget(measured):
    """The first call takes eight seconds, and kernels of the next 0.4 s twice as long as later."""
    compiling = iter([8000.0])

    def call(stream):
        stream.launch(next(compiling, 0.2 if stream.host_ms < 8400 else 0.1))

    row = measured(0.01, 0.1, call, budget_s=0.3)
    assert row.details["calls_per_block"] * row.details["inner"] == 50
    assert row.n >= 20 and max(row.samples) < 0.11


@pytest.mark.parametrize("cold", [False, True])
def test_a_throttled_clock_is_flagged_with_what_the_gpu_says(measured, monkeypatch, cold):
    monkeypatch.setattr(clocks, "last_level_bytes", lambda _: 16)
    row = measured(0.01, 1.0, reasons=0x01 | 0x04 | 0x40, cold=cold)
    assert Flag.THROTTLED in row.flags and row.method.startswith("cuda_event")
    assert ("host_ms" in row.details) != cold
    assert row.details["throttled_by"] == "power cap, heat (hardware limit)"
    state = {"clock_mhz": 1980, "power_w": 612, "temperature_c": 71}
    assert row.details.items() >= state.items()


def test_the_cache_is_overwritten_before_each_call_and_that_is_not_counted(monkeypatch):
    class Numbered(clocks.HostClock):
        def time_block(self, phases, calls, inner):
            super().time_block(phases, calls, inner)
            return [range(len(phases))] * calls

    done, clock = [], clocks.ColdClock(Numbered(), "cpu")
    monkeypatch.setattr(clock, "_overwrite", lambda: done.append("|"))
    rows = clock.time_block([lambda: done.append("a"), lambda: done.append("b")], 2, 3)
    assert "".join(done) == "|a|b" * 6 and rows == [[1, 3], [1, 3]]
    assert clock.method == "perf_counter, cold cache"


def test_the_last_level_cache_is_all_of_it(tmp_path):
    for cpu, shared in enumerate(["0-1", "0-1", "2-3", "2-3"]):
        for level, size, of in [(2, "512K", cpu), (3, "16384K", shared)]:
            folder = tmp_path / f"cpu{cpu}" / "cache" / f"index{level}"
            folder.mkdir(parents=True)
            for name, value in {"size": size, "shared_cpu_list": of}.items():
                (folder / name).write_text(f"{value}\n")
    assert clocks.last_level_bytes("cpu", tmp_path) == 2 * 16 * 2**20
    for cpu in range(4):
        (
            tmp_path / f"cpu{cpu}" / "cache" / "index3" / "size"
        ).unlink()  # some machines leave it out
    assert clocks.last_level_bytes("cpu", tmp_path) == 64 * 2**20


def test_tf32_and_8_bits_have_ceilings_of_their_own_where_the_device_has_them(monkeypatch):
    monkeypatch.setattr(doctor, "resolve_device", lambda _: "cuda:0")
    kinds = ["ceiling float32", "ceiling tf32", "ceiling fp8"]
    for capability, own in (((9, 0), kinds), ((8, 0), kinds[:2]), ((7, 5), kinds[:1])):
        monkeypatch.setattr("torch.cuda.get_device_capability", lambda *_, own=capability: own)
        cases = doctor.cases(doctor.Params(dtypes=["float32"]))
        assert [str(case) for case in cases] == [*own, "ceiling copy"]


def test_the_product_of_8_bits_is_that_of_its_operands(monkeypatch):
    monkeypatch.setattr(peaks, "_MATRIX", {"cpu": 128})
    product = peaks._product("cpu", "fp8")
    a, b = (operand.float() for operand in product.args)
    assert relative_error(product(), a @ b) < 1e-2
