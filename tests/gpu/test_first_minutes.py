"""The first minutes on a simulated GPU: all holds there, and each assertion fails where the simulation is made wrong."""

import functools
import json
from typing import ClassVar

import pandas as pd
import pytest

from nanolib.measurement import Flag, Measurement
from nanolib.meters import ceilings
from nanolib.models import fp8
from nanolib.report import overview
from nanolib.report.overview import GPUS_SEEN
from nanolib.run.ranks import RankFailed
from tests.gpu import page
from tests.gpu.first_minutes import all_holds, first_minutes, keep
from tests.gpu.hardware import SECONDS, Hardware
from tests.gpu.parts import PARTS

pytestmark = pytest.mark.slow  # its experiments run for real

SMALL = {"seq_lens": [64], "num_heads": 2, "head_dim": 16, "budget_s": 0.02}
MODEL = {"presets": ["decoder_tiny"], "overrides": {"num_layers": 1, "d_model": 32, "num_heads": 2, "vocab_size": 512}}


class Simulated(Hardware):
    """A CPU that says it is an H100: its experiments run, its sensors and timings are told.

    Args:
        **wrong: What is told otherwise; a value, or a function of the rows of an experiment by its name.
    """

    device = "cpu"
    doctor: ClassVar = {"budget_s": 0.02}
    patterns: ClassVar = Hardware.patterns | SMALL
    grid: ClassVar = Hardware.grid | SMALL
    math: ClassVar = Hardware.math | SMALL
    peaks: ClassVar = Hardware.peaks | SMALL
    training: ClassVar = Hardware.training | MODEL | {"seq_lens": [16], "batch_sizes": [1], "budget_s": 0.02}
    model: ClassVar = Hardware.model | MODEL | {"seq_lens": [16], "batch_sizes": [1], "budget_s": 0.02, "new_tokens": 4}
    larger: ClassVar = model | {"presets": ["decoder_small"]}
    fp8: ClassVar = Hardware.fp8 | MODEL | {"seq_len": 16, "batch_size": 1, "budget_s": 0.02}
    fp8_sizes: ClassVar = [
        MODEL | Hardware.fp8 | {"presets": [preset], "overrides": MODEL["overrides"], "seq_len": 16, "batch_size": 1}
        for preset in ("decoder_small", "decoder_tiny")
    ]
    energy: ClassVar = Hardware.energy | MODEL | {"seq_lens": [16], "batch_size": 1, "window_s": 0.2, "idle_s": 0.1}
    ranks: ClassVar = {"seq_lens": [64], "prefill_seq_lens": [32], "num_heads": 4, "head_dim": 8, "budget_s": 0.02}

    def __init__(self, **wrong):
        self.told = {
            "names": ("NVIDIA H100 80GB HBM3",) * 2, "gpus": 2, "working_w": 600.0, "idle_w": [70.0, 71.0], "counter_w": 600.0,
            "product": {"float32": 20.0, "tf32": 3.0, "bfloat16": 1.6, "fp8": 0.9}, "do_bench": 1.6,
            "small": (0.008, 0.002), "sleep": 5.6, "copy": (0.008, 0.02),
            "kernels": {"flash": "flash_fwd_kernel", "efficient": "fmha_cutlassF", "cudnn": "cudnn_sdpa", "fp8": "sm90_e4m3_gemm"},
            "reserved": [2**30, 2**30], "native": "", "hangs": "rank 1 of 2 let the others wait until they gave up", "rows": {},
        } | wrong  # fmt: skip

    def names(self):
        return self.told["names"]

    def count(self):
        return self.told["gpus"]

    def busy(self, working):
        t_s = [at * SECONDS / 100 for at in range(101)]
        watts = self.told["working_w"] if working else None
        course = [watts] * 101 if working else [self.told["idle_w"][at % 2] for at in range(101)]
        return {"joules": (1000.0, 1000.0 + self.told["counter_w"] * SECONDS), "t_s": t_s, "watts": course}

    def product(self, kind):
        return self.told["product"][kind], {}

    def small(self):
        host, device = self.told["small"]
        return max(host, device), {"host_ms": host, "device_ms": device}

    def sleep(self, cycles):
        return self.told["sleep"] * (cycles / 10**7 if self.told["sleep"] > 0 else 1.0), {}

    def copy(self, mib):
        return self.told["copy"], {}

    def attend(self, backend, seq_len=2048):
        return backend

    def convert(self):
        return "fp8"

    def measure(self, call, *, cold=False):
        ms, details = call
        ms = ms[cold] if isinstance(ms, tuple) else ms
        bound = details and details["host_ms"] >= details["device_ms"]
        return Measurement("latency", ms, flags=(Flag.LAUNCH_BOUND,) if bound else (), details=details)

    def do_bench_ms(self, call):
        return self.told["do_bench"]

    def kernels(self, call):
        return [self.told["kernels"][call], "elementwise"]

    def reserved(self):
        return self.told["reserved"].pop(0) if len(self.told["reserved"]) > 1 else self.told["reserved"][0]

    def run(self, name, **asked):
        graphs = "cuda_graph" in asked.get("optimisations", ())
        if name == "model":  # to compile takes long; its error is told
            asked["optimisations"] = ["eager"]
        rows = _rows(name, json.dumps(asked, sort_keys=True)).copy()
        return self.told["rows"].get(name, lambda rows: rows)(_like_a_gpu(name, rows, graphs))

    def hang(self):
        if self.told["hangs"]:
            raise RankFailed(self.told["hangs"], 1, "")


@pytest.fixture(autouse=True)
def _store(tmp_path_factory, monkeypatch):
    monkeypatch.setattr(fp8, "native", lambda device: "")
    monkeypatch.setattr(ceilings, "_MATRIX", {"cpu": 256})  # products of 8 bits take seconds on a CPU
    _STORE.setdefault("path", tmp_path_factory.getbasetemp() / "simulated.sqlite")


_STORE = {}


@functools.cache
def _rows(name, asked):
    """An experiment for real, on this CPU."""
    gpu = object.__new__(Hardware)
    gpu.device, gpu._store = "cpu", _STORE["path"]
    return Hardware.run(gpu, name, **json.loads(asked))


def _like_a_gpu(name, rows, graphs):
    """What this CPU's own speed, and its lack of graphs and of 8 bits, leave out is told."""
    ceiling = rows.metric.isin(["ceiling_flops", "ceiling_bytes"])
    rates = {"float32": 6e13, "bfloat16": 6.5e14, "copy": 2.6e12}
    for scope, rate in rates.items():
        rows.loc[ceiling & (rows.scope == scope), "estimate"] = rate
    rows.loc[rows.metric == "ceiling_share", "estimate"] = 0.5
    if name == "attention":
        dense = rows["factor.name"].astype(str).str.startswith("dense") & (rows.metric == "latency")
        rows.loc[dense, ["low", "estimate", "high"]] *= 1000
    if name == "model" and graphs:
        eager = rows[(rows["factor.optimisation"] == "eager") & rows.metric.isin(["peak_memory", "latency"])]
        graph = eager.assign(**{"factor.optimisation": "cuda_graph", "estimate": eager.estimate / 2})
        error = {"metric": "relative_error", "scope": "against_eager", "estimate": 1e-3, "status": "ok"}
        rows = pd.concat([rows, pd.DataFrame([error]), graph], ignore_index=True)
    if name == "accidents" and "error" in {*rows.status}:
        first = rows.index[(rows.metric == "case_time") & (rows.status == "error")][0]
        rows.at[first, "message"] = "CUDA error: device-side assert triggered"
        rows.at[first, "details"] = {"device_lost": True}
    if name == "fp8":
        ends = rows.metric == "case_time"
        rows.loc[ends, ["status", "message"]] = ["ok", ""]
        step = {"metric": "latency", "scope": "training_step", "status": "ok"}
        step["factor.preset"] = rows["factor.preset"].dropna().iloc[0]
        told = [
            step | {"factor.precision": name, "estimate": ms}
            for name, ms in (("bfloat16", 2.0), ("fp8_tensorwise", 1.6))
        ]
        rows = pd.concat([rows[~((rows.metric == "latency") & (rows.scope == "training_step"))], pd.DataFrame(told)])
    return rows


def _changed(column, value, **where):
    def change(rows):
        rows = rows.copy()
        chosen = rows.metric == where["metric"]
        for name, wanted in where.items():
            chosen &= rows[name.replace("factor_", "factor.")] == wanted
        rows.loc[chosen, column] = value(rows.loc[chosen, column]) if callable(value) else value
        return rows

    return change


def _without(**where):
    return lambda rows: rows[~pd.concat([rows[name] == value for name, value in where.items()], axis=1).all(axis=1)]


ENDS, ERROR = {"metric": "case_time"}, {"metric": "relative_error"}
# What is made wrong, and which assertion it is that must fail.
WRONG = {
    "has torch's name": {"names": ("NVIDIA H100 80GB HBM3", "NVIDIA A100")},
    "energy counter grows": {"counter_w": 0.0},
    "are the driver's watts": {"counter_w": 900.0},
    "takes what do_bench says": {"do_bench": 1.7},
    "is launch-bound": {"small": (0.002, 0.008)},
    "twice the cycles": {"sleep": -5.6},
    "longer with a cold cache": {"copy": (0.02, 0.02)},
    "bfloat16 on an H100": {"rows": {"doctor": _changed("estimate", 1.1e15, metric="ceiling_flops", scope="bfloat16")}},
    "copy on an H100": {"rows": {"doctor": _changed("estimate", 2e12, metric="ceiling_bytes")}},
    "tf32 is more than 3": {"product": {"float32": 8.0, "tf32": 3.0, "bfloat16": 1.6, "fp8": 0.9}},
    "8 bits are more than 1.5": {"product": {"float32": 20.0, "tf32": 3.0, "bfloat16": 1.6, "fp8": 1.5}},
    "attention, all kinds": {"rows": {"attention": _changed("status", "error", **ENDS)}},
    "attention, dense (math)": {"rows": {"attention": _changed("status", "error", factor_name="dense (math)", **ENDS)}},
    "attention at real lengths": {"rows": {"attention": _changed("estimate", 0.02, scope="forward", **ERROR)}},
    "attention: no share": {"rows": {"attention": _changed("estimate", 1.2, metric="ceiling_share")}},
    "forward: random s=0.9": {"rows": {"attention": _changed("high", 1e9, metric="latency", scope="forward")}},
    "backward: random s=0.9": {"rows": {"attention": _changed("high", 1e9, metric="latency", scope="backward")}},
    "model decoder_small: every case": {"rows": {"model": _changed("status", "timeout", **ENDS)}},
    "model decoder_tiny: every case": {"rows": {"model": _changed("status", "timeout", **ENDS)}},
    "models against eager": {"rows": {"model": _changed("estimate", 0.5, **ERROR)}},
    "model: no share": {"rows": {"model": _changed("estimate", 1.2, metric="ceiling_share")}},
    "holds no gradients": {
        "rows": {"model": _changed("estimate", 1e6, metric="peak_memory", factor_optimisation="cuda_graph")}
    },
    "a token by a captured graph": {
        "rows": {"model": _without(scope="decode", **{"factor.optimisation": "cuda_graph"})}
    },
    "fp8 decoder_small: every case": {"rows": {"fp8": _changed("status", "error", **ENDS)}},
    "fp8 decoder_tiny: every case": {"rows": {"fp8": _changed("status", "error", **ENDS)}},
    "fp8 decoder_small: a step": {
        "rows": {"fp8": _without(scope="training_step", **{"factor.preset": "decoder_small"})}
    },
    "fp8 decoder_tiny: a step": {"rows": {"fp8": _without(scope="training_step", **{"factor.preset": "decoder_tiny"})}},
    "training in 8 bits": {
        "rows": {
            "fp8": _changed(
                "estimate", 3.0, factor_precision="fp8_tensorwise", factor_preset="decoder_small", metric="latency"
            )
        }
    },
    "fp8 recipes: every case": {"rows": {"fp8": _changed("status", "error", **ENDS)}},
    "a kernel of 8 bits": {"kernels": {"flash": "flash", "efficient": "fmha", "cudnn": "cudnn", "fp8": "bf16_gemm"}},
    "energy: every case": {"rows": {"energy": _changed("status", "error", **ENDS)}},
    "power samples within 5 %": {"counter_w": 660.0},
    "idle seconds are flat": {"idle_w": [70.0, 300.0]},
    "dense (flash) forward: the peak": {
        "rows": {"attention": _changed("estimate", lambda mib: mib + 40, metric="peak_memory")}
    },
    "training_step: the peak": {"rows": {"model": _changed("estimate", lambda mib: mib + 40, metric="peak_memory")}},
    "peaks are planned": {"rows": {"model": _without(metric="peak_memory")}},
    "memory: the case is oom": {"rows": {"accidents": _changed("message", "an error of another kind", **ENDS)}},
    "what was reserved": {"reserved": [2**30, 2**31]},
    "patterns: every case": {"rows": {"attention": _changed("status", "error", **ENDS)}},
    "every pattern against float64": {"rows": {"attention": _changed("estimate", 0.02, scope="forward", **ERROR)}},
    "(flash) launches": {"kernels": {"flash": "softmax", "efficient": "fmha", "cudnn": "cudnn", "fp8": "e4m3"}},
    "(efficient) launches": {"kernels": {"flash": "flash", "efficient": "softmax", "cudnn": "cudnn", "fp8": "e4m3"}},
    "(cudnn) launches": {"kernels": {"flash": "flash", "efficient": "fmha", "cudnn": "softmax", "fp8": "e4m3"}},
    "distributed: every case": {"rows": {"distributed": _changed("status", "error", **ENDS)}},
    "fused against float64": {"rows": {"distributed": _changed("estimate", 0.1, scope="fused", **ERROR)}},
    "a ring's training": {
        "rows": {"distributed": _changed("estimate", 1e3, metric="peak_memory", scope="ring training")}
    },
    "a rank that hangs": {"hangs": "rank 0 of 2 did not end within 120 s"},
    "assert: the case is error": {"rows": {"accidents": _changed("message", "index 8 is out of bounds", **ENDS)}},
}


def _simulated(name, **wrong):
    return list(PARTS[name].checks(Simulated(**wrong)))


@functools.cache
def _right():
    """Every assertion where nothing is wrong: text → (part, whether it holds)."""
    return {check.text: (name, check.holds) for name in PARTS for check in _simulated(name)}


def test_all_holds_where_nothing_is_wrong():
    assert {text: holds for text, (_, holds) in _right().items() if holds is not True} == {}


@pytest.mark.parametrize("text", WRONG)
def test_an_assertion_fails_where_the_simulation_is_made_wrong(text):
    named = {name for found, (name, _) in _right().items() if text in found}
    assert len(named) == 1, (text, named)
    failed = [check.text for name in named for check in _simulated(name, **WRONG[text]) if check.holds is False]
    assert any(text in found for found in failed), failed


def test_no_assertion_is_left_that_was_not_seen_to_fail():
    alike = (" against float64", ": the peak is")  # of each algorithm of the ranks, of each call that is planned
    left = [text for text in _right() if not any(part in text for part in (*WRONG, *alike))]
    assert not left


def test_what_a_machine_cannot_show_is_no_failure(monkeypatch):
    monkeypatch.setattr(fp8, "native", lambda device: "no tensor cores for 8 bits")
    for name, wrong in {"ceilings": {"names": ("NVIDIA L4",) * 2}, "fp8": {}, "ranks": {"gpus": 1}}.items():
        holds = [check.holds for check in _simulated(name, **wrong)]
        assert None in holds and False not in holds


def test_a_part_that_breaks_stops_no_other_and_each_check_is_written_as_it_comes(tmp_path, capsys):
    wrong = Simulated(small=None, do_bench=1.7, idle_w=[70.0, 300.0])
    found, written = {"gpu": wrong.names()[0], "torch": "2.13.0", "date": "2026-12-01"}, []

    def kept(found):
        written.append(json.loads(keep(found, tmp_path).read_text()))

    first_minutes(found, lambda name: PARTS[name].checks(wrong), ["clock", "identity"], kept)
    assert written[1]["parts"][0]["broke"] == "it was cut"  # as long as it has not ended
    assert not all_holds(found) and [part["name"] for part in found["parts"]] == ["clock", "identity"]
    clock, identity = found["parts"]
    assert clock["broke"].startswith("TypeError") and clock["checks"][0]["holds"] is False
    assert not identity["broke"] and identity["checks"][0]["holds"] is True
    counts = [sum(len(part["checks"]) for part in one["parts"]) for one in written]
    assert counts == [0, 1, 1, 1, 2, 3, 4, 4]  # at the begin and the end of a part too
    page_text = (tmp_path / "nvidia-h100-80gb-hbm3.html").read_text()
    assert (
        "does not hold" in page_text
        and "It broke: TypeError" in page_text
        and "clock: broke" in capsys.readouterr().out
    )
    assert {file.name for file in tmp_path.iterdir()} == {f"nvidia-h100-80gb-hbm3{end}" for end in (".json", ".html")}


def test_the_page_of_what_was_seen_is_made_from_the_results():
    assert page.DOCS.read_text() == page.markdown(page.results())
    assert {*page.PATHS} == {*PARTS}
    assert {one["gpu"] for one in page.results()} == GPUS_SEEN
    assert ("not yet seen on a GPU" in (page.ROOT / "README.md").read_text()) == (not GPUS_SEEN)
    seen = {
        "gpu": "NVIDIA L4", "torch": "2.13", "date": "2026-12-01",
        "parts": [{"name": "clock", "seconds": 1.0, "checks": [{"text": "a", "found": "b", "holds": True}], "broke": ""},
                  {"name": "fp8", "seconds": 1.0, "checks": [], "broke": "Error: no"}],
    }  # fmt: skip
    told = page.markdown([seen])
    assert "| clock | NVIDIA L4: 1 of 1 hold |" in told and "then it ended (Error: no)" in told
    assert "| ranks | not yet seen on a GPU |" in told and "No path of nanolib has been seen" not in told


@pytest.mark.parametrize(
    ("device", "seen", "told"),
    [("cpu", (), False), ("cuda:0", (), True), ("cuda:0", ("NVIDIA L4",), False), ("cuda:0", ("NVIDIA A100",), True)],
)
def test_the_report_says_of_a_gpu_that_it_was_not_yet_seen(monkeypatch, device, seen, told):
    monkeypatch.setattr(overview, "GPUS_SEEN", frozenset(seen))
    gpus = overview._gpus(pd.Series({"device": device}), pd.Series({"gpus": [{"name": "NVIDIA L4"}]}))
    assert gpus.startswith("NVIDIA L4") and ("not yet seen on this GPU" in gpus) == told
