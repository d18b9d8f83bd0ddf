"""What the first minutes on a GPU show is written as it comes, and the page says what was tested on which GPU."""

import json

from tests.gpu import page
from tests.gpu.alone import PartFailed
from tests.gpu.first_minutes import first_minutes
from tests.gpu.parts import PARTS, Check

GPUS_SEEN = {"NVIDIA H200"}  # GPUs on which the tests of `make gpu` passed (docs/gpu.md)


def test_a_part_that_breaks_stops_no_other_and_each_check_is_written_as_it_comes(tmp_path):
    file, written, found = tmp_path / "h100.json", [], {"gpu": "H100"}

    def checks_of(name):
        for holds in (True, None):
            yield Check("the clock is right", "7 ms", holds)
            part = json.loads(file.read_text())["parts"][-1]
            written.append((part["name"], len(part["checks"]), part["broke"]))
        if name == "clock":
            raise PartFailed("stopped after 30 s")
        yield 2.5

    names = ["clock", "identity"]
    assert not first_minutes(found, checks_of, names, file)
    assert written == [(name, count, "it was cut") for name in names for count in (1, 2)]
    clock, identity = found["parts"]
    assert clock["broke"] == "stopped after 30 s" and not identity["broke"]
    assert identity["cpu_s"] == 2.5 and json.loads(file.read_text()) == found
    # what a machine cannot show is no failure, and a part that runs again takes its own place
    assert first_minutes(found, lambda name: [], ["clock"], file)
    wrong = Check("the clock is right", "7 ms", False)
    assert not first_minutes(found, lambda name: [wrong], ["clock"], file)


def test_the_page_of_what_was_seen_is_made_from_the_results():
    assert page.DOCS.read_text() == page.markdown(page.results())
    assert {*page.PATHS} == {*PARTS}
    assert {one["gpu"] for one in page.results()} == GPUS_SEEN
    readme = (page.ROOT / "README.md").read_text()
    assert all(gpu in readme for gpu in GPUS_SEEN)
