"""Compare two environments, each an interpreter with its own packages."""

import json
import sys
from pathlib import Path

import pytest

from nanolib.ab.versions import inspect_interpreter
from tests.processes import new_environment

from .conftest import WORK

pytestmark = pytest.mark.slow
PLANTED = WORK.replace("import time", "import time, planted").replace("{cost}", "planted.COST")


def _environment(folder, version, cost):
    """An interpreter with a package `planted`."""
    python, own = new_environment(folder)
    (own / "planted.py").write_text(f"COST = {cost}\n")
    (own / f"planted-{version}.dist-info").mkdir()
    metadata = f"Metadata-Version: 2.1\nName: planted\nVersion: {version}\n"
    (own / f"planted-{version}.dist-info" / "METADATA").write_text(metadata)
    return python


def test_a_slower_package_regressed_and_what_differs_is_beside_it(repository, compared, tmp_path):
    Path("work.py").write_text(PLANTED)  # an edit of the working tree
    revision = repository.git("rev-parse", "--short", "HEAD")
    base = _environment(tmp_path / "base", "1.0", 30_000_000)
    slow = _environment(tmp_path / "slow", "2.0", 33_000_000)
    ended, line = compared("--python", base, "--python", slow, budget="6s")
    assert ended.exit_code == 1 and "A → B: planted 1.0 → 2.0" in ended.output
    assert (line["finding"], line["verdict"]["ratio"]) == ("regressed", pytest.approx(1.1))
    assert (line["base"], line["current"]) == pytest.approx((30, 33))
    assert f"A is . ({revision}+) with {base}, B is . ({revision}+) with {slow};" in ended.output
    assert json.loads((tmp_path / "f.json").read_text())["differ"] == ["planted 1.0 → 2.0"]


def test_modules_of_the_working_folder_are_not_imported(monkeypatch, tmp_path):
    (tmp_path / "json.py").write_text("raise SystemExit(3)")
    monkeypatch.chdir(tmp_path)
    assert inspect_interpreter(sys.executable).packages["python"].startswith("3.")
