"""Where readings come from, on machines that have them and on those that lack them."""

import math
import sys
from types import SimpleNamespace

import pytest

from nanolib.meters.energy import power
from nanolib.meters.energy.power import find_sources


@pytest.fixture
def powercap(tmp_path):
    for domain, name in (("intel-rapl:0", "package-0"), ("intel-rapl:0:0", "core"), ("intel-rapl:1", "psys")):
        folder = tmp_path / domain
        folder.mkdir()
        (folder / "name").write_text(name + "\n")
        (folder / "energy_uj").write_text("1000000\n")
        (folder / "max_energy_range_uj").write_text("262143328850\n")
    return tmp_path


class _NoDriver:
    class NVMLError(Exception):
        pass

    def nvmlInit(self):
        raise self.NVMLError("Driver Not Loaded")


def test_packages_alone_are_counted(powercap):
    found = find_sources(powercap, _NoDriver())
    assert [(source.name, source.of) for source in found.sources] == [("rapl", "package-0")]
    assert found.sources[0].wrap_j == pytest.approx(262143.32885)
    assert found.sources[0].read().joules == 1.0
    assert "Driver Not Loaded" in found.missing["NVIDIA (NVML)"]
    (powercap / "intel-rapl:0" / "energy_uj").write_text("no number")
    assert math.isnan(found.sources[0].read().joules)


@pytest.mark.parametrize(
    ("error", "said"),
    [(PermissionError(13, "Permission denied"), "chmod a+r"), (OSError(5, "I/O error"), "cannot be read (I/O error)")],
)
def test_a_counter_that_cannot_be_read_says_what_helps(powercap, monkeypatch, error, said):
    def refuse(folder):
        raise error

    monkeypatch.setattr(power, "RaplSource", refuse)
    found = find_sources(powercap, _NoDriver())
    assert not found.sources
    assert said in found.missing["RAPL (powercap)"]


def test_a_machine_without_domains_says_so(tmp_path):
    assert "no power domain" in find_sources(tmp_path, _NoDriver()).missing["RAPL (powercap)"]


@pytest.mark.parametrize("name", ["nvml_counter", "nvml_power_instant", "nvml_power"])
def test_a_gpu_counts_energy_if_it_can_and_else_tells_its_power_now(tmp_path, name):
    class Error(Exception):
        pass

    state = SimpleNamespace(broken=False)

    def energy(handle):
        if name != "nvml_counter" or state.broken:
            raise Error("Not Supported")
        return 5000 + handle

    def fields(handle, numbers):
        assert numbers == [186]
        supported = name == "nvml_power_instant" and not state.broken
        return [SimpleNamespace(nvmlReturn=0 if supported else 3, value=SimpleNamespace(uiVal=80000))]

    def power(handle):
        if state.broken:
            raise Error("GPU is lost")
        return 70000

    nvml = SimpleNamespace(
        NVMLError=Error,
        NVML_FI_DEV_POWER_INSTANT=186,
        nvmlInit=lambda: None,
        nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetTotalEnergyConsumption=energy,
        nvmlDeviceGetFieldValues=fields,
        nvmlDeviceGetPowerUsage=power,
        nvmlDeviceGetCudaComputeCapability=lambda handle: (7, 5),
    )
    found = find_sources(tmp_path, nvml)
    assert [(source.name, source.of) for source in found.sources] == [(name, "gpu 0"), (name, "gpu 1")]
    reading = found.sources[1].read()
    told = {"nvml_counter": (5.001, None), "nvml_power_instant": (None, 80), "nvml_power": (None, 70)}[name]
    assert [None if math.isnan(x) else x for x in (reading.joules, reading.watts)] == list(told)
    state.broken = True
    assert math.isnan(found.sources[1].read().joules) and math.isnan(found.sources[1].read().watts)


@pytest.mark.parametrize(
    ("counter", "power", "name", "joules", "watts"),
    [
        ({"energy_accumulator": 10**8, "counter_resolution": 15.3}, {}, "amdsmi_counter", 1530.0, None),
        ({"power": 10**8, "counter_resolution": 15.3}, {}, "amdsmi_counter", 1530.0, None),  # before amdsmi 6.2.1
        ({}, {"current_socket_power": "N/A", "average_socket_power": 250}, "amdsmi_power", None, 250.0),
        ({}, {"current_socket_power": 300, "average_socket_power": 250}, "amdsmi_power", None, 300.0),
    ],
)
def test_an_amd_gpu_likewise(tmp_path, counter, power, name, joules, watts):
    (source,) = find_sources(tmp_path, _NoDriver(), amdsmi=_amd(counter, power)).sources
    assert (source.name, source.of) == (name, "gpu 0")
    reading = source.read()
    assert math.isnan(reading.joules) if joules is None else reading.joules == pytest.approx(joules, rel=1e-9)
    assert math.isnan(reading.watts) if watts is None else reading.watts == watts


class _AmdError(Exception):
    pass


def _amd(counter, power):
    """The module of a machine with one GPU that answers with these, or refuses where there is nothing."""

    def answered(found):
        if not found:
            raise _AmdError("not supported")
        return found

    return SimpleNamespace(
        AmdSmiException=_AmdError,
        amdsmi_init=lambda: None,
        amdsmi_get_processor_handles=lambda: ["a"],
        amdsmi_get_energy_count=lambda handle: answered(counter),
        amdsmi_get_power_info=lambda handle: answered(power),
    )


_NEITHER = {"current_socket_power": "N/A", "average_socket_power": "N/A"}


@pytest.mark.parametrize("counter", [{}, {"power": 1}])
@pytest.mark.parametrize(("power", "said"), [(_NEITHER, "neither energy nor power"), ({}, "not supported")])
def test_an_amd_gpu_that_tells_neither_is_missing_with_its_reason(tmp_path, counter, power, said):
    found = find_sources(tmp_path, _NoDriver(), amdsmi=_amd(counter, power))
    assert not found.sources and said in found.missing["AMD (amdsmi)"]


@pytest.mark.parametrize("counts", [True, False])
@pytest.mark.parametrize("later", [{}, {"power": "N/A", "counter_resolution": 1.0} | _NEITHER, {"power": 2} | _NEITHER])
def test_a_read_of_an_amd_gpu_that_fails_later_is_no_number(tmp_path, counts, later):
    counter = {"power": 1, "counter_resolution": 1.0} if counts else {}
    power = {"current_socket_power": 300}
    (source,) = find_sources(tmp_path, _NoDriver(), amdsmi=_amd(counter, power)).sources
    for answers in (counter, power):
        answers.clear()
        answers.update(later)
    reading = source.read()
    assert math.isnan(reading.joules) and math.isnan(reading.watts)


@pytest.mark.parametrize("error", [OSError, RuntimeError])
def test_apples_counters_that_fail_later_are_no_number(tmp_path, error):
    def fail():
        raise error("IOReport has gone")

    monitor = SimpleNamespace(get_cumulative_energy=lambda: SimpleNamespace(cpu_total_mj=1))
    module = SimpleNamespace(AppleEnergyMonitor=lambda: monitor)
    (source,) = find_sources(tmp_path, _NoDriver(), apple=module).sources
    for later in (fail, SimpleNamespace):  # none of its counters answers any more
        monitor.get_cumulative_energy = later
        assert math.isnan(source.read().joules)
    monitor.get_cumulative_energy = fail
    assert "IOReport has gone" in find_sources(tmp_path, _NoDriver(), apple=module).missing["Apple (IOReport)"]


def test_nvidias_module_may_be_missing(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert find_sources(tmp_path).missing["NVIDIA (NVML)"] == "nvidia-ml-py is not installed"


def test_amds_module_is_imported_only_where_its_driver_is(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "amdsmi", None)
    for there, said in ((False, "no AMD GPU here"), (True, "amdsmi cannot be imported (ModuleNotFoundError: ")):
        monkeypatch.setattr(power, "_KFD", tmp_path if there else tmp_path / "kfd")
        assert said in find_sources(tmp_path, _NoDriver()).missing["AMD (amdsmi)"]


@pytest.mark.parametrize(
    ("system", "machine", "said"),
    [
        ("linux", "x86_64", "this is no Mac"),
        ("darwin", "x86_64", "this is no Mac"),
        ("aix", "ppc", "this is no Mac"),
        ("darwin", "arm64", "zeus-apple-silicon is not installed"),
    ],
)
def test_apples_module_is_looked_for_on_a_mac_alone(tmp_path, monkeypatch, system, machine, said):
    monkeypatch.setattr(power.sys, "platform", system)
    monkeypatch.setattr(power.platform, "machine", lambda: machine)
    monkeypatch.setitem(sys.modules, "zeus_apple_silicon", None)
    assert said in find_sources(tmp_path, _NoDriver()).missing["Apple (IOReport)"]


def test_apples_parts_are_summed_and_those_it_lacks_left_out(tmp_path):
    parts = SimpleNamespace(cpu_total_mj=1500, gpu_mj=500, ane_mj=None, dram_mj=250)
    module = SimpleNamespace(AppleEnergyMonitor=lambda: SimpleNamespace(get_cumulative_energy=lambda: parts))
    (source,) = find_sources(tmp_path, _NoDriver(), apple=module).sources
    assert source.name == "ioreport" and source.read().joules == 2.25
    none = SimpleNamespace(get_cumulative_energy=SimpleNamespace)
    module = SimpleNamespace(AppleEnergyMonitor=lambda: none)
    assert "none of its counters" in find_sources(tmp_path, _NoDriver(), apple=module).missing["Apple (IOReport)"]
