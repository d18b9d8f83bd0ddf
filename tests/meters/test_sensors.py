"""Where readings come from, on machines that have them and on those that lack them."""

import math
import sys
from types import SimpleNamespace

import pytest

from nanolib.meters import power
from nanolib.meters.power import find_sources


class _Refused(Exception):
    pass


def _refuse(*_):
    raise _Refused("Driver Not Loaded")


NO_DRIVER = SimpleNamespace(NVMLError=_Refused, nvmlInit=_refuse)


def _zone(root, folder, name, uj=0, range_uj=1000):
    (root / folder).mkdir(exist_ok=True)
    for file, value in (("name", name), ("energy_uj", uj), ("max_energy_range_uj", range_uj)):
        (root / folder / file).write_text(f"{value}\n")


def test_a_packages_memory_is_counted_beside_it_and_its_parts_and_psys_are_not(tmp_path):
    for folder, name, joules in (
        (":0", "package-0", 10),
        (":0:0", "core", 1),
        (":0:1", "uncore", 2),
        (":0:2", "dram", 300),
        (":1", "package-1", 4000),
        (":2", "psys", 9),
        ("-mmio:0", "package-0", 10),
    ):
        _zone(tmp_path, f"intel-rapl{folder}", name, joules * 10**6, 10**12)
    found = find_sources(tmp_path, NO_DRIVER)
    assert [(source.name, source.of, source.read().joules) for source in found.sources] == [
        ("rapl (package + dram)", "package-0", 310.0),
        ("rapl (package)", "package-1", 4000.0),
    ]
    assert {source.period_s for source in found.sources} == {0.001}
    assert "Driver Not Loaded" in found.missing["NVIDIA (NVML)"]
    _zone(tmp_path, "intel-rapl:1", "package-1", "no number")
    assert math.isnan(found.sources[1].read().joules)


@pytest.mark.parametrize(
    ("readable", "said"),
    [
        (False, "only root can read {path}/energy_uj; run sudo chmod a+r"),
        (True, "package-0 reports neither energy nor power (invalid literal"),
    ],
)
def test_a_counter_that_cannot_be_read_says_why(tmp_path, monkeypatch, readable, said):
    _zone(tmp_path, "intel-rapl:0", "package-0", "no number")
    monkeypatch.setattr(power.os, "access", lambda file, mode: readable)
    found = find_sources(tmp_path, NO_DRIVER)
    reason = found.missing["RAPL (powercap)"]
    assert not found.sources and reason.startswith(said.format(path=tmp_path / "intel-rapl:0"))


@pytest.mark.parametrize(
    ("works", "name", "joules", "watts"),
    [
        ({"counter", "present"}, "nvml_counter", 5, math.nan),
        ({"present"}, "nvml_power", math.nan, 80),
        (set(), "nvml_power", math.nan, 70),
    ],
)
def test_a_gpu_counts_energy_if_it_can_and_else_tells_its_power_now(
    tmp_path, works, name, joules, watts
):
    """And if it has no power of the moment, that of the last second."""

    def fields(gpu, numbers):
        assert numbers == [186]
        value = SimpleNamespace(uiVal=80_000 if "present" in works else 0)
        return [SimpleNamespace(nvmlReturn=0, value=value)]

    nvml = SimpleNamespace(
        NVMLError=_Refused,
        NVML_FI_DEV_POWER_INSTANT=186,
        nvmlInit=lambda: None,
        nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex=lambda index: _refuse() if index else "a",
        nvmlDeviceGetTotalEnergyConsumption=lambda gpu: 5000 if "counter" in works else _refuse(),
        nvmlDeviceGetFieldValues=fields,
        nvmlDeviceGetPowerUsage=lambda gpu: 70_000,
    )
    found = find_sources(tmp_path, nvml)
    assert found.missing["NVIDIA (NVML)"] == "Driver Not Loaded"  # the second GPU's
    (source,) = found.sources
    assert (source.name, source.of, source.period_s) == (name, "gpu 0", 0.1)
    reading = source.read()
    assert [reading.joules, reading.watts] == pytest.approx([joules, watts], nan_ok=True)


@pytest.mark.parametrize(
    ("counter", "power", "name", "joules", "watts"),
    [
        (
            {"energy_accumulator": 10**8, "counter_resolution": 15.3},
            {},
            "amdsmi_counter",
            1530.0,
            math.nan,
        ),
        # 0 is no reading: the next way, and the next field, is asked
        (
            {"power": 0, "counter_resolution": 15.3},
            {"current_socket_power": 0, "average_socket_power": 250},
            "amdsmi_power",
            math.nan,
            250.0,
        ),
    ],
)
def test_an_amd_gpu_likewise(tmp_path, counter, power, name, joules, watts):
    amdsmi = SimpleNamespace(
        AmdSmiException=_Refused,
        amdsmi_init=lambda: None,
        amdsmi_get_processor_handles=lambda: ["a"],
        amdsmi_get_energy_count=lambda handle: counter or _refuse(),
        amdsmi_get_power_info=lambda handle: power or _refuse(),
    )
    (source,) = find_sources(tmp_path, NO_DRIVER, amdsmi=amdsmi).sources
    assert (source.name, source.of) == (name, "gpu 0")
    reading = source.read()
    assert [reading.joules, reading.watts] == pytest.approx([joules, watts], nan_ok=True)


def test_amds_module_may_be_missing(tmp_path, monkeypatch):
    monkeypatch.setattr(power, "_KFD", tmp_path)
    monkeypatch.setitem(sys.modules, "amdsmi", None)
    told = find_sources(tmp_path, NO_DRIVER).missing["AMD (amdsmi)"]
    assert told.startswith("amdsmi cannot be imported (ModuleNotFoundError")


def test_apples_parts_are_summed_and_those_it_lacks_left_out(tmp_path):
    parts = SimpleNamespace(cpu_total_mj=1500, gpu_mj=500, ane_mj=None, dram_mj=250)
    monitor = SimpleNamespace(get_cumulative_energy=lambda: parts)
    module = SimpleNamespace(AppleEnergyMonitor=lambda: monitor)
    (source,) = find_sources(tmp_path, NO_DRIVER, apple=module).sources
    assert source.name == "ioreport" and source.read().joules == 2.25
