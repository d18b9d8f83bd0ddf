"""The commands of docs/tutorial.md print its output, except for figures and their conclusions."""

import doctest
import os
import re
import shlex
import subprocess
import sys

import pytest

from nanolib.paths import checkout

PAGE = checkout() / "docs" / "tutorial.md"
BLOCK = re.compile(
    r"^```console\n\$ (?P<command>[^\n]+)\n(?P<output>.*?)^```$", re.MULTILINE | re.DOTALL
)
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def _without_figures(text):
    """What does not rest on what was measured: neither figures nor the indented lines of an answer that hold some."""
    kept = [
        line for line in text.splitlines() if not (line.startswith("  ") and re.search(r"\d", line))
    ]
    return re.sub(r"[-+]?\d[\d,]*(\.\d+)?(e[-+]?\d+)?|-{5,}", "#", "\n".join(kept)) + "\n"


def _differences(wanted, got):
    wanted, got = _without_figures(wanted), _without_figures(got)
    return (
        ""
        if doctest.OutputChecker().check_output(wanted, got, FLAGS)
        else f"wanted:\n{wanted}\ngot:\n{got}"
    )


@pytest.mark.notebook
@pytest.mark.thorough  # two minutes; tests of `nano run` and of recipes use the same commands
def test_each_command_prints_what_the_tutorial_shows(tmp_path):
    blocks = [
        (found["command"], found["output"])
        for found in BLOCK.finditer(PAGE.read_text(encoding="utf-8"))
    ]
    assert len(blocks) == 5 and all(output.strip() for _, output in blocks)
    for command, output in blocks:
        nano, *arguments = shlex.split(command)
        assert nano == "nano"
        run = subprocess.run(
            [sys.executable, "-m", "nanolib.cli", *arguments],
            cwd=tmp_path,
            env=os.environ
            | {
                "NANOLIB_OUTPUT": str(tmp_path / "outputs"),
                "PYTHONPATH": str(checkout()),
                "COLUMNS": "1000",
            },
            capture_output=True,
            text=True,
            check=False,
            timeout=600,
        )
        assert run.returncode == 0, run.stdout + run.stderr
        # an answer with figures
        assert "When does" not in run.stdout or re.search(r"^  .*\d.*\.$", run.stdout, re.MULTILINE)
        assert not (wrong := _differences(output, run.stdout.replace(str(tmp_path), "."))), (
            f"{command}\n{wrong}"
        )
    assert (tmp_path / "service-report" / "index.html").exists() and (
        tmp_path / "service.sqlite"
    ).exists()
