"""The first minutes on a GPU whose sensors are told: all holds on one told right, and each assertion fails on one that is not."""

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


class Told(Hardware):
    """An H100 whose sensors and timings are told; `wrong` is what is told otherwise."""

    doctor = {"budget_s": 0.02}  # noqa: RUF012

    def __init__(self, **wrong):
        self.told = {
            "names": ("NVIDIA H100 80GB HBM3",) * 2, "counter_w": 600.0, "do_bench": 1.6, "small": (0.008, 0.002),
            "product": {"float32": 20.0, "tf32": 3.0, "bfloat16": 1.6, "fp8": 0.9}, "sleep": 5.6, "copy": (0.008, 0.02),
            "bfloat16": 6.5e14, "bytes": 2.6e12,
        } | wrong  # fmt: skip

    def names(self):
        return self.told["names"]

    def busy(self, working):
        t_s = [at * SECONDS / 100 for at in range(101)]
        return {
            "joules": (1000.0, 1000.0 + self.told["counter_w"] * SECONDS),
            "t_s": t_s,
            "watts": [600.0] * 101,
        }

    def product(self, kind):
        return self.told["product"][kind]

    def small(self):
        return self.told["small"]

    def sleep(self, cycles):
        return (
            self.told["sleep"] * cycles / 10**7 if self.told["sleep"] > 0 else -self.told["sleep"]
        )

    def copy(self, mib):
        return {"ms": self.told["copy"]}

    def measure(self, call, *, cold=False):
        if isinstance(call, dict):
            return Measurement("latency", call["ms"][cold])
        host, device = call if isinstance(call, tuple) else (0.0, call)
        flags = (Flag.LAUNCH_BOUND,) if host >= device else ()
        return Measurement(
            "latency",
            max(host, device),
            flags=flags,
            details={"host_ms": host, "device_ms": device},
        )

    def do_bench_ms(self, call):
        return self.told["do_bench"]

    def run(self, name, **asked):
        rows = [
            ("ceiling_flops", "bfloat16", self.told["bfloat16"]),
            ("ceiling_bytes", "copy", self.told["bytes"]),
        ]
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
    "8 bits are more than 1.5": {
        "product": {"float32": 20.0, "tf32": 3.0, "bfloat16": 1.6, "fp8": 1.5}
    },
}


@pytest.mark.parametrize("text", WRONG)
def test_an_assertion_holds_where_nothing_is_wrong_and_fails_where_it_is(monkeypatch, text):
    monkeypatch.setattr(fp8, "native", lambda device: "")
    for wrong, holds in (({}, True), (WRONG[text], False)):
        checks = [
            check
            for name in ("identity", "clock", "ceilings")
            for check in PARTS[name].checks(Told(**wrong))
        ]
        assert [check.holds for check in checks if text in check.text] == [holds]


def test_what_a_machine_cannot_show_is_no_failure(monkeypatch):
    monkeypatch.setattr(fp8, "native", lambda device: "no tensor cores for 8 bits")
    for name in ("ceilings", "fp8"):
        holds = [check.holds for check in PARTS[name].checks(Told(names=("NVIDIA L4",) * 2))]
        assert None in holds and False not in holds


def test_a_part_that_breaks_stops_no_other_and_each_check_is_written_as_it_comes(tmp_path, capsys):
    wrong = Told(small=None, do_bench=1.7)
    found, written = {"gpu": wrong.names()[0], "torch": "2.13.0", "date": "2026-12-01"}, []

    def kept(found):
        written.append(json.loads(keep(found, tmp_path).read_text()))

    first_minutes(found, lambda name: PARTS[name].checks(wrong), ["clock", "identity"], kept)
    assert written[1]["parts"][0]["broke"] == "it was cut"  # as long as it has not ended
    clock, identity = found["parts"]
    assert (
        clock["broke"].startswith("TypeError")
        and clock["checks"][0]["holds"] is False
        and not all_holds(found)
    )
    assert not identity["broke"] and identity["checks"][0]["holds"] is True
    counts = [sum(len(part["checks"]) for part in one["parts"]) for one in written]
    assert counts == [0, 1, 1, 1, 2, 3, 4, 4]  # at the begin and the end of a part too
    text = (tmp_path / "nvidia-h100-80gb-hbm3.html").read_text()
    assert (
        "does not hold" in text
        and "It broke: TypeError" in text
        and "clock: broke" in capsys.readouterr().out
    )


def test_the_page_of_what_was_seen_is_made_from_the_results():
    assert page.DOCS.read_text() == page.markdown(page.results())
    assert {*page.PATHS} == {*PARTS}
    assert {one["gpu"] for one in page.results()} == GPUS_SEEN
    readme = (page.ROOT / "README.md").read_text()
    assert all(gpu in readme for gpu in GPUS_SEEN)


@pytest.mark.parametrize(
    ("device", "seen", "told"),
    [("cpu", (), False), ("cuda:0", ("NVIDIA L4",), False), ("cuda:0", (), True)],
)
def test_the_report_says_of_a_gpu_that_it_was_not_yet_seen(monkeypatch, device, seen, told):
    monkeypatch.setattr(overview, "GPUS_SEEN", frozenset(seen))
    gpus = overview._gpus(
        pd.Series({"device": device}), pd.Series({"gpus": [{"name": "NVIDIA L4"}]})
    )
    assert gpus.startswith("NVIDIA L4") and ("not yet seen on this GPU" in gpus) == told
