"""A project outside a checkout of nanolib, with nanolib installed from a built wheel."""

import json
import os
import site
import subprocess
import sys
import venv
import zipfile
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

    def call(self, *command, inside="", **variables):
        keep = {
            name: value
            for name, value in os.environ.items()
            if name not in ("PYTHONPATH", "NANOLIB_OUTPUT")
        }
        path = f"{Path(self.python).parent}{os.pathsep}{keep['PATH']}"
        environment = keep | {"PATH": path, "COLUMNS": "200"} | variables
        return subprocess.run(
            command,
            cwd=self.folder / inside,
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )

    def nano(self, *arguments, inside=""):
        command = (self.python, "-m", "nanolib.cli", *arguments)
        return self.call(*command, inside=inside, OWN_CLOCK="1")


PIP = (sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """A wheel that is built from a source archive, without network."""
    folder = tmp_path_factory.mktemp("built")
    source = copied(folder / "source")
    archive = "from setuptools import build_meta; build_meta.build_sdist('..')"
    subprocess.run(
        [sys.executable, "-c", archive], cwd=source, check=True, timeout=300, capture_output=True
    )
    (sdist,) = folder.glob("nanolib_workbook-*.tar.gz")
    built = [*PIP, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, sdist]
    subprocess.run(built, check=True, timeout=300, capture_output=True)
    (wheel,) = folder.glob("nanolib_workbook-*.whl")
    return wheel


@pytest.fixture(scope="module")
def python(tmp_path_factory, wheel):
    """An interpreter with nanolib from the wheel, and its dependencies from this environment."""
    folder = tmp_path_factory.mktemp("installed")
    venv.create(folder / "venv", symlinks=True)
    made = folder / "venv" / "bin" / "python"
    (own,) = (folder / "venv").glob("lib/python*/site-packages")
    (own / "behind.pth").write_text("".join(f"{place}\n" for place in site.getsitepackages()))
    install = [
        *PIP,
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
    assert "run `nano init DIR`" in project.nano("run", "quick").stderr


def test_the_wheel_contains_the_notebooks_params_files_and_docs(wheel):
    files = {
        path.relative_to(ACTION).as_posix()
        for folder in ("notebooks", "params", "docs")
        for path in (ACTION / folder).rglob("*.*")
        if path.suffix in (".ipynb", ".yml", ".md", ".png")
        and ".ipynb_checkpoints" not in path.parts
    }
    assert {"notebooks/attention.ipynb", "params/quick/attention.yml", "docs/method.md"} <= files
    inside = {name for name in zipfile.ZipFile(wheel).namelist() if "/workbook/" in name}
    assert inside == {f"nanolib/workbook/{file}" for file in files}


IN_A_ROW = """
import json, os, sys
from nanolib.cli import main
from nanolib.paths import output_folder
for folder, *arguments in json.loads(sys.argv[1]):
    os.chdir(folder)
    try:
        main(arguments)
    except SystemExit as end:
        print("exit code", end.code)
print(output_folder())
"""


def test_init_makes_a_folder_in_which_nano_runs_and_plans(project):
    bench = project.folder / "bench"
    small = ["-pseq_lens=[64]", "-pattention_types=[dense]", "-pquality_patterns=[]"]
    tiny = ["-pnum_layers=1", "-pd_model=64", "-pvocab_size=64", "-pcontext_length=32"]
    commands = [
        [".", "init", "bench"],
        [".", "init", "bench"],
        ["bench", "run", "quick", "attention", "--dry-run", *small],
        ["notebooks", "plan", "decoder_nano", "--memory", "1MiB", "--seq-len", "16", *tiny],
    ]
    ended = project.call(project.python, "-c", IN_A_ROW, json.dumps(commands))
    outputs = ended.stdout.split("exit code ")
    assert [output[0] for output in outputs[1:]] == ["0", "2", "0", "0"], ended.stderr
    assert "bench" in outputs[0] and "not an empty folder" in ended.stderr
    assert "attention: 3 cases" in outputs[2] and "decoder_nano" in outputs[3]
    assert Path(outputs[4].splitlines()[1]) == bench / "outputs"


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
