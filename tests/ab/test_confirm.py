import dataclasses

import pytest
from click.testing import CliRunner

from nanolib.cli import main
from nanolib.experiments.attention.cases import Params, cases
from nanolib.measurement import Measurement
from nanolib.meters.machine import this_machine
from nanolib.meters.time.latency import summarise
from nanolib.store import Run, Store
from tests.working_tree import copied

from .conftest import Repository

pytestmark = pytest.mark.slow

PARAMS = Params(seq_lens=[32], num_heads=1, attention_types=["dense"], backward=False)
SLOWER = """
import time as _time
_quick = _call
def _call(*a, **k):
    end = _time.perf_counter() + 0.005
    while _time.perf_counter() < end: pass
    return _quick(*a, **k)
"""


def _filled(folder, revisions, levels):
    """A database in which the case took so long at these revisions."""
    (case,) = [case for case in cases(PARAMS) if case.interleaves]
    with Store(folder / "results.sqlite") as store:
        for index, (revision, level) in enumerate(zip(revisions, levels, strict=True)):
            times = [level * (1 + 0.001 * ((i + index) % 7)) for i in range(40)]
            rows = {case.case_id: (case.factors, [Measurement("case_time", 1.0), summarise(times, scope="forward")])}
            run = Run("attention", this_machine().to_dict(), PARAMS.model_dump(mode="json"), rows=rows)
            store.add(dataclasses.replace(run, git_revision=revision))
    return folder


def _confirmed(folder, *more):
    ended = CliRunner().invoke(main, ["history", "--confirm", "--budget", "4s", "--output", str(folder), *more])
    assert not ended.exception or isinstance(ended.exception, SystemExit), ended.output
    return ended


@pytest.mark.notebook
def test_a_step_is_measured_again_in_the_revisions_around_it(tmp_path, monkeypatch):
    (tmp_path / "checkout").mkdir()
    repository = Repository(copied(tmp_path / "checkout"))
    repository.git("add", "-A")
    repository.git("commit", "--quiet", "-m", "a")
    place = repository.folder / "nanolib" / "models" / "attention" / "dense.py"
    place.write_text(place.read_text() + SLOWER)
    repository.git("commit", "--quiet", "-am", "b")
    a, b = repository.git("log", "--reverse", "--format=%h").split()
    monkeypatch.chdir(repository.folder)
    ended = _confirmed(_filled(tmp_path / "real", [a] * 4 + [b], [1.0] * 4 + [1.3]))
    assert ended.exit_code == 1 and "regressed +" in ended.output, ended.output
    with Store(tmp_path / "real" / "results.sqlite") as store:
        assert list(store.runs()["experiment"]) == ["attention"] * 5 + ["ab"]


@pytest.mark.parametrize(
    ("revisions", "said"),
    [
        (["a"] * 5, "both runs are of one revision"),
        (["a"] * 4 + ["b+"], "b+ was not committed"),
        (["a"] * 4 + [""], "the revision was not committed"),
        (["0000000"] * 4 + ["1111111"], "'0000000' is no commit"),
    ],
)
def test_what_cannot_be_measured_again_says_why(tmp_path, revisions, said):
    ended = _confirmed(_filled(tmp_path / "out", revisions, [1.0] * 4 + [1.3]))
    assert ended.exit_code == 0 and said in " ".join(ended.output.split()), ended.output
