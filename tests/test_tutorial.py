"""Commands in docs/tutorial.md and README.md print what the pages show, except measured numbers."""

import doctest
import os
import re
import shlex
import sys

import pytest

from nanolib.paths import checkout
from tests.ab.conftest import Repository
from tests.processes import ended

ROOT = checkout()
BLOCK = re.compile(
    r"^```console\n\$ (?P<command>[^\n]+)\n(?P<output>.*?)^```$", re.MULTILINE | re.DOTALL
)
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
STEP = """
import time

def step():
    time.sleep({seconds})
"""


def _blocks(page):
    """Return command → output, as the page shows it."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return {found["command"]: found["output"] for found in BLOCK.finditer(text)}


def _run(command, folder):
    nano, *arguments = shlex.split(command)
    assert nano == "nano"
    output = {"NANOLIB_OUTPUT": str(folder / "outputs"), "PYTHONPATH": str(ROOT)}
    environment = os.environ | output | {"COLUMNS": "1000"}
    return ended(sys.executable, "-m", "nanolib.cli", *arguments, cwd=folder, env=environment)


def _without_numbers(text):
    """Remove numbers, the indented lines of a conclusion that contain some, and interference."""
    kept = [
        line
        for line in text.splitlines()
        if not (line.startswith("  ") and re.search(r"\d", line))
        and "not a quiet machine" not in line
    ]
    return re.sub(r"[-+]?\d[\d,]*(\.\d+)?(e[-+]?\d+)?|-{5,}", "#", "\n".join(kept)) + "\n"


def _is_shown(wanted, got):
    return doctest.OutputChecker().check_output(wanted, got, FLAGS)


def _differences(wanted, got):
    wanted, got = _without_numbers(wanted), _without_numbers(got)
    return "" if _is_shown(wanted, got) else f"wanted:\n{wanted}\ngot:\n{got}"


@pytest.mark.notebook
@pytest.mark.thorough  # minutes; tests of `nano run` and of recipes use the same commands
@pytest.mark.parametrize(
    ("page", "commands"),
    [("docs/tutorial.md", "run run report run export"), ("README.md", "run plan ab")],
)
def test_each_command_prints_what_the_page_shows(tmp_path, page, commands):
    blocks = _blocks(page)
    assert [command.split()[1] for command in blocks] == commands.split()
    repository = Repository(tmp_path)
    (tmp_path / "mypackage").mkdir()
    step = tmp_path / "mypackage" / "perf.py"
    step.write_text(STEP.format(seconds=0.020))
    repository.commit("old")
    repository.git("checkout", "--quiet", "-B", "main")
    step.write_text(STEP.format(seconds=0.022))
    for command, output in blocks.items():
        run = _run(command, tmp_path)
        assert run.returncode == (" ab " in command), run.stdout + run.stderr
        # a conclusion has numbers
        assert "When does" not in run.stdout or re.search(r"^  .*\d.*\.$", run.stdout, re.MULTILINE)
        if " plan " in command:  # it counts bytes, which are the same on every machine
            assert _is_shown(output, run.stdout), run.stdout
        wrong = _differences(output, run.stdout.replace(str(tmp_path), "."))
        assert not wrong, f"{command}\n{wrong}"
