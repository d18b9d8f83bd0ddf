import itertools
import json
import re
import xml.etree.ElementTree as ET

import altair as alt
import pandas as pd
import pytest
import vl_convert

from nanolib.experiments.attention.view import tables as attention_tables
from nanolib.experiments.model.view import tables as model_tables
from nanolib.experiments.warmup import view as warmup_view
from nanolib.measurement import BadInput, Status
from nanolib.report import drawing, export, over_length, page, renderer
from nanolib.store import Run, Store
from tests.report.rounds import in_turns
from tests.report.rows import ATTENTION, EVIL, MACHINE, attention_rows, model_rows, warmup_rows
from tests.shown import CHARTS, SECTIONS, VERDICTS


@pytest.fixture
def store(tmp_path):
    with Store(tmp_path / "results.sqlite") as opened:
        opened.add(
            Run(
                "attention",
                MACHINE,
                rows=in_turns("attention", ATTENTION),
                run_id="attention-1",
                label=EVIL,
                process="h:1:1",
            )
        )
        opened.add(Run("model", MACHINE, rows=model_rows(), run_id="model-1"))
        opened.add(Run("warmup", MACHINE, rows=warmup_rows(), run_id="warmup-1"))
        yield opened


@pytest.fixture
def rows(store):
    return store.measurements(samples=True)


def test_the_attention_table_has_a_line_per_case_and_its_speed_up(rows):
    table = attention_tables.attention_table(rows).set_index(["name", "seq_len"])
    assert len(table) == 7
    line = table.loc[("window 64", 1024)]
    assert line.speed_up == pytest.approx(2) and line.speed_up_baseline == "dense (flash)"
    assert (line.speed_up_low, line.speed_up_high) == pytest.approx((15.2 / 8.4, 16.8 / 7.6))
    assert line.bound == pytest.approx(0.6 / 0.2)
    assert table.loc[("dense (cudnn)", 256)].status == "unsupported"


def test_the_bound_is_that_of_the_fastest_dense_kernel(tmp_path):
    """Tiles are skipped 3 to 1, so the faster of the two could gain 3 by skipping the same."""
    times = {("dense (math)", 64): 80.0, ("dense (flash)", 64): 120.0, ("window 8", 64): 30.0}
    with Store(tmp_path / "x.sqlite") as other:
        other.add(Run("attention", MACHINE, rows=in_turns("attention", attention_rows(times))))
        line = attention_tables.attention_table(other.measurements()).set_index("name").loc["window 8"]
    assert (line.speed_up_baseline, line.speed_up, line.bound) == (
        "dense (math)",
        pytest.approx(80 / 30),
        pytest.approx(3),
    )


def test_the_model_table_puts_training_beside_inference(rows):
    line = model_tables.model_table(rows).set_index("seq_len").loc[512]
    assert (line.inference, line.training_step, line.parameters) == (51.2, 40, 1000)
    assert line.training_to_inference == pytest.approx(40 / 51.2)


def test_scaling_exponents_say_what_they_mean(rows):
    table = model_tables.scaling_table(rows).set_index("quantity")
    assert table.loc["inference time"].exponent == pytest.approx(1) and table.loc["inference time"].meaning == "linear"
    assert table.loc["training memory"].meaning == "constant"


def test_the_warm_up_table_compares_with_five_steps(rows):
    table = warmup_view.warmup_table(rows).set_index("warmup_steps")
    assert table.loc[0].difference == pytest.approx(1.0) and table.loc[5].difference == 0
    assert list(warmup_view.curve_table(rows).phase) == ["warm-up", "warm-up", "steady", "steady"] * 5


def test_verdicts_are_computed_from_the_rows(rows):
    text = "\n".join(VERDICTS["attention"](rows))
    assert "Sparse attention is faster than dense (flash) at 1,024 and 4,096 tokens: at 4,096 tokens window 64" in text
    assert "is 2.50× [2.26 … 2.76] as fast as dense (flash)" in text and "dense is faster at 256 tokens" in text
    text = "\n".join(VERDICTS["model"](rows))
    assert (
        "inference takes 51.2 ms" in text
        and "inference time grows as n^1.00" in text
        and "the backward (25 ms)" in text
    )
    text = "\n".join(VERDICTS["warmup"](rows))
    assert "2 warm-up steps are enough" in text and "the mean is +100% [+100% … +100%] against that after 5" in text


def test_sparse_that_wins_only_in_between_does_not_beat_dense(tmp_path):
    times = {("dense", n): ms for n, ms in ((64, 10.0), (128, 10.0), (256, 10.0))}
    times |= {("window 8", n): ms for n, ms in ((64, 20.0), (128, 5.0), (256, 20.0))}
    with Store(tmp_path / "x.sqlite") as other:
        other.add(Run("attention", MACHINE, rows=in_turns("attention", attention_rows(times))))
        text = "\n".join(VERDICTS["attention"](other.measurements()))
    assert "faster than dense at 128 tokens" in text and "dense is faster at 64 and 256 tokens" in text


def test_overlapping_intervals_are_not_told_apart(tmp_path):
    with Store(tmp_path / "x.sqlite") as other:
        rows = attention_rows({("dense", 64): 10.0, ("window 8", 64): 9.8})
        other.add(Run("attention", MACHINE, rows=in_turns("attention", rows)))
        text = "\n".join(VERDICTS["attention"](other.measurements()))
    assert "No clear difference between sparse and dense attention at 64 tokens" in text


def _layers(spec):
    found = []
    for group in spec.get("marks", []):
        found += [group, *_layers(group)]
    return found


@pytest.mark.parametrize("name", CHARTS)
def test_every_chart_compiles_for_jupyterlabs_vega_and_draws(name, rows, tmp_path):
    spec = renderer.vega_spec(CHARTS[name](rows))
    assert "vega/v5" in spec["$schema"]
    renderer.save(spec, tmp_path, name)
    assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    assert ET.fromstring((tmp_path / f"{name}.svg").read_text()).tag.endswith("svg")


def test_predictions_are_dashed_lines_and_measurements_are_marks(rows):
    spec = renderer.vega_spec(CHARTS["attention_latency"](rows))
    dashed = [m for m in _layers(spec) if "strokeDash" in json.dumps(m.get("encode", {}))]
    symbols = [m for m in _layers(spec) if m["type"] == "symbol"]
    assert dashed and all("predicted" in json.dumps(m["encode"]["update"]["y"]) for m in dashed)
    assert symbols and all("estimate" in json.dumps(m["encode"]["update"]["y"]) for m in symbols)


def test_charts_carry_no_raw_samples(rows):
    assert "samples" not in json.dumps(CHARTS["attention_latency"](rows).to_dict())


@pytest.mark.parametrize("name", CHARTS)
def test_a_chart_of_nothing_says_why(name, tmp_path):
    with Store(tmp_path / "empty.sqlite") as empty:
        text = json.dumps(CHARTS[name](empty.measurements(samples=True)).to_dict())
    assert "no " in text


def test_only_failed_cases_make_a_page_that_says_so(tmp_path):
    failed = attention_rows({}, failed=[("dense", 64, Status.OOM, "too little memory")])
    with Store(tmp_path / "x.sqlite") as other:
        other.add(Run("attention", MACHINE, rows=failed, run_id="r"))
        text = page.build(other, ["r"], tmp_path / "report", SECTIONS).read_text()
    assert "no case gave a number (1 oom)" in text and "too little memory" in text


def test_an_empty_database_makes_a_page_that_says_so(tmp_path):
    with Store(tmp_path / "empty.sqlite") as empty:
        text = page.build(empty, [], tmp_path / "report", SECTIONS).read_text()
    assert "There is nothing to show yet" in text


def test_the_report_is_whole_self_contained_and_escaped(store, tmp_path):
    index = page.build(store, ["attention-1", "model-1", "warmup-1"], tmp_path / "report", SECTIONS)
    names = {file.name for file in index.parent.iterdir()}
    wanted = {"index.html", "profiling_report.md", "attention_summary.csv", "attention_summary.md", "model_summary.csv"}
    wanted |= {"model_summary.md", "attention_profile.json", "model_profile.json"}
    charted = ("attention_latency", "attention_memory", "attention_efficiency", "model_performance")
    wanted |= {f"{name}.{kind}" for name in charted for kind in ("png", "svg")}
    assert wanted <= names
    text = index.read_text()
    assert not re.search(r"""(src|href)=["']?(https?:)?//""", text)  # nothing is fetched
    assert "<script>alert(1)" not in text and "A <b>CPU</b>" not in text
    assert text.count("<script>") == 2
    markdown = (index.parent / "profiling_report.md").read_text()
    assert "<script>" not in markdown and not re.search(r"(?<!\\)\]\(http", markdown)
    profile = json.loads((index.parent / "attention_profile.json").read_text())
    assert len(profile["measurements"]) == len(store.measurements(["attention-1"]))


def test_formulas_in_cells_are_text():
    assert page.safe_cell("=cmd()") == "'=cmd()" and page.safe_cell(-3.5) == -3.5 and page.safe_cell("a") == "a"


@pytest.mark.parametrize("ending", [".sqlite", ".json", ".csv", ".md"])
def test_an_export_holds_every_row(store, tmp_path, ending):
    target = tmp_path / f"share{ending}"
    export.write(store, ["model-1"], target)
    count = len(store.measurements(["model-1"]))
    if ending == ".sqlite":
        with Store(target) as shared:
            assert len(shared.measurements()) == count
    elif ending == ".json":
        assert len(json.loads(target.read_text())["measurements"]) == count
    elif ending == ".csv":
        assert len(pd.read_csv(target)) == count
    else:
        assert len(target.read_text().strip().splitlines()) == count + 2


def test_bad_exports_are_told_and_nothing_is_written(store, tmp_path):
    for name, said in (("x.exe", "no known ending"), ("no/x.json", "is no folder")):
        with pytest.raises(BadInput, match=said):
            export.write(store, ["model-1"], tmp_path / name)
    with pytest.raises(BadInput, match="there are no runs"):
        export.write(store, [], tmp_path / "x.json")
    assert not list(tmp_path.glob("x.*"))


def test_reference_lines_grow_as_n_and_as_n_squared_and_stay_inside_the_chart():
    lengths = [128, 256, 1024]
    data = pd.DataFrame({"seq_len": lengths * 2, "estimate": [1.0, 2.0, 4.0, 4.0, 16.0, 20.0]})
    line, text = over_length._slopes(data, [0.5, 40.0], drawing.seq_axis(data["seq_len"]), alt.Y("estimate:Q"))
    drawn = line.data.groupby("slope")
    for name, power in (("n", 1), ("n²", 2)):
        first, last = drawn.get_group(name)[["seq_len", "estimate"]].to_numpy()
        assert first == pytest.approx([128, 2.0])  # the middle of 1 and 4
        assert last[1] / first[1] == pytest.approx((last[0] / first[0]) ** power)
        assert last[0] <= 1024 and last[1] <= 40.0 * (1 + 1e-9)
    assert list(text.data["text"]) == ["", "n", "", "n²"]
    assert over_length._slopes(data[data["seq_len"] == 128], [0.5, 40.0], alt.X("seq_len"), alt.Y("estimate")) == []


def test_labels_of_an_axis_leave_room_between_them():
    x = alt.X("x:Q", scale=alt.Scale(type="log"), axis=alt.Axis(format=".1~e"))
    chart = alt.Chart(pd.DataFrame({"x": [0.011, 0.1]}), width=210).mark_point().encode(x=x)
    drawn = vl_convert.vega_to_svg(renderer.vega_spec(drawing.theme(chart)))
    label = r'translate\(([\d.]+),[\d.]+\)" font-family="sans-serif" font-size="12px" fill="\S+" opacity="1">\de-\d<'
    at = [float(place) for place in re.findall(label, drawn)]
    assert len(at) > 3 and all(right - left > 28 for left, right in itertools.pairwise(at))


def test_ticks_of_small_shares_read_differently(rows):
    spec = CHARTS["attention_efficiency"](rows.assign(estimate=rows["estimate"] / 20, low=None, high=None))
    drawn = vl_convert.vega_to_svg(renderer.vega_spec(spec))
    labels = re.findall(r">([\d.]+%)<", drawn.split(">backward<")[0])
    assert len(labels) > 3 and len(set(labels)) == len(labels)


def test_a_table_that_many_layers_draw_is_turned_into_values_once(monkeypatch):
    asked, real = [], alt.default_data_transformer
    monkeypatch.setattr(alt, "default_data_transformer", lambda data: asked.append(data) or real(data))
    table, other = pd.DataFrame({"x": [1, 2], "y": [3, 4]}), pd.DataFrame({"x": [5], "y": [6]})
    layers = [alt.Chart(data).mark_point().encode(x="x:Q", y="y:Q") for data in (table, other, table, table)]
    before = alt.layer(*layers).to_dict()
    with renderer.quick_charts():
        within = alt.layer(*layers).to_dict()
    assert len(asked) == 2 and within == before
    assert alt.data_transformers.active == "default"


def test_a_chart_that_does_not_compile_is_told(tmp_path):
    with pytest.raises(ValueError, match="Vega"), renderer.LinkedSpecs(tmp_path) as drawn:
        drawn.add("bad", alt.Chart(pd.DataFrame({"x": [1]}), mark="no such mark"))
        drawn.all()
