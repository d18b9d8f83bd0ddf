"""What libraries say of themselves does not reach whoever runs nanolib, unless it is asked for."""

import sys

import pytest

from tests.processes import ended

_CONVERT = """
import sys
import torch
import nanolib.run.sweep
from nanolib.models import fp8
model = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Linear(32, 32)).bfloat16()
fp8._convert_with_torchao(model, "tensorwise", ["0"], emulate=True)
from nanolib.meters.operations import write_trace
from pathlib import Path
write_trace(lambda: torch.ones(3) + 1, Path(sys.argv[1]) / "trace.json")
"""


@pytest.mark.slow
def test_fp8_and_the_profiler_print_nothing(tmp_path):
    done = ended(sys.executable, "-c", _CONVERT, str(tmp_path))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
