"""What is not installed is said in one line, with the part that goes without it."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from torch import nn

from nanolib import installed
from nanolib.cli import main
from nanolib.measurement import Unsupported
from nanolib.models import fp8

ROOT = Path(__file__).parents[1]


def _hide(monkeypatch, *absent):
    known = installed.find_spec
    monkeypatch.setattr(
        installed, "find_spec", lambda name: None if name in absent else known(name)
    )


@pytest.mark.parametrize(
    ("absent", "more", "said"),
    [
        (("ruptures",), [], "ruptures (needed for everything); nothing was run"),
        (
            ("papermill", "nbclient"),
            [],
            "papermill, nbclient (needed for notebooks); nothing was run",
        ),
        (("altair",), [], "altair (needed for reports); nothing was run"),
        (("papermill",), ["--dry-run"], "papermill (needed for notebooks); nothing was run"),
    ],
)
def test_nano_run_ends_with_one_line_where_a_package_that_it_needs_is_missing(
    monkeypatch, absent, more, said
):
    _hide(monkeypatch, *absent)
    ended = CliRunner().invoke(main, ["run", "quick", *more])
    assert (
        ended.exit_code == 2
        and f"nano: not installed: {said}" in ended.output
        and len(ended.output.splitlines()) == 1
    )


def test_nano_run_goes_on_without_a_part_and_says_so_first(monkeypatch, tmp_path):
    _hide(monkeypatch, "torchao")
    asked = ["run", "quick", "warmup", "--dry-run", "--output", str(tmp_path)]
    ended = CliRunner().invoke(main, asked)
    first = ended.output.splitlines()[0]
    assert ended.exit_code == 0 and first.startswith(
        "not installed: torchao (needed for FP8); other parts of nanolib work"
    )


def test_without_torchao_8_bits_are_unsupported_and_no_error(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "torchao.float8", None)
    monkeypatch.setattr(fp8, "native", lambda device: "")
    with pytest.raises(Unsupported, match="torchao is not installed"):
        fp8.convert(
            nn.Sequential(nn.Linear(32, 32)).to(torch.bfloat16),
            "tensorwise",
            excluded_modules=(),
            emulate=False,
        )


def test_a_machine_without_nvidias_package_measures():
    code = "import sys; sys.modules['pynvml'] = None; import nanolib.run.sweep"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
