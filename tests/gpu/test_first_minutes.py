"""The first minutes on a GPU with simulated sensors: all holds with the right values, and each assertion fails with a wrong one."""

import json

import pandas as pd
import pytest

from nanolib.measurement import Flag, Measurement
from nanolib.models import fp8
from nanolib.report import overview
from nanolib.report.overview import GPUS_SEEN
from tests.gpu import page
from tests.gpu.first_minutes import all_holds, first_minutes, keep
from tests.gpu.hardware import SECONDS, Hardware
from tests.gpu.parts import PARTS


class Simulated(Hardware):
    """An H100 with simulated sensors and timings; `wrong` replaces some of them."""

    doctor = {"budget_s": 0.02}  # noqa: RUF012

    def __init__(self, **wrong):
        self.readings = {
            "names": ("NVIDIA H100 80GB HBM3",) * 2, "counter_w": 600.0, "do_bench": 1.6, "small": (0.008, 0.002),
            "product": {"float32": 20.0, "tf32": 3.0, "bfloat16": 1.6, "fp8": 0.9}, "sleep": 5.6, "copy": (0.008, 0.02),
            "bfloat16": 6.5e14, "bytes": 2.6e12,
        } | wrong  # fmt: skip

    def names(self):
        return self.readings["names"]

    def busy(self, working):
        t_s = [at * SECONDS / 100 for at in range(101)]
        joules = (1000.0, 1000.0 + self.readings["counter_w"] * SECONDS)
        return {"joules": joules, "t_s": t_s, "watts": [600.0] * 101}

    def product(self, kind):
        return self.readings["product"][kind]

    def small(self):
        return self.readings["small"]

    def sleep(self, cycles):
        ms = self.readings["sleep"]
        return ms * cycles / 10**7 if ms > 0 else -ms

    def copy(self, mib):
        return {"ms": self.readings["copy"]}

    def measure(self, call, *, cold=False):
        if isinstance(call, dict):
            return Measurement("latency", call["ms"][cold])
        host, device = call if isinstance(call, tuple) else (0.0, call)
        flags = (Flag.LAUNCH_BOUND,) if host >= device else ()
        details = {"host_ms": host, "device_ms": device}
        return Measurement("latency", max(host, device), flags=flags, details=details)

    def do_bench_ms(self, call):
        return self.readings["do_bench"]

    def run(self, name, **asked):
        rows = [("ceiling_flops", "bfloat16", self.readings["bfloat16"])]
        rows += [("ceiling_bytes", "copy", self.readings["bytes"])]
        return pd.DataFrame(rows, columns=["metric", "scope", "estimate"])


# What is made wrong, and which assertion it is that must fail.
WRONG = {
    "has torch's name": {"names": ("NVIDIA H100 80GB HBM3", "NVIDIA A100")},
    "energy counter grows": {"counter_w": 0.0},
    "are the driver's watts": {"counter_w": 900.0},
    "takes what do_bench says": {"do_bench": 1.7},
    "is launch-bound": {"small": (0.002, 0.008)},
    "twice the cycles": {"sleep": -5.6},
    "longer with a cold cache": {"copy": (0.02, 0.02)},
    "bfloat16 on an H100": {"bfloat16": 1.1e15},
    "copy on an H100": {"bytes": 2e12},
    "tf32 is more than 3": {"product": {"float32": 8.0, "tf32": 3.0, "bfloat16": 1.6, "fp8": 0.9}},
    "8 bits are more": {"product": {"float32": 20.0, "tf32": 3.0, "bfloat16": 1.6, "fp8": 1.5}},
}


@pytest.mark.parametrize("text", WRONG)
def test_an_assertion_holds_where_nothing_is_wrong_and_fails_where_it_is(monkeypatch, text):
    monkeypatch.setattr(fp8, "native", lambda device: "")
    for wrong, holds in (({}, True), (WRONG[text], False)):
        checks = [
            check
            for name in ("identity", "clock", "ceilings")
            for check in PARTS[name].checks(Simulated(**wrong))
        ]
        assert [check.holds for check in checks if text in check.text] == [holds]


def test_what_a_machine_cannot_show_is_no_failure(monkeypatch):
    monkeypatch.setattr(fp8, "native", lambda device: "no tensor cores for 8 bits")
    for name in ("ceilings", "fp8"):
        holds = [check.holds for check in PARTS[name].checks(Simulated(names=("NVIDIA L4",) * 2))]
        assert None in holds and False not in holds


def test_a_part_that_breaks_stops_no_other_and_each_check_is_written_as_it_comes(tmp_path, capsys):
    wrong = Simulated(small=None, do_bench=1.7)
    found, written = {"gpu": wrong.names()[0], "torch": "2.13.0", "date": "2026-12-01"}, []

    def kept(found):
        written.append(json.loads(keep(found, tmp_path).read_text()))

    first_minutes(found, lambda name: PARTS[name].checks(wrong), ["clock", "identity"], kept)
    assert written[1]["parts"][0]["broke"] == "it was cut"  # as long as it has not ended
    clock, identity = found["parts"]
    assert clock["broke"].startswith("TypeError") and clock["checks"][0]["holds"] is False
    assert not all_holds(found)
    assert not identity["broke"] and identity["checks"][0]["holds"] is True
    counts = [sum(len(part["checks"]) for part in one["parts"]) for one in written]
    assert counts == [0, 1, 1, 1, 2, 3, 4, 4]  # at the begin and the end of a part too
    assert json.loads((tmp_path / "nvidia-h100-80gb-hbm3.json").read_text()) == found
    assert "clock: broke: TypeError" in capsys.readouterr().out


def test_the_page_of_what_was_seen_is_made_from_the_results():
    assert page.DOCS.read_text() == page.markdown(page.results())
    assert {*page.PATHS} == {*PARTS}
    assert {one["gpu"] for one in page.results()} == GPUS_SEEN
    readme = (page.ROOT / "README.md").read_text()
    assert all(gpu in readme for gpu in GPUS_SEEN)


@pytest.mark.parametrize(
    ("device", "seen", "said"),
    [("cpu", (), False), ("cuda:0", ("NVIDIA L4",), False), ("cuda:0", (), True)],
)
def test_the_report_says_if_a_gpu_was_not_yet_tested(monkeypatch, device, seen, said):
    monkeypatch.setattr(overview, "GPUS_SEEN", frozenset(seen))
    gpus = overview._gpus({"device": device}, pd.Series({"gpus": [{"name": "NVIDIA L4"}]}))
    assert gpus.startswith("NVIDIA L4") and ("not yet tested on this GPU" in gpus) == said
