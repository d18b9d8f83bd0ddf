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

# Where versions are compared, the project's clock says what a call cost, so that no test times anything.
STEP = """
import os
import time

cost = {cost}
now = 0

def step():
    global now
    now += cost

if "OWN_CLOCK" in os.environ:
    time.perf_counter_ns = lambda: now
"""
ROOT = Path(__file__).parents[1]
ACTION = yaml.safe_load((ROOT / "action.yml").read_text())
INSTALL, GATE = ACTION["runs"]["steps"][1:3]
PIP = (sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check")


class Project:
    """Its folder, and how it is called."""

    def __init__(self, folder, python):
        self.folder, self.python = folder, python
        (folder / "mine").mkdir(parents=True)
        (folder / "mine" / "__init__.py").touch()
        self.repository = Repository(folder)

    def commit(self, tag, cost):
        (self.folder / "mine" / "step.py").write_text(STEP.replace("{cost}", str(cost)))
        self.repository.commit(tag)

    def call(self, *command, inside="", **variables):
        keep = os.environ.keys() - {"PYTHONPATH", "NANOLIB_OUTPUT"}
        environment = {name: os.environ[name] for name in keep} | {"COLUMNS": "200"}
        return ended(*command, cwd=self.folder / inside, env=environment | variables)

    def nano(self, *arguments, inside=""):
        return self.call(self.python, "-m", "nanolib.cli", *arguments, inside=inside)


def _done(*command, **options):
    done = ended(*command, **options)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """A wheel that is built from a source archive, without network."""
    folder = tmp_path_factory.mktemp("built")
    source = copied(folder / "source")
    archive = "from setuptools import build_meta; build_meta.build_sdist('..')"
    _done(sys.executable, "-c", archive, cwd=source)
    (sdist,) = folder.glob("nanolib_workbook-*.tar.gz")
    _done(*PIP, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, sdist)
    (wheel,) = folder.glob("nanolib_workbook-*.whl")
    return wheel


@pytest.fixture(scope="module")
def python(tmp_path_factory, wheel):
    """An interpreter with nanolib from the wheel, and its dependencies from this environment."""
    made, _ = new_environment(tmp_path_factory.mktemp("installed"))
    install = ["install", "--no-deps", "--no-index", "--force-reinstall", wheel]
    _done(*PIP, "--python", made, *install)
    return made


@pytest.fixture
def project(tmp_path, python):
    made = Project(tmp_path / "project", python)
    made.commit("base", 20_000_000)
    return made


def test_the_wheel_makes_a_folder_in_which_nano_runs(project):
    told = project.call(project.python, "-c", "import nanolib; print(nanolib.__file__)").stdout
    assert told.startswith(str(Path(project.python).parents[1]))
    assert "run `nano init DIR`" in project.nano("run", "quick").stderr
    made = project.nano("init", "bench")
    assert made.returncode == 0 and "bench" in made.stdout
    assert "not an empty folder" in project.nano("init", "bench").stderr
    small = ["-pseq_lens=[64]", "-pattention_types=[dense]", "-pquality_attentions=[]"]
    dry = project.nano("run", "quick", "attention", "--dry-run", *small, inside="bench")
    assert dry.returncode == 0 and "attention: 3 cases" in dry.stdout, dry.stderr


def _gate(project, tmp_path, call):
    (tmp_path / "gh").write_text('#!/bin/sh\necho "$@" >> gh.log\n')
    (tmp_path / "gh").chmod(0o755)
    given = {name: str(told.get("default", "")) for name, told in ACTION["inputs"].items()}
    given |= {"base": "base", "call": call, "comment": "true", "total": "6s"}
    inputs = {f"${{{{ inputs.{name} }}}}": value for name, value in given.items()}
    # what is no input is the pull request
    environment = {name: inputs.get(value, "7") for name, value in GATE["env"].items()}
    path = [str(tmp_path), str(Path(project.python).parent), os.environ["PATH"]]
    environment |= {
        "PATH": os.pathsep.join(path),
        "OWN_CLOCK": "1",
        "GITHUB_REPOSITORY": "me/mine",
        "GITHUB_STEP_SUMMARY": str(tmp_path / "summary.md"),
        "GITHUB_OUTPUT": str(tmp_path / "output"),
    }
    script = GATE["run"].replace("${{ github.action_path }}", str(ROOT))
    return project.call("bash", "-c", script, **environment)


def test_the_action_tells_bad_input_and_fails_on_a_regression_with_a_comment(project, tmp_path):
    # nanolib is installed from the action's folder: by its name it is another project, elsewhere
    assert INSTALL["run"] == 'python -m pip install $NANO_INSTALL -e "${{ github.action_path }}"'
    assert INSTALL["env"] == {"NANO_INSTALL": "${{ inputs.install }}"}
    bad = _gate(project, tmp_path, call="nowhere:step")
    assert bad.returncode == 2 and "nowhere:step cannot be imported" in bad.stderr
    assert not (project.folder / "gh.log").exists() and not (tmp_path / "summary.md").exists()
    project.commit("now", 23_000_000)
    gate = _gate(project, tmp_path, call="mine.step:step")
    assert gate.returncode == 1, gate.stdout + gate.stderr
    summary = (tmp_path / "summary.md").read_text()
    assert "### Regression" in summary and "| regressed | call | mine.step:step " in summary
    (written,) = re.findall("--method (.*?) -", (project.folder / "gh.log").read_text())
    assert written == "POST repos/me/mine/issues/7/comments"
    findings = Path((tmp_path / "output").read_text().strip().removeprefix("findings="))
    assert json.loads(findings.read_text())["regressed"]
