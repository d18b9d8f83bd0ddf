"""A project outside a checkout of nanolib, with nanolib installed from a built wheel."""

import json
import os
import site
import subprocess
import sys
import venv
from pathlib import Path

import pytest
import yaml

from tests.ab.conftest import Repository
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

def twice():
    step()
    step()

if "OWN_CLOCK" in os.environ:
    time.perf_counter_ns = lambda: now
"""
ACTION = Path(__file__).parents[1]


class Project:
    """Its folder, and how it is called."""

    def __init__(self, folder, python):
        self.folder, self.python = folder, python
        folder.mkdir()
        self.repository = Repository(folder)

    def commit(self, tag, cost):
        (self.folder / "mine").mkdir(exist_ok=True)
        (self.folder / "mine" / "__init__.py").touch()
        (self.folder / "mine" / "step.py").write_text(STEP.replace("{cost}", str(cost)))
        self.repository.git("add", "-A")
        self.repository.git("commit", "--quiet", "--allow-empty", "-m", tag)
        self.repository.git("tag", tag)

    def call(self, *command, **variables):
        keep = {
            name: value
            for name, value in os.environ.items()
            if name not in ("PYTHONPATH", "NANOLIB_OUTPUT")
        }
        path = f"{Path(self.python).parent}{os.pathsep}{keep['PATH']}"
        environment = keep | {"PATH": path, "COLUMNS": "200"} | variables
        return subprocess.run(
            command,
            cwd=self.folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )

    def nano(self, *arguments):
        return self.call(self.python, "-m", "nanolib.cli", *arguments, OWN_CLOCK="1")


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """An interpreter that has nanolib from a wheel, and what it needs from behind."""
    folder = tmp_path_factory.mktemp("installed")
    source = copied(folder / "source")
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    built = [
        *pip,
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "--wheel-dir",
        str(folder),
        str(source),
    ]
    subprocess.run(built, check=True, timeout=300, capture_output=True)
    venv.create(folder / "venv", symlinks=True)
    made = folder / "venv" / "bin" / "python"
    (own,) = (folder / "venv").glob("lib/python*/site-packages")
    (own / "behind.pth").write_text("".join(f"{place}\n" for place in site.getsitepackages()))
    (wheel,) = folder.glob("nanolib-*.whl")
    install = [
        *pip,
        "--python",
        str(made),
        "install",
        "--no-deps",
        "--no-index",
        "--force-reinstall",
        str(wheel),
    ]
    subprocess.run(install, check=True, timeout=300, capture_output=True)
    return str(made)


@pytest.fixture
def project(tmp_path, python):
    made = Project(tmp_path / "project", python)
    made.commit("base", 20_000_000)
    return made


def test_it_is_the_wheel_and_no_checkout(project):
    told = project.call(project.python, "-c", "import nanolib; print(nanolib.__file__)").stdout
    assert told.startswith(str(Path(project.python).parents[1]))
    assert "run nano inside a nanolib checkout" in project.nano("run", "quick").stderr


GH = """#!/bin/sh
echo "$@" >> gh.log
case "$*" in
  *--paginate*) grep -q broken ids && exit 1; cat ids ;;
esac
"""


def _gate(project, tmp_path, **settings):
    (tmp_path / "bin").mkdir(exist_ok=True)
    (tmp_path / "bin" / "gh").write_text(GH)
    (tmp_path / "bin" / "gh").chmod(0o755)
    (project.folder / "ids").touch()
    action = yaml.safe_load((ACTION / "action.yml").read_text())
    gate = next(step for step in action["runs"]["steps"] if step.get("id") == "gate")
    defaults = {name: str(told.get("default", "")) for name, told in action["inputs"].items()}
    given = (
        defaults
        | {
            "base": "base",
            "call": "mine.step:step\nmine.step:twice",
            "comment": "true",
            "total": "6s",
        }
        | settings
    )
    named = {
        name: value.removeprefix("${{ inputs.").removesuffix(" }}")
        for name, value in gate["env"].items()
    }
    filled = {
        name: given.get(value, "7") for name, value in named.items()
    }  # what is no input is the pull request
    path = f"{tmp_path / 'bin'}{os.pathsep}{Path(project.python).parent}{os.pathsep}{os.environ['PATH']}"
    script = gate["run"].replace("${{ github.action_path }}", str(ACTION))
    more = {
        "GITHUB_REPOSITORY": "me/mine",
        "GITHUB_STEP_SUMMARY": str(tmp_path / "summary.md"),
        "PATH": path,
    }
    return project.call(
        "bash",
        "-c",
        script,
        OWN_CLOCK="1",
        **filled,
        **more,
        GITHUB_OUTPUT=str(tmp_path / "output"),
    )


def test_the_action_installs_nanolib_from_its_own_folder(tmp_path):
    """Not by its name, which elsewhere is another project's."""
    action = yaml.safe_load((ACTION / "action.yml").read_text())
    (step,) = [step for step in action["runs"]["steps"] if "NANO_INSTALL" in step.get("env", {})]
    (tmp_path / "python").write_text('#!/bin/sh\nprintf "%s\\n" "$@" > asked\n')
    (tmp_path / "python").chmod(0o755)
    script = step["run"].replace("${{ github.action_path }}", "/an action")
    told = {
        "NANO_INSTALL": action["inputs"]["install"]["default"],
        "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}",
    }
    subprocess.run(["bash", "-c", script], cwd=tmp_path, env=os.environ | told, check=True)
    assert (tmp_path / "asked").read_text().split("\n")[:-1] == [
        "-m",
        "pip",
        "install",
        "-e",
        ".",
        "-e",
        "/an action",
    ]


def test_the_action_fails_on_a_regression_and_writes_a_comment(project, tmp_path):
    project.commit("now", 23_000_000)
    ended = _gate(project, tmp_path, call="mine.step:step")
    assert ended.returncode == 1, ended.stdout + ended.stderr
    summary = (tmp_path / "summary.md").read_text()
    assert "### Slower" in summary and "| regressed | call | mine.step:step " in summary
    assert _written(project) == [["POST", "repos/me/mine/issues/7/comments"]]
    findings = Path((tmp_path / "output").read_text().splitlines()[0].removeprefix("findings="))
    assert json.loads(findings.read_text())["regressed"]


def _written(project):
    """How comments were written, and where."""
    calls = (project.folder / "gh.log").read_text().splitlines()
    return [call.split("--method ")[1].split()[:2] for call in calls if "--method" in call]


def test_the_action_tells_bad_input_and_writes_no_comment(project, tmp_path):
    ended = _gate(project, tmp_path, call="nowhere:step")
    assert ended.returncode == 2 and "nowhere:step cannot be imported" in ended.stderr
    assert not (project.folder / "gh.log").exists() and not (tmp_path / "summary.md").exists()
