"""Names on which others build, links, and the size of files."""

import importlib
import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()

# What others build on, and what it is asked for there.
STAYS = {
    "nanolib": "NanoConfig PRESETS create_model generate_random_batch measure Store",
    "nanolib.models.attention": "kinds attend",
    "nanolib.models.attention.tree": "tree_attention_decode",
    "nanolib.meters": "measure",
    "nanolib.meters.energy": "EnergyMeter integrate",
    "nanolib.meters.layers": "create_profiler LayerProfiler ProfilingConfig",
    "nanolib.stats.intervals": "median_interval Interval",
    "nanolib.stats.compare": "compare compare_paired",
    "nanolib.store": "Store Run",
    "nanolib.compat": "benchmark_with_statistics benchmark_forward benchmark_forward_backward"
    " MODEL_CONFIGS Timer MemoryProfiler ProfilingConfig create_profiler LayerProfiler"
    " profiled_tree_attn_decode",
}


def test_names_on_which_others_build_are_there():
    for module, names in STAYS.items():
        found = importlib.import_module(module)
        assert all(hasattr(found, name) for name in names.split()), module


def test_no_file_has_more_lines_than_contributing_allows():
    (limit,) = re.findall(r"at most (\d+) lines", CONTRIBUTING)
    lines = {file: file.read_text().count("\n") for file in ROOT.glob("nanolib/**/*.py")}
    assert lines and not {file for file, count in lines.items() if count > int(limit)}


PAGES = (
    "*.md",
    "docs/*.md",
    "notebooks/*.ipynb",
    "outputs/reference/**/*.md",
    "outputs/reference/**/*.ipynb",
)
LINKING = [file for pattern in PAGES for file in ROOT.glob(pattern)]


@pytest.mark.parametrize("file", LINKING, ids=lambda file: str(file.relative_to(ROOT)))
def test_links_to_files_lead_somewhere(file):
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".ipynb":
        cells = json.loads(text)["cells"]
        text = "\n".join(
            "".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown"
        )
    for target in re.findall(r"\]\(([^)\s#]+)", text):
        assert re.match(r"\w+:", target) or (file.parent / target).exists(), target
