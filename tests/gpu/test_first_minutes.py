"""What the first minutes on a GPU show is written as it comes."""

import json
import sys

import pytest
import torch

from nanolib.paths import checkout
from nanolib.run.process import Died
from tests.gpu.first_minutes import first_minutes
from tests.gpu.parts import PARTS, Check
from tests.processes import ended

RIGHT = Check("the clock is right", "7 ms", True)
DONE = {"broke": ""}


def test_a_part_that_breaks_stops_no_other_and_each_check_is_written_as_it_comes(tmp_path):
    file, written, found = tmp_path / "h100.json", [], {"gpu": "H100"}

    def checks_of(name):
        for holds in (True, None):
            yield RIGHT._replace(holds=holds)
            part = json.loads(file.read_text())["parts"][-1]
            written.append((part["name"], len(part["checks"]), part["broke"]))
        if name == "clock":
            raise Died("the process was killed by SIGSEGV")
        if name == "identity":
            yield DONE

    names = ["clock", "energy", "identity"]
    assert not first_minutes(found, checks_of, names, file)
    assert written == [(name, count, "it was cut") for name in names for count in (1, 2)]
    ends = [part["broke"] for part in found["parts"]]
    assert ends == ["the process was killed by SIGSEGV", "it was cut", ""]
    assert json.loads(file.read_text()) == found
    # what a machine cannot show is no failure, and a part that runs again takes its own place
    assert first_minutes(found, lambda name: [DONE], names[:2], file)
    wrong = RIGHT._replace(holds=False)
    assert not first_minutes(found, lambda name: [wrong, DONE], ["clock"], file)


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="here is one")
def test_without_a_gpu_it_says_what_it_would_do():
    done = ended(sys.executable, "-m", "tests.gpu.first_minutes", cwd=checkout())
    assert done.returncode == 2 and "torch sees no NVIDIA GPU here" in done.stderr
    assert all(f"  {name}: " in done.stderr for name in PARTS)
