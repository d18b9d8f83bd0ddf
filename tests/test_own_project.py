"""A project that is neither nanolib nor a checkout of it, with nanolib installed from a built wheel."""

import json
import os
import site
import subprocess
import sys
import venv
from pathlib import Path

import pytest
import yaml

from nanolib.store import Store
from tests.ab.conftest import Repository
from tests.working_tree import copied

pytestmark = pytest.mark.slow

# Where versions are compared, the project's clock says what a call cost, so that no test times anything.
STEP = """
import os
import time

cost = {cost}
now = 0

def step(size=1):
    global now
    now += cost * size
    return size

if "OWN_CLOCK" in os.environ:
    time.perf_counter_ns = lambda: now
"""
TESTS = """
import pytest
from mine import step

@pytest.mark.parametrize("size", [1, 2])
def test_step(nano, size):
    assert nano(step, size) == size

def test_without():
    pass
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
        (self.folder / "mine" / "__init__.py").write_text("from mine.step import step\n")
        (self.folder / "mine" / "step.py").write_text(STEP.replace("{cost}", str(cost)))
        (self.folder / "perf").mkdir(exist_ok=True)
        (self.folder / "perf" / "test_step.py").write_text(TESTS)
        (self.folder / "pyproject.toml").write_text("[tool.pytest.ini_options]\npythonpath = ['.']\n")
        self.repository.git("add", "-A")
        self.repository.git("commit", "--quiet", "--allow-empty", "-m", tag)
        self.repository.git("tag", tag)

    def call(self, *command, **variables):
        keep = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "NANOLIB_OUTPUT")}
        path = f"{Path(self.python).parent}{os.pathsep}{keep['PATH']}"
        environment = keep | {"PATH": path, "COLUMNS": "200"} | variables
        return subprocess.run(
            command, cwd=self.folder, env=environment, capture_output=True, text=True, timeout=300, check=False
        )

    def nano(self, *arguments):
        return self.call(self.python, "-m", "nanolib.cli", *arguments, OWN_CLOCK="1")


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """An interpreter that has nanolib from a wheel, and what it needs from behind."""
    folder = tmp_path_factory.mktemp("installed")
    source = copied(folder / "source")
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    built = [*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), str(source)]
    subprocess.run(built, check=True, timeout=300, capture_output=True)
    venv.create(folder / "venv", symlinks=True)
    made = folder / "venv" / "bin" / "python"
    (own,) = (folder / "venv").glob("lib/python*/site-packages")
    (own / "behind.pth").write_text("".join(f"{place}\n" for place in site.getsitepackages()))
    (wheel,) = folder.glob("nanolib-*.whl")
    install = [*pip, "--python", str(made), "install", "--no-deps", "--no-index", "--force-reinstall", str(wheel)]
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


def test_without_the_option_nothing_is_timed(project):
    ended = project.call(project.python, "-m", "pytest", "-q", "perf")
    assert ended.returncode == 0 and "3 passed" in ended.stdout, ended.stdout
    assert "nanolib" not in ended.stdout and not (project.folder / "outputs").exists()


def test_with_it_each_test_is_a_case_whose_parameters_are_factors(project):
    ended = project.call(project.python, "-m", "pytest", "-q", "perf", "-k", "step", "--nano", "--nano-label", "mine")
    assert ended.returncode == 0 and "perf/test_step.py::test_step[2]: latency: " in ended.stdout, ended.stdout
    with Store(project.folder / "outputs" / "results.sqlite") as store:
        (run,) = store.runs().to_dict("records")
        rows = store.measurements([run["run_id"]], samples=True)
    assert (run["experiment"], run["label"], run["status"], run["cases"]) == ("pytest", "mine", "done", 2)
    assert run["git_revision"] == project.repository.git("rev-parse", "--short", "HEAD").strip()
    latencies = rows[rows["metric"] == "latency"]
    assert [factors["size"] for factors in latencies["factors"]] == [1, 2]
    assert (latencies["estimate"] > 0).all() and all(map(len, latencies["samples"]))
    project.call(project.python, "-m", "pytest", "-q", "perf", "--nano")
    compared = project.nano("compare", "latest~1", "latest", "--all")
    assert compared.returncode in (0, 1) and "test_step[2]" in compared.stdout, compared.stdout + compared.stderr


@pytest.mark.parametrize(
    ("cost", "code", "finding"),
    [(23_000_000, 1, "regressed"), pytest.param(20_000_000, 0, "equivalent", marks=pytest.mark.thorough)],
)
def test_two_versions_of_a_test_side_by_side(project, cost, code, finding):
    project.commit("now", cost)
    ended = project.nano("ab", "base", ".", "--pytest", "perf -k 'step and 2'", "--json", "f.json", "--budget", "6s")
    assert ended.returncode == code, ended.stdout + ended.stderr
    (line,) = json.loads((project.folder / "f.json").read_text())["lines"]
    assert (line["finding"], line["case"]) == (finding, "perf/test_step.py::test_step[2]")
    assert line["ratio"] == pytest.approx(cost / 20_000_000)


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
    given = defaults | {"base": "base", "pytest": "perf", "comment": "true", "total": "6s"} | settings
    named = {name: value.removeprefix("${{ inputs.").removesuffix(" }}") for name, value in gate["env"].items()}
    filled = {name: given.get(value, "7") for name, value in named.items()}  # what is no input is the pull request
    path = f"{tmp_path / 'bin'}{os.pathsep}{Path(project.python).parent}{os.pathsep}{os.environ['PATH']}"
    script = gate["run"].replace("${{ github.action_path }}", str(ACTION))
    more = {"GITHUB_REPOSITORY": "me/mine", "GITHUB_STEP_SUMMARY": str(tmp_path / "summary.md"), "PATH": path}
    return project.call("bash", "-c", script, OWN_CLOCK="1", **filled, **more, GITHUB_OUTPUT=str(tmp_path / "output"))


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
    assert (tmp_path / "asked").read_text().split("\n")[:-1] == ["-m", "pip", "install", "-e", ".", "-e", "/an action"]


def test_the_action_fails_on_a_regression_and_writes_a_comment(project, tmp_path):
    project.commit("now", 23_000_000)
    ended = _gate(project, tmp_path, pytest="perf/test_step.py::test_step[1]")
    assert ended.returncode == 1, ended.stdout + ended.stderr
    summary = (tmp_path / "summary.md").read_text()
    assert "### Slower" in summary and "| regressed | pytest | perf/test" in summary
    assert _written(project) == [["POST", "repos/me/mine/issues/7/comments"]]
    findings = Path((tmp_path / "output").read_text().splitlines()[0].removeprefix("findings="))
    assert json.loads(findings.read_text())["regressed"]


@pytest.mark.thorough
@pytest.mark.parametrize("parts", [2, 3])  # of three one has no case
def test_the_action_passes_without_one_in_each_part_and_updates_its_comment(project, tmp_path, parts):
    (project.folder / "ids").write_text("77\n")
    for part in range(1, parts + 1):
        ended = _gate(project, tmp_path, shard=f"{part}/{parts}")
        assert ended.returncode == 0, ended.stdout + ended.stderr
    summary = (tmp_path / "summary.md").read_text()
    assert all(f"No regression (part {part}/{parts})" in summary for part in range(1, parts + 1))
    assert summary.count("| equivalent |") == 2
    assert _written(project) == [["PATCH", "repos/me/mine/issues/comments/77"]] * parts


def _written(project):
    """How comments were written, and where."""
    calls = (project.folder / "gh.log").read_text().splitlines()
    return [call.split("--method ")[1].split()[:2] for call in calls if "--method" in call]


def test_a_comment_that_cannot_be_written_changes_no_finding(project, tmp_path):
    (project.folder / "ids").write_text("broken")
    ended = _gate(project, tmp_path, shard="3/3")
    assert ended.returncode == 0 and "the comment could not be written" in ended.stderr, ended.stderr
    assert "No regression" in (tmp_path / "summary.md").read_text()


def test_the_action_tells_bad_input_and_writes_no_comment(project, tmp_path):
    ended = _gate(project, tmp_path, pytest="nowhere")
    assert ended.returncode == 2 and "collects no test that takes the fixture nano" in ended.stderr
    assert not (project.folder / "gh.log").exists() and not (tmp_path / "summary.md").exists()


BAD = [
    (["--pytest", "perf -k without"], "base: --pytest: 'perf -k without' collects no test that takes the fixture nano"),
    (["--pytest", "perf --nowhere"], "(pytest does not take these arguments)"),
]


@pytest.mark.parametrize(("options", "said"), BAD)
def test_tests_that_cannot_be_collected_are_told_in_one_line(project, options, said):
    ended = project.nano("ab", "base", ".", *options)
    assert ended.returncode == 2 and said in ended.stderr, ended.stderr
    assert len(ended.stderr.strip().splitlines()) == 1
    assert not (project.folder / "outputs").exists()


@pytest.mark.thorough  # bad input has a line each
def test_a_test_that_breaks_or_cannot_be_collected_is_told(project):
    file = project.folder / "mine" / "step.py"
    text = file.read_text()
    file.write_text(text.replace("    return size", "    assert size < 2, 'too large'\n    return size"))
    ended = project.nano("ab", "base", ".", "--pytest", "perf", "--json", "f.json", "--budget", "4s")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found = {line["case"]: line for line in json.loads((project.folder / "f.json").read_text())["lines"]}
    broke = found["perf/test_step.py::test_step[2]"]
    assert broke["finding"] == "broke" and "AssertionError: too large" in broke["message"]
    file.write_text(text + "\nraise ImportError('gone')\n")
    ended = project.nano("ab", "base", ".", "--pytest", "perf")
    assert ended.returncode == 2 and ".: --pytest: 'perf' collects no test" in ended.stderr and "gone" in ended.stderr


def test_the_plugin_refuses_what_it_cannot_do_and_keeps_what_it_has(project):
    test = lambda *options: project.call(project.python, "-m", "pytest", "-q", "perf", "--nano", *options)  # noqa: E731
    ended = test("-n", "2")
    assert ended.returncode == 4 and "--nano: tests are timed one at a time; leave out -n" in ended.stderr
    ended = test("--nano-rel-ci", "7")
    assert ended.returncode == 4 and "--nano-rel-ci: 7.0" in ended.stderr, ended.stderr
    ended = test("--nano-output", "/dev/null/x")
    assert ended.returncode == 4 and "output: /dev/null/x cannot be made" in ended.stderr, ended.stderr
    (project.folder / "perf" / "test_later.py").write_text(
        "async def co():\n    pass\n\ndef test_later(nano):\n    nano(co)\n"
    )
    ended = test("-k", "later")
    assert ended.returncode == 1 and "nano: a call only begins the work and returns a coroutine" in ended.stdout
    (project.folder / "perf" / "test_later.py").unlink()
    file = project.folder / "mine" / "step.py"
    later = "\ncalls = 0\nfirst = step\ndef step(size=1):\n    global calls\n    calls += 1\n    assert calls < 300, 'worn out'\n"
    file.write_text(file.read_text() + later + "    return first(size)\n")
    ended = test()
    assert ended.returncode == 1 and "nano: error: AssertionError: worn out" in ended.stdout, ended.stdout
    with Store(project.folder / "outputs" / "results.sqlite") as store:
        rows = store.measurements()
    assert list(rows["status"]) == ["error"] * len(rows) and len(rows) >= 1
