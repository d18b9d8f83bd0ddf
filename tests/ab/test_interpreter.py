import json
import site
import sys
import venv
from pathlib import Path

import pytest
from click.testing import CliRunner

from nanolib.ab.versions import Interpreter, differences, inspect_interpreter, titles
from nanolib.cli import main
from nanolib.store import Store

from .conftest import WORK

pytestmark = pytest.mark.slow


def _environment(folder, version, cost):
    """An interpreter with a package `planted`, and this one's packages behind it."""
    venv.create(folder, symlinks=True)
    (own,) = folder.glob("lib/python*/site-packages")
    (own / "behind.pth").write_text("".join(f"{place}\n" for place in site.getsitepackages()))
    (own / "planted.py").write_text(f"COST = {cost}\n")
    (own / f"planted-{version}.dist-info").mkdir()
    metadata = f"Metadata-Version: 2.1\nName: planted\nVersion: {version}\n"
    (own / f"planted-{version}.dist-info" / "METADATA").write_text(metadata)
    return str(folder / "bin" / "python")


@pytest.fixture(scope="module")
def pythons(tmp_path_factory):
    """Two environments: in the second a package is slower by a tenth."""
    folder = tmp_path_factory.mktemp("environments")
    costs = {"1.0": 30_000_000, "2.0": 33_000_000}
    return [_environment(folder / version, version, cost) for version, cost in costs.items()]


def _ab(tmp_path, *arguments, budget="6s"):
    files = ["--output", str(tmp_path / "out"), "--json", str(tmp_path / "f.json")]
    asked = ["ab", *arguments, "--call", "work:run", "--budget", budget, *files]
    return CliRunner().invoke(main, asked, env={"NANOLIB_OUTPUT": None})


PLANTED = WORK.replace("import time", "import time, planted").replace("{cost}", "planted.COST")


def test_a_slower_package_regressed_and_what_differs_stands_beside(repository, pythons, tmp_path):
    Path("work.py").write_text(PLANTED)
    ended = _ab(tmp_path, "--python", pythons[0], "--python", pythons[1])
    assert ended.exit_code == 1, ended.output
    assert "A → B: planted 1.0 → 2.0" in ended.output
    found = json.loads((tmp_path / "f.json").read_text())
    (line,) = found["lines"]
    assert (line["finding"], line["ratio"]) == ("regressed", pytest.approx(1.1))
    assert found["differ"] == ["planted 1.0 → 2.0"]
    with Store(tmp_path / "out" / "results.sqlite") as store:
        (params,) = store.runs()["params"]
        (details,) = store.measurements().query("metric == 'ratio'")["details"]
    assert params["differ"] == ["planted 1.0 → 2.0"]
    assert details["a"].endswith(" with planted 1.0") and details["b"].endswith(" with planted 2.0")


def test_what_lies_in_the_working_folder_is_not_asked(monkeypatch, tmp_path):
    (tmp_path / "json.py").write_text("raise SystemExit(3)")
    monkeypatch.chdir(tmp_path)
    assert inspect_interpreter(sys.executable).packages["python"].startswith("3.")


def test_titles_name_what_differs_and_not_too_much():
    base = {f"p{at}": "1" for at in range(5)}
    a, b = Interpreter("x", base), Interpreter("y", dict.fromkeys(base, "2"))
    assert titles(a, b) == ("p0 1, p1 1, p2 1 and 2 more", "p0 2, p1 2, p2 2 and 2 more")
    assert differences(a, Interpreter("z", base | {"q": "3"})) == [("q", "none", "3")]
    assert titles(a, a) == ("the first interpreter", "the second interpreter")


def _script(folder, name, text):
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            ["--python", "nowhere/python", "--python", sys.executable],
            "--python: 'nowhere/python' is not a program",
        ),
        (
            ["--python", "/bin/true", "--python", sys.executable],
            "--python: '/bin/true' does not run Python",
        ),
        (
            ["--python", "OLD", "--python", sys.executable],
            "is Python 3.8.1; give 3.11 or newer",
        ),
        (
            ["--python", sys.executable],
            "--python: must be given twice, got 1; give an interpreter for A and B",
        ),
        (["--python", sys.executable] * 3, "--python: must be given twice, got 3"),
    ],
)
def test_bad_environments_are_one_line(repository, tmp_path, options, said):
    old = _script(tmp_path, "old", """echo '{"python": [3, 8, 1], "packages": {}}'""")
    ended = _ab(tmp_path, *[old if option == "OLD" else option for option in options])
    assert ended.exit_code == 2 and said in ended.output, ended.output
    assert len(ended.output.strip().splitlines()) == 1
