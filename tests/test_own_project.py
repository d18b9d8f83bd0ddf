"""A project outside a checkout of nanolib, with nanolib installed from a built wheel."""

import json
import os
import re
import sys
from pathlib import Path

import pytest
import yaml

from tests.ab.conftest import Repository
from tests.processes import ended, new_environment
from tests.working_tree import copied

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
ACTION = yaml.safe_load((ROOT / "action.yml").read_text())
INSTALL, GATE = ACTION["runs"]["steps"][1:3]
PIP = (sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check")


def _done(*command, **options):
    done = ended(*command, **options)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """An interpreter with nanolib, whose wheel is built from a source archive without network."""
    folder = tmp_path_factory.mktemp("built")
    archive = "from setuptools import build_meta; build_meta.build_sdist('..')"
    _done(sys.executable, "-c", archive, cwd=copied(folder / "source"))
    (sdist,) = folder.glob("nanolib_workbook-*.tar.gz")
    _done(*PIP, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, sdist)
    (wheel,) = folder.glob("nanolib_workbook-*.whl")
    made, _ = new_environment(folder / "environment")
    _done(*PIP, "--python", made, "install", "--no-deps", "--no-index", "--force-reinstall", wheel)
    return made


def _call(folder, *command, **variables):
    keep = os.environ.keys() - {"PYTHONPATH", "NANOLIB_OUTPUT"}
    environment = {name: os.environ[name] for name in keep} | {"COLUMNS": "200"}
    return ended(*command, cwd=folder, env=environment | variables)


def test_the_wheel_makes_a_folder_in_which_nano_runs(python, tmp_path):
    nano = (python, "-m", "nanolib.cli")
    found = _call(tmp_path, python, "-c", "import nanolib; print(nanolib.__file__)").stdout
    assert found.startswith(str(Path(python).parents[1]))
    assert "run `nano init DIR`" in _call(tmp_path, *nano, "run", "quick").stderr
    made = _call(tmp_path, *nano, "init", "bench")
    assert made.returncode == 0 and "bench" in made.stdout
    small = ["-pseq_lens=[64]", "-pattention_types=[dense]", "-pquality_attentions=[]"]
    dry = _call(tmp_path / "bench", *nano, "run", "quick", "attention", "--dry-run", *small)
    assert dry.returncode == 0 and "attention: 3 cases" in dry.stdout, dry.stderr


def _gate(python, folder, call):
    """The action's last step in a project, and what it writes next to the project."""
    inputs = {name: str(told.get("default", "")) for name, told in ACTION["inputs"].items()}
    inputs |= {"base": "base", "call": call, "comment": "true", "total": "6s"}
    given = {f"${{{{ inputs.{name} }}}}": value for name, value in inputs.items()}
    # what is no input is the pull request
    environment = {name: given.get(value, "7") for name, value in GATE["env"].items()}
    environment |= {
        "PATH": os.pathsep.join([str(folder.parent), str(Path(python).parent), os.environ["PATH"]]),
        "GITHUB_REPOSITORY": "me/mine",
        "GITHUB_STEP_SUMMARY": str(folder.parent / "summary.md"),
        "GITHUB_OUTPUT": str(folder.parent / "output"),
    }
    return _call(
        folder,
        "bash",
        "-c",
        GATE["run"].replace("${{ github.action_path }}", str(ROOT)),
        **environment,
    )


def test_the_action_tells_bad_input_and_fails_on_a_regression_with_a_comment(python, tmp_path):
    # nanolib is installed from the action's folder: by its name it is another project, elsewhere
    assert INSTALL["run"] == 'python -m pip install $NANO_INSTALL -e "${{ github.action_path }}"'
    assert INSTALL["env"] == {"NANO_INSTALL": "${{ inputs.install }}"}
    gh, log, summary = tmp_path / "gh", tmp_path / "gh.log", tmp_path / "summary.md"
    gh.write_text(f'#!/bin/sh\necho "$@" >> {log}\n')
    gh.chmod(0o755)
    folder = tmp_path / "project"
    folder.mkdir()
    project = Repository(folder)
    project.commit("base", cost=20_000_000)
    bad = _gate(python, folder, call="nowhere:run")
    assert bad.returncode == 2 and "nowhere:run cannot be imported" in bad.stderr
    assert not log.exists() and not summary.exists()
    project.commit("now", cost=23_000_000)
    gate = _gate(python, folder, call="work:run")
    assert gate.returncode == 1, gate.stdout + gate.stderr
    text = summary.read_text()
    assert "### Regression" in text and "| regressed | call | work:run " in text
    (written,) = re.findall("--method (.*?) -", log.read_text())
    assert written == "POST repos/me/mine/issues/7/comments"
    findings = Path((tmp_path / "output").read_text().strip().removeprefix("findings="))
    assert json.loads(findings.read_text())["regressed"]
