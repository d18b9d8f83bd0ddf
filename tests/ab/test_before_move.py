"""What `nano ab` asks of a version is found by the names that the version has, before the move and after it."""

import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace

import pytest

from nanolib.ab import before_move
from nanolib.experiments import ALL
from nanolib.run.suite.jobs import plan

HERE = Path(before_move.__file__)
MEASURED = """
WHAT = "{0} cases"
def measure_case(case, params, ceilings):
    from nanolib.{1} import latency
    return [case, latency.collect_blocks, "{0}"]
"""
BEFORE = {
    "experiments/attention.py": MEASURED.format("old", "meters"),
    "meters/latency.py": "collect_blocks = None\n",
    "experiments/outcome.py": "old outcome",
}
MOVED = {
    "experiments/attention/cases.py": MEASURED.format("moved", "meters.time"),
    "meters/time/latency.py": "collect_blocks = None\n",
    "run/outcome.py": "moved outcome",
}
AFTER = {
    "experiments/attention/cases.py": "new cases",
    "meters/time/latency.py": "",
    "run/outcome.py": "new outcome",
    "run/workload.py": "def measure_case(case, params, ceilings):\n    return [case, params, 'new']\n",
}


def _found(folder, files):
    """What the adapter finds in a version of these files."""
    for name, text in files.items():
        path = folder / "nanolib" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text if "\n" in text else f"WHAT = {text!r}\n")
        for parent in path.parents:
            if parent == folder:
                break
            (parent / "__init__.py").touch()
    code = f"""
        import importlib.util, sys, types
        sys.path.insert(0, {str(folder)!r})
        spec = importlib.util.spec_from_file_location("adapter", {str(HERE)!r})
        adapter = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(adapter)
        try:
            module, params = adapter.experiment("attention"), types.SimpleNamespace(collected_by=lambda collect: collect)
            measured = adapter.measuring(module, "case", params, "mine")
            print([module.WHAT, adapter.outcome().WHAT, measured and measured()])
        except ImportError as error:
            print(error)
    """
    return subprocess.check_output([sys.executable, "-P", "-c", textwrap.dedent(code)], text=True, cwd=folder).strip()


@pytest.mark.parametrize(
    ("files", "word"), [(BEFORE, "old"), (MOVED, "moved"), (AFTER, "new"), (BEFORE | MOVED, "moved")]
)
def test_each_layout_is_known_and_blocks_are_collected_by_who_is_named(tmp_path, files, word):
    if files is not BEFORE:
        files = {name: text for name, text in files.items() if name != "experiments/attention.py"}
    assert _found(tmp_path, files) == str([f"{word} cases", f"{word} outcome", ["case", "mine", word]])


def test_a_version_that_is_older_than_nano_ab_cannot_be_told_who_collects(tmp_path):
    assert _found(tmp_path, BEFORE | {"meters/latency.py": "\n"}) == "['old cases', 'old outcome', None]"


def test_a_module_that_is_there_and_lacks_another_says_which(tmp_path):
    broken = AFTER | {"experiments/attention/cases.py": "import nowhere_at_all\n\n"}
    assert _found(tmp_path, broken) == "No module named 'nowhere_at_all'"


def test_a_version_of_before_gets_the_names_that_it_had():
    fields = dict.fromkeys(["precision", "kinds", "forms", "prefill_forms", "keep", "parity_arms", "seed"])
    given = {
        "rel_ci": 0.1,
        "attention_types": [{"kind": "sparse", "pattern": "threshold", "mass": 0.5}],
        "algorithms": ["gather"],
        "prefill_algorithms": ["ring"],
        "excluded_modules": ["head"],
        "parity_arms": ["fp8_rowwise", "float32"],
        "seed": 3,
        "unknown": 1,
    }
    assert before_move.parameters(given, SimpleNamespace(model_fields=fields)) == {
        "precision": 0.1,
        "kinds": [{"kind": "sparse", "pattern": "threshold", "mass": 0.5}],
        "forms": ["gather"],
        "prefill_forms": ["ring"],
        "keep": ["head"],
        "parity_arms": ["rowwise", "float32"],
        "seed": 3,
        "unknown": 1,
    }
    same = before_move.parameters(given, SimpleNamespace(model_fields={"rel_ci": None}))
    assert same == given


def test_a_version_of_before_gets_what_was_typed_as_it_was_read():
    typed = {"attention_types": "[dense, {kind: sparse, pattern: threshold, mass: 0.5}]", "rel_ci": "5e-2"}
    (job,) = plan(ALL, ["attention"], typed, {})
    fields = SimpleNamespace(model_fields=dict.fromkeys(["precision", "kinds"]))
    found = before_move.parameters(job.given, fields)
    assert found["precision"] == 0.05
    assert found["kinds"] == [{"kind": "dense"}, {"kind": "sparse", "pattern": "threshold", "mass": 0.5}]


def test_a_model_of_before_keeps_the_names_that_it_shares():
    fields = dict.fromkeys(["precision", "attention_types"])
    given = {"rel_ci": 0.1, "attention_types": ["dense"]}
    found = before_move.parameters(given, SimpleNamespace(model_fields=fields))
    assert found == {"precision": 0.1, "attention_types": ["dense"]}
