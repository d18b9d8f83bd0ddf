"""SIGKILL of whoever started processes of nanolib's: nothing that it started lives on."""

import os
import re
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from tests.processes import said

ROOT = Path(__file__).parents[2]
COMES_UP_S, ENDS_S = 60, 5

# Module that starts processes → code that has it start some, and what tells each of them.
STARTERS = {
    "run/worker.py": (
        """
        from nanolib.run import sweep
        from nanolib.store import Store
        from tests.run import sample_experiment as sample
        params = sample.Params(behaviours=["slow"], isolation="process")
        sweep.measure(sample, params, store=Store("results.sqlite"), progress=False)
        """,
        {"nanolib.run.worker": 1},
    ),
    "run/helper.py": (
        """
        from nanolib.experiments.model.look import look_at_code
        look_at_code("endless:build", [])
        """,
        {"nanolib.run.helper": 1},
    ),
    "run/ranks/launcher.py": (
        """
        from nanolib.run.ranks.ranks import run_ranks
        from tests.run.rank_bodies import spin
        run_ranks(spin, {}, world_size=2, device="cpu", timeout_s=600)
        """,
        {"nanolib.run.ranks.launcher": 1, "nano rank": 2},
    ),
    "run/suite/warm_kernel.py": (
        """
        from nanolib.run.suite.warm_kernel import WarmKernel
        kernel = WarmKernel(Path("results"))
        time.sleep(600)
        """,
        {"nanolib.run.suite.warm_kernel": 1, "ipykernel_launcher": 1},
    ),
    "ab/fork_server.py": (
        """
        from nanolib.ab.fork_server import ForkServer
        ForkServer(600).imports(["endless_import"])
        """,
        {"--forks": 1},
    ),
    "ab/client.py": (
        """
        from nanolib.ab.client import VersionProcess
        from nanolib.ab.fork_server import ForkServer
        from nanolib.ab.worktree import Version
        version, forks = Version(".", "", Path.cwd(), Path(".")), ForkServer(600)
        forks.imports(["json"])
        sides = [VersionProcess(version, 600), VersionProcess(version, 600, forks)]  # one that nobody holds ends
        for side in sides:
            side.send(do="function", function="endless:run", setup="", rows=False)
            side.receive()
        side._stop()  # as while the other side computes
        time.sleep(600)
        """,
        {"server.py": 3},
    ),
}
_ENDLESS = "import time\ndef build():\n    time.sleep(600)\nrun = build\n"


def test_every_module_that_starts_processes_is_among_them():
    package = ROOT / "nanolib"
    starts = re.compile(r"\bPopen\(|subprocess\.run\(\s*command\(|(?<![\w.])start\(\s*(?:command\(|\[[\w.]+, \*SERVER)")
    found = {str(file.relative_to(package)) for file in package.rglob("*.py") if starts.search(file.read_text())}
    assert found - {"run/process.py"} == set(STARTERS)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a parent is looked for")
@pytest.mark.parametrize("module", STARTERS)
def test_nothing_lives_on_when_who_started_it_is_killed(tmp_path, module):
    code, expected = STARTERS[module]
    (tmp_path / "endless.py").write_text(_ENDLESS)
    (tmp_path / "endless_import.py").write_text("import time\ntime.sleep(600)\n")
    code = "import time\nfrom pathlib import Path\n" + textwrap.dedent(code)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(tmp_path)]), "TMPDIR": str(tmp_path)}
    starter = psutil.Popen([sys.executable, "-c", code], cwd=tmp_path, env=environment)
    try:
        below = _up(starter, expected)
    finally:
        starter.kill()
    _, alive = psutil.wait_procs(below, timeout=ENDS_S)
    for process in alive:
        process.kill()
    assert not alive


def _up(starter, expected):
    """All processes below it, as soon as those that are expected are there."""
    end = time.monotonic() + COMES_UP_S
    while time.monotonic() < end and starter.is_running():
        below = starter.children(recursive=True)
        told = [said(process) for process in below]
        if all(sum(word in each for each in told) >= count for word, count in expected.items()):
            return below
        time.sleep(0.05)
    raise AssertionError(f"they did not come up: {[said(process) for process in starter.children(recursive=True)]}")
