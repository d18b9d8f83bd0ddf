import json
import re
import xml.etree.ElementTree as ET

import pandas as pd
import pytest

from nanolib.measurement import BadInput, Status
from nanolib.report import export, page, renderer
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


def test_verdicts_are_computed_from_the_rows(rows):
    text = "\n".join(VERDICTS["attention"](rows))
    assert (
        "Sparse attention is faster than every dense kernel at 1,024 and 4,096 tokens: at 4,096 tokens window 64"
        in text
    )
    assert (
        "is 2.50× [2.26 … 2.76] as fast as dense (flash)" in text
        and "dense attention is faster than sparse at 256 tokens" in text
    )
    text = "\n".join(VERDICTS["model"](rows))
    assert "Inference takes 51.2 ms [48.6 … 53.8] and a training step 40.0 ms [38.0 … 42.0]" in text
    text = "\n".join(VERDICTS["warmup"](rows))
    assert (
        "2 warm-up steps are enough" in text
        and "the mean is +100% [+100% … +100%] against that after 5" in text
    )


@pytest.mark.parametrize("name", CHARTS)
def test_every_chart_compiles_for_jupyterlabs_vega_and_draws(name, rows, tmp_path):
    spec = CHARTS[name](rows).to_dict()
    assert "vega/v5" in renderer.compiled(spec, renderer.VEGALITE_VERSION)["$schema"]
    renderer.save(spec, tmp_path, name)
    assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    assert ET.fromstring((tmp_path / f"{name}.svg").read_text()).tag.endswith("svg")


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
    wanted = {
        "index.html",
        "profiling_report.md",
        "attention_summary.csv",
        "attention_summary.md",
        "model_summary.csv",
    }
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
    assert (
        page.safe_cell("=cmd()") == "'=cmd()"
        and page.safe_cell(-3.5) == -3.5
        and page.safe_cell("a") == "a"
    )


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
