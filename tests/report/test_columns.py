"""Every figure of a table stands in its own column: all are different, of shapes whose sizes are all different too."""

import itertools

import pandas as pd
import pytest

from nanolib.experiments.attention.view import tables as attention_tables
from nanolib.experiments.energy.view import energy_table, layers
from nanolib.experiments.model.view import tables as model_tables
from nanolib.experiments.warmup import view as warmup_view
from nanolib.measurement import Flag, Measurement, Status, exact
from nanolib.report import tables
from tests.report.rows import SIZES, ended, interval, warmup_process


def _attention_case(name, ends, *more, tiles=0.0, ending=None, **shape):
    found = [ending or ended(), interval("latency", *ends, scope="forward", predicted=ends[1] / 4)]
    found.append(exact("block_sparsity", tiles, method="mask"))
    return SIZES | {"causal": True, "options": {}, "name": name} | shape, [*found, *more]


def test_every_figure_of_attention_stands_in_its_own_column(measured):
    more = [
        exact("sparsity", 0.8, method="mask"),
        exact("sparsity", 0.1, method="kept"),
        exact("flops", 1e9, scope="forward"),
        exact("flops", 3e9, scope="backward"),
        interval("latency", 1, 2, 4, scope="mask"),
        interval("latency", 10, 20, 40, scope="compile"),
        interval("latency", 21, 22, 24, scope="backward", predicted=5.0, flags=(Flag.SLOWDOWN,)),
        interval("ceiling_share", 0.3, 0.4, 0.6, scope="forward"),
        interval("ceiling_share", 0.6, 0.7, 0.9, scope="backward"),
        exact("peak_memory", 11.0, scope="forward"),
        exact("peak_memory", 33.0, scope="forward_backward"),
        exact("relative_error", 1e-7, scope="forward"),
        exact("relative_error", 0.25, scope="against_dense"),
        exact("cosine", 0.875, scope="against_dense"),
    ]
    dense = _attention_case("dense", (16, 18, 24), tiles=0.5)
    line = attention_tables.attention_table(
        measured("attention", [dense, _attention_case("a", (5, 6, 8), *more, tiles=0.75)])
    ).iloc[1]
    numbers = {
        "sparsity": 0.8, "block_sparsity": 0.75, "flops": 1e9, "mask": 2, "compile": 20, "paid": 28,
        "forward": 6, "forward_low": 5, "forward_high": 8, "forward_predicted": 1.5, "forward_share": 0.4,
        "backward": 22, "backward_low": 21, "backward_high": 24, "backward_predicted": 5, "backward_share": 0.7,
        "peak_memory": 11, "peak_memory_backward": 33, "relative_error": 1e-7, "error_to_dense": 0.25, "cosine": 0.875,
        "speed_up": 3, "speed_up_low": 2, "speed_up_high": 4.8, "bound": 2,
    }  # fmt: skip
    assert {name: line[name] for name in numbers} == pytest.approx(numbers)
    assert (line["name"], line["speed_up_baseline"], line["batch_size"], line["status"]) == ("a", "dense", 3, "ok")
    assert line["flags"] == [Flag.SLOWDOWN]


def test_the_baseline_is_of_the_same_run_and_shape(measured):
    shapes = ({}, {"seq_len": 128}, {"batch_size": 5}, {"dtype": "bfloat16"}, {"causal": False}, {"device": "cuda:0"})
    times = itertools.count(10)
    cases = [[_attention_case(name, (at - 1, at, at + 1), **shape) for shape in shapes for name, at in
              (("dense (math)", next(times)), ("dense (flash)", next(times)), ("a", 10))] for _ in range(2)]  # fmt: skip
    table = attention_tables.attention_table(measured("attention", *cases))
    sparse = table[table["name"] == "a"]
    assert list(sparse["speed_up"]) == pytest.approx([at / 10 for at in range(10, 33, 2)])
    assert set(sparse["speed_up_baseline"]) == {"dense (math)"}  # the faster of the two


def test_every_figure_of_a_model_stands_in_its_own_column(measured):
    factors = SIZES | {"name": "tiny", "attention_type": "dense"}
    tails = {"p50": 4.5, "p95": 8.0, "p99": 9.0}
    inference = [
        ended(),
        exact("parameters", 700.0),
        exact("footprint", 5.0),
        exact("flops", 1e6, scope="inference", method="formula"),
        exact("flops", 2e6, scope="inference", method="flop_counter"),
        interval("latency", 11, 12, 15, scope="inference", predicted=4.0),
        interval("latency", 100, 200, 300, scope="compile"),
        Measurement("tokens_per_second", 16_000.0, scope="inference"),
        interval("ceiling_share", 0.3, 0.4, 0.6, scope="inference"),
        exact("peak_memory", 8.0, scope="inference"),
        exact("relative_error", 1e-3, scope="against_eager", method="logits"),
    ]
    training = [
        ended(Status.ERROR, "it broke"),
        *(interval("latency", at - 1, at, at + 2, scope=scope) for scope, at in (("forward", 10), ("backward", 20))),
        interval("latency", 5, 6, 9, scope="optimizer_step"),
        interval("latency", 35, 36, 39, scope="training_step", predicted=7.0),
        interval("latency", 1000, 2000, 3000, scope="compile"),
        Measurement("tokens_per_second", 5300.0, scope="training_step"),
        interval("ceiling_share", 0.5, 0.6, 0.9, scope="training_step"),
        exact("peak_memory", 60.0, scope="training_step"),
        exact("relative_error", 2e-3, scope="against_eager", method="gradient"),
    ]
    generation = [
        ended(Status.OOM, "it broke"),
        interval("latency", 19, 20, 22, scope="prefill"),
        interval("latency", 3, 4, 7, scope="decode", predicted=2.0, details=tails, flags=(Flag.SLOWDOWN,)),
        Measurement("tokens_per_second", 750.0, scope="decode"),
    ]
    modes = {"inference": inference, "training": training, "generation": generation}
    table = model_tables.model_table(
        measured("model", [(factors | {"mode": mode, "optimisation": "eager"}, found) for mode, found in modes.items()])
    )
    (line,) = table.to_dict("records")
    numbers = {
        "parameters": 700, "footprint": 5, "flops": 1e6, "compile": 2200,
        "inference": 12, "inference_low": 11, "inference_high": 15, "inference_predicted": 4,
        "inference_tokens_per_second": 16_000, "inference_memory": 8, "inference_share": 0.4,
        "prefill": 20, "prefill_low": 19, "prefill_high": 22,
        "decode": 4, "decode_low": 3, "decode_high": 7, "decode_predicted": 2, "decode_tokens_per_second": 750,
        "decode_p50": 4.5, "decode_p95": 8, "decode_p99": 9,
        "forward": 10, "backward": 20, "optimizer_step": 6, "optimizer_step_low": 5, "optimizer_step_high": 9,
        "training_step": 36, "training_step_low": 35, "training_step_high": 39, "training_step_predicted": 7,
        "training_tokens_per_second": 5300, "training_memory": 60, "training_share": 0.6,
        "training_to_inference": 3, "difference": 1e-3, "gradient_difference": 2e-3,
    }  # fmt: skip
    assert {name: line[name] for name in numbers} == pytest.approx(numbers)
    assert (line["optimisation"], line["batch_size"], line["status"], line["message"]) == (
        "eager",
        3,
        "error",
        "it broke",
    )
    assert line["flags"] == [Flag.SLOWDOWN]


def test_scaling_is_fitted_to_one_model_type_and_batch_by_itself(measured):
    cases = []
    for batch, power in ((5, 2), (3, 1)):
        for seq_len in (16, 32, 64, 128):
            factors = SIZES | {"name": "tiny", "attention_type": "dense", "mode": "inference", "optimisation": "eager"}
            ms = seq_len**power / 4
            found = [ended(), interval("latency", ms, ms, ms, scope="inference")]
            cases.append((factors | {"seq_len": seq_len, "batch_size": batch}, found))
    table = model_tables.scaling_table(measured("model", cases))
    assert list(dict.fromkeys(table["batch_size"])) == [5, 3]  # in the order of the cases
    table = table.set_index(["batch_size", "quantity"])
    for batch, word in ((3, "linear"), (5, "quadratic")):
        line = table.loc[(batch, "inference time")]
        assert line["meaning"] == word and line["exponent_low"] == pytest.approx(line["exponent_high"])
        assert "0 different sizes cannot give" in table.loc[(batch, "training memory"), "meaning"]


@pytest.mark.parametrize(
    ("low", "high", "words"),
    [
        (0.5, 2.5, "undecided between linear and quadratic; measure more lengths"),
        (1.02, 1.5, "linear"),
        (1.021, 1.5, "between linear and quadratic"),
        (0.5, 0.979, "below linear"),
        (-0.5, -0.02, "constant"),
        (-0.5, -0.021, "falls"),
        (2.021, 2.5, "above quadratic"),
    ],
)
def test_the_words_of_an_exponent_change_at_their_bounds(low, high, words):
    assert model_tables.scaling_words(low, high) == words


def test_the_warm_up_table_compares_means_within_each_process(measured):
    def cases(direction, *processes):
        found = (warmup_process(direction, at, 10, times) for at, times in enumerate(processes, 1))
        return [(factors, [ended(), *rows]) for factors, rows in found]

    forward = cases("forward", {5: (10, 20), 0: (15, 50)}, {5: (11, 30), 0: (18, 60)}, {5: (12, 10), 0: (14, 40)})
    backward = cases("backward", {2: (7, 30), 5: (8, 40)})
    other = cases("forward", {3: (7, 5)})
    table = warmup_view.warmup_table(measured("warmup", [*forward, *backward], other))
    assert list(table["warmup_steps"]) == [5, 0, 2, 5, 3] and list(table["processes"]) == [3, 3, 1, 1, 1]
    assert list(table["difference"][:4]) == pytest.approx([0, 1.5, -0.25, 0]) and pd.isna(table["difference"][4])
    cold = table.iloc[1]
    numbers = {
        "median": 15,
        "median_low": 14,
        "median_high": 18,
        "mean": 50,
        "mean_low": 40,
        "mean_high": 60,
        "sd": 3,
        "cv": 0.33,
    }
    assert {name: cold[name] for name in numbers} == pytest.approx(numbers)
    assert (cold["difference_low"], cold["difference_high"]) == pytest.approx((1, 3))


def test_cells_are_for_people():
    table = pd.DataFrame(
        {"a": [12.0, float("nan")], "a_low": [11.0, 1.0], "a_high": [15.0, 2.0], "flags": [["x", "y"], []],
         "b": [True, None], "c": [0.5, 2.0], "c_low": [0.25, 1.0], "hidden": [1, 2]}
    )  # fmt: skip
    shown = tables.readable(table, {"c": "C", "a": "A [95 %]", "flags": "F", "b": "B", "none": "N"})
    assert list(shown.columns) == ["C", "A [95 %]", "F", "B"]
    assert shown.to_numpy().tolist() == [["0.5000", "12.0 [11.0 … 15.0]", "x, y", "True"], ["2", "—", "", ""]]


def test_energy_above_idle_is_shared_out_as_the_windows_energy_is(measured):
    def row(metric, low, value, high, scope="decode", **rest):
        return Measurement(
            metric, value, low, high, 1.0, 1, method="rapl", scope=scope, details={"of": "package"}, **rest
        )

    factors = SIZES | {"name": "tiny", "phase": "decode"}
    found = [ended(), Measurement("tokens_per_second", 75.0, scope="decode", method="window")]
    found += [row("energy", 36, 40, 50), row("power", 18, 20, 25), row("power", 6, 8, 9, "idle")]
    found += [row("energy_per_token", 0.18, 0.2, 0.25), row("energy_delay", 70, 80, 100), row("net_energy", 12, 24, 30)]
    other = Measurement("energy", 7.0, 5.0, 9.0, 1.0, 1, method="rapl_dram", scope="decode", details={"of": "dram"})
    package, dram = energy_table(measured("energy", [(factors, [*found, other])])).to_dict("records")
    numbers = {
        "energy": 40, "energy_low": 36, "energy_high": 50, "power": 20, "power_low": 18, "power_high": 25,
        "idle_power": 8, "idle_power_low": 6, "idle_power_high": 9, "energy_per_token": 0.2, "energy_delay": 80,
        "net_per_token": 0.12, "net_per_token_low": 0.06, "net_per_token_high": 0.15, "tokens_per_second": 75,
    }  # fmt: skip
    assert {name: package[name] for name in numbers} == pytest.approx(numbers)
    assert (package["of"], dram["of"], dram["energy"], package["batch_size"]) == ("package", "dram", 7, 3)
    assert pd.isna(dram["power"]) and pd.isna(dram["net_per_token"])


def test_the_cost_of_looking_has_its_wall_and_its_processor_time(measured):
    def row(mode, wall, cpu, closest):
        details = {"threads": 0.005, "cpu": cpu, "plain_ms": 4.0, "pass_ms": closest}
        return Measurement("overhead", wall[1], wall[0], wall[2], 0.95, 17, scope=f"decode {mode}", details=details)

    factors = SIZES | {"name": "tiny", "phase": "decode"}
    found = [
        ended(),
        row("deep", (0.01, 0.02, 0.04), (0.03, 0.05, 0.06), 8.0),
        row("again", (-0.01, 0.0, 0.01), (0, 0, 0), None),
    ]
    rows = measured("energy", [(factors, found)])
    deep, again = layers.overhead_table(rows).to_dict("records")
    numbers = {"wall": 0.02, "wall_low": 0.01, "wall_high": 0.04, "cpu": 0.05, "cpu_low": 0.03, "cpu_high": 0.06}
    numbers |= {"threads": 0.005, "plain_ms": 4, "pass_ms": 8, "n": 17}
    assert {name: deep[name] for name in numbers} == numbers and pd.isna(again["pass_ms"])
    shown = tables.readable(layers.overhead_words(rows), layers.OVERHEAD_COLUMNS).iloc[0].to_list()
    assert shown == [
        "tiny",
        "decode",
        "64",
        "deep",
        "+2.0% [+1.0% … +4.0%]",
        "+5.0% [+3.0% … +6.0%]",
        "0.50%",
        "4",
        "8",
        "17",
    ]
    (line,) = map(str, layers.layer_words(rows))
    assert line == "decode, n = 64: profiling costs: deep 2.00 [1.00 … 4.00] %."


def test_a_layer_has_its_energy_its_share_and_its_calls(measured):
    def layer(name, ms, share):
        details = {"layer": name, "share": share, "operations_ms": {"gate": 3.0, "up": 1.0}, "deep_passes": 5}
        return Measurement("layer_time", ms, ms - 1, ms + 2, 0.95, 7, scope=f"decode {name}", details=details)

    joules = Measurement("layer_energy", 2.0, 1.0, 5.0, 1.0, 1, scope="decode head", method="attributed")
    factors = SIZES | {"name": "tiny", "phase": "decode"}
    rows = measured("energy", [(factors, [ended(), layer("blocks.0", 30.0, 0.75), layer("head", 10.0, 0.25), joules])])
    first, head = layers.layer_table(rows).to_dict("records")
    numbers = {
        "ms": 10,
        "low": 9,
        "high": 12,
        "share": 0.25,
        "calls": 7,
        "place": 1,
        "joules": 2,
        "joules_low": 1,
        "joules_high": 5,
    }
    assert {name: head[name] for name in numbers} == numbers and pd.isna(first["joules"])
    assert (head["case"], head["source"], first["place"], first["layer"]) == (
        "decode, n = 64",
        "attributed",
        0,
        "blocks.0",
    )
    operations = layers._operations(rows)
    assert list(operations["operation"]) == ["gate", "up"] * 2 and list(operations["ms"]) == [3, 1] * 2
