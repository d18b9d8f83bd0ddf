import base64
import hashlib
import json
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest
from click.testing import CliRunner

from nanolib.ab import environment
from nanolib.ab.environment import Environment, differences, inspected, made, titles
from nanolib.cli import main
from nanolib.measurement import BadInput
from nanolib.store import Store

from .conftest import WORK

pytestmark = pytest.mark.slow


def wheel(folder, version, source):
    """A wheel of a package `planted` with one module."""
    info = f"planted-{version}.dist-info"
    files = {
        "planted.py": source,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: planted\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    digest = lambda text: base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()  # noqa: E731
    record = "".join(f"{name},sha256={digest(text)},{len(text)}\n" for name, text in files.items())
    path = folder / f"planted-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in (files | {f"{info}/RECORD": f"{record}{info}/RECORD,,\n"}).items():
            archive.writestr(name, text)
    return path


def _shelf(place, monkeypatch):
    """Two versions of a package, the second slower by a tenth, where pip looks; and a cache of our own."""
    folder = place / "wheels"
    if not folder.exists():
        folder.mkdir()
        for version, cost in (("1.0", 30_000_000), ("2.0", 33_000_000)):
            wheel(folder, version, f"COST = {cost}\n")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("XDG_CACHE_HOME", str(place / "cache"))
    return folder


@pytest.fixture
def packages(tmp_path, monkeypatch):
    return _shelf(tmp_path, monkeypatch)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("kept")


@pytest.fixture
def kept(place, monkeypatch):
    """The same for several tests, whose environments are then made once."""
    return _shelf(place, monkeypatch)


def _ab(tmp_path, *arguments, budget="6s"):
    more = ["--budget", budget, "--output", str(tmp_path / "out"), "--json", str(tmp_path / "f.json")]
    return CliRunner().invoke(main, ["ab", *arguments, "--call", "work:run", *more], env={"NANOLIB_OUTPUT": None})


PLANTED = WORK.replace("import time", "import time, planted").replace("{cost}", "planted.COST")


@pytest.mark.parametrize("is_repository", [True, pytest.param(False, marks=pytest.mark.thorough)])
def test_a_slower_package_regressed_and_what_differs_stands_beside(
    repository, kept, tmp_path, monkeypatch, is_repository
):
    if not is_repository:
        (tmp_path / "plain").mkdir()
        monkeypatch.chdir(tmp_path / "plain")
    Path("work.py").write_text(PLANTED)
    ended = _ab(tmp_path, "--with", "planted==1.0", "--with", "planted==2.0")
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


def test_one_environment_twice_is_equivalent_and_is_made_once(repository, packages, tmp_path):
    Path("work.py").write_text(PLANTED)
    ended = _ab(tmp_path, "--with", "planted==1.0", "--with", "planted==1.0", ".")
    assert ended.exit_code == 0, ended.output
    assert json.loads((tmp_path / "f.json").read_text())["lines"][0]["finding"] == "equivalent"
    assert "A → B" not in ended.output
    assert len(list((tmp_path / "cache" / "nanolib" / "environments").glob("*/lock.json"))) == 1
    assert ended.output.count("making an environment") == 1


def test_interpreters_are_taken_as_named_with_revisions_of_their_own(repository, kept, tmp_path):
    repository.commit("planted", PLANTED)
    a, b = made("planted==1.0"), made("planted==2.0")
    ended = _ab(tmp_path, "base", "planted", "--python", a.python, "--python", b.python)
    assert ended.exit_code == 1 and "A is base (" in ended.output and "planted 2.0" in ended.output


def test_an_environment_sees_what_lies_behind_it_and_its_own_first(kept):
    one = made("planted==1.0")
    assert one.packages["planted"] == "1.0"
    here = inspected(sys.executable)
    assert {name: version for name, version in one.packages.items() if name != "planted"} == dict(here.packages)
    assert [name for name, *_ in differences(here, one)] == ["planted"]
    assert differences(here, one) == [("planted", "none", "1.0")]


def test_an_environment_that_was_changed_is_made_anew(packages):
    said = []
    first = made("planted==1.0", said.append)
    assert made("planted==1.0", said.append) == first and len(said) == 1
    (own,) = Path(first.python).parents[1].glob("lib/python*/site-packages")
    (own / "planted-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: planted\nVersion: 9\n")
    assert made("planted==1.0", said.append) == first and len(said) == 2


def test_a_wheel_is_known_by_what_is_in_it(packages):
    file = packages / "planted-1.0-py3-none-any.whl"
    first = made(str(file))
    wheel(packages, "1.0", "COST = 1\n")
    second = made(str(file))
    assert first.python != second.python


def test_what_cannot_be_installed_leaves_nothing(packages, tmp_path):
    with pytest.raises(BadInput, match=r"--with: 'planted==3' cannot be installed \(.*planted==3"):
        made("planted==3")
    assert not [place for place in (tmp_path / "cache" / "nanolib" / "environments").iterdir() if place.is_dir()]


def test_a_cache_that_cannot_be_written_is_one_line(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(BadInput, match=r"cannot be written .*; set XDG_CACHE_HOME"):
        made("planted==1.0")


def test_what_lies_in_the_working_folder_is_not_asked(monkeypatch, tmp_path):
    (tmp_path / "json.py").write_text("raise SystemExit(3)")
    monkeypatch.chdir(tmp_path)
    assert inspected(sys.executable).packages["python"].startswith("3.")


def test_without_pip_and_uv_it_says_so(packages, monkeypatch):
    monkeypatch.setattr(environment, "_has_pip", lambda: False)
    monkeypatch.setattr(environment.shutil, "which", lambda name: None if name == "uv" else name)
    with pytest.raises(BadInput, match="neither pip nor uv is here"):
        made("planted==1.0")


def test_uv_does_where_there_is_no_pip(monkeypatch):
    monkeypatch.setattr(environment, "_has_pip", lambda: False)
    monkeypatch.setattr(environment.shutil, "which", lambda name: f"/bin/{name}")
    assert environment._installer(Path("v/bin/python"))[:3] == ["/bin/uv", "pip", "install"]


def test_titles_name_what_differs_and_not_too_much():
    base = {f"p{at}": "1" for at in range(5)}
    a, b = Environment("x", base), Environment("y", dict.fromkeys(base, "2"))
    assert titles(a, b) == ("p0 1, p1 1, p2 1 and 2 more", "p0 2, p1 2, p2 2 and 2 more")
    assert titles(a, a) == ("the first interpreter", "the second interpreter")


def _script(folder, name, text):
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--python", "nowhere/python", "--python", sys.executable], "--python: 'nowhere/python' is no program"),
        (["--python", "/bin/true", "--python", sys.executable], "--python: '/bin/true' does not run Python"),
        (["--python", "OLD", "--python", sys.executable], "is Python 3.8.1; give one of 3.11 or newer"),
        (["--python", sys.executable], "--python 1 time will not do; give --python twice"),
        (["--python", sys.executable, "--with", "a==1"], "--python 1 time and --with 1 time will not do"),
        (["--with", "a==1"] * 3, "--with 3 times will not do"),
    ],
)
def test_bad_environments_are_one_line(repository, tmp_path, options, said):
    old = _script(tmp_path, "old", """echo '{"python": [3, 8, 1], "packages": {}}'""")
    ended = _ab(tmp_path, *[old if option == "OLD" else option for option in options])
    assert ended.exit_code == 2 and said in ended.output, ended.output
    assert len(ended.output.strip().splitlines()) == 1


def test_an_interpreter_without_what_the_code_needs_is_one_line(repository, tmp_path):
    venv.create(tmp_path / "bare", symlinks=True)
    bare = str(tmp_path / "bare" / "bin" / "python")
    Path("work.py").write_text("import numpy\n" + WORK.replace("{cost}", "1"))
    ended = _ab(tmp_path, "--python", sys.executable, "--python", bare)
    assert ended.exit_code == 2 and "work:run cannot be imported (ModuleNotFoundError: No module named 'numpy')" in (
        ended.output
    )
    more = ["--output", str(tmp_path / "out")]
    ended = CliRunner().invoke(main, ["ab", "--python", bare, "--python", bare, "attention", *more])
    assert ended.exit_code == 2 and f"{bare}: it lacks torch, " in ended.output
    assert not (tmp_path / "out").exists()


def test_to_look_for_pip_leaves_the_imports_of_this_process_alone():
    code = "import nanolib.ab.environment as e; assert e._has_pip(); import distutils; print(distutils.__file__)"
    told = [
        subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True).stdout
        for text in (code, code.replace("assert e._has_pip(); ", ""))
    ]
    assert told[0] == told[1]
