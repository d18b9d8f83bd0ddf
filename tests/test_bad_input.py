"""Bad input over all commands: one line that names the field, the value and the remedy, exit code 2, nothing written."""

import contextlib
import shutil
import sqlite3

import pytest
from click.testing import CliRunner

from nanolib.cli import main
from nanolib.experiments import attention, sweep
from nanolib.store import Store

# `OUT` is the output folder, `HERE` a folder with files: text.txt, cut.sqlite, foreign.sqlite, newer.sqlite, good.sqlite.
WITHOUT_DATABASE = [
    ("", "Usage"),
    ("nope", "No such command 'nope'"),
    ("run --nope", "No such option '--nope'"),
    ("run quik", "'quik' is neither a suite"),
    ("run quick nothing", "'nothing' is neither a suite"),
    ("run attention -p", "'--output' is no name=value pair"),
    ("run attention -p seq_lens", "'seq_lens' is no name=value pair"),
    ("run attention -p =3", "'=3' is no name=value pair"),
    ("run attention -p seq_len=[8]", "attention.seq_len: unknown name; did you mean seq_lens?"),
    ("run attention -p seq_lens=[0]", "attention.seq_lens: 0 will not do"),
    ("run attention -p seq_lens=[1", "attention.seq_lens[0]: '[1' will not do; give a whole number"),
    (f"run attention -p seq_lens={'[' * 3000}", "attention.seq_lens[0]: "),
    (f"run attention -p seed={'9' * 5000}", "attention.seed: "),
    ("runs --output ~nobody-of-that-name/x", "~nobody-of-that-name/x/results.sqlite does not exist"),
    ("run model -p corpus=~nobody-of-that-name/x", "model.corpus: '~nobody-of-that-name/x' does not exist"),
    ("run attention -p seq_lens=[-5]", "attention.seq_lens: -5 will not do"),
    ("run attention -p kinds=[fast]", "attention.kinds"),
    ("run attention -p dtypes=[int8]", "'int8' is no dtype; use "),
    ("run attention -p device=tpu", "attention.device: 'tpu' is not here; use auto or one of"),
    ("run attention -p budget_s=0", "attention.budget_s: 0 will not do; give a number above 0"),
    ("run attention -p budget_s=nan", "attention.budget_s: 'nan' will not do; give a finite number"),
    ("run attention -p case_timeout_s=-1", "attention.case_timeout_s: -1 will not do; give a number above 0"),
    ("run attention -p isolation=yes", "attention.isolation: 'yes' will not do; use one of 'none' or 'process'"),
    ("run attention -p precision=2", "attention.precision: 2 will not do"),
    ("run attention -p seed=x", "attention.seed: 'x' will not do; give a whole number"),
    ("run model -p presets=[tiny]", "'tiny' is no preset; use "),
    ("run model -p model=mine", "model.model"),
    ("run model -p model=no.such:thing", "there is no module 'no'; install it or start where it lies"),
    ("run model -p model=hf:Nope", "transformers has no model class 'Nope'"),
    ("run model -p overrides={d_modl:8}", "model."),
    ("run warmup -p steps=-1", "warmup.steps: -1 will not do"),
    ("run fp8 -p recipes=[x]", "fp8.recipes: unknown name"),
    ("run energy -p mode=x", "energy.mode: unknown name"),
    ("run distributed -p world_sizes=[0]", "distributed.world_sizes[0]: 0 will not do"),
    ("run distributed -p nodes=2", "distributed.rendezvous: '' is no HOST:PORT"),
    ("run distributed -p forms=[star]", "distributed.forms[0]: 'star' will not do; use one of"),
    ("run quick -p seed=1", "parameters belong to one notebook"),
    ("run --on mars", "'mars' is not one of 'here', 'ray'"),
    ("run --on ray --resume", "--resume: a Ray task brings its results back whole or not at all"),
    ("run --parts 0", "0 is not in the range 1<=x<=1000"),
    ("run --dry-run attention -p seq_lens=[0]", "attention.seq_lens: 0 will not do"),
    ("join", "Missing argument 'HOST:PORT'"),
    ("join 10.0.0.1", "'10.0.0.1' is no HOST:PORT"),
    ("join 10.0.0.1:99999", "is no HOST:PORT"),
    ("join 10.0.0.1:80 --wait 0", "0.0 is not in the range x>0"),
    ("runs", "does not exist; run `nano run quick` first"),
    ("report", "does not exist"),
    ("export HERE/x.json", "does not exist"),
    ("compare latest latest~1", "does not exist"),
    ("compare latest", "Missing argument 'CURRENT'"),
    ("history", "does not exist"),
    ("clean", "neither is given; say which runs to delete"),
    ("clean --older-than 3d", "does not exist"),
    ("merge", "Missing argument 'DATABASE...'"),
    ("merge /nowhere.sqlite", "/nowhere.sqlite does not exist"),
    ("merge HERE/text.txt", "text.txt cannot be opened (file is not a database)"),
    ("merge HERE/foreign.sqlite", "foreign.sqlite is not nanolib's; name another"),
    ("merge HERE/newer.sqlite", "newer than this nanolib's"),
    ("merge HERE/cut.sqlite", "cut.sqlite"),
    ("merge HERE/good.sqlite HERE/text.txt", "text.txt cannot be opened"),
    ("ab one", "Missing argument 'REV_B'"),
    ("ab nowhere . --call json:dumps", "'nowhere' is no commit"),
    ("ab . . --call dumps", "'dumps' names no function; write package.module:function"),
    ("ab . . --call json:dumps --budget soon", "--budget: 'soon' will not do"),
    ("doctor --budget 0", "doctor.budget_s: 0.0 will not do; give a number above 0"),
    ("doctor --budget much", "'much' is not a valid float"),
]
WITH_DATABASE = [
    ("report nowhere --to HERE/report", "'nowhere'"),
    ("report latest~9 --to HERE/report", "'latest~9'"),
    ("report latest~² --to HERE/report", "'latest~²'"),
    ("export HERE/x.pdf", "x.pdf"),
    ("export HERE/none/x.json", "none"),
    ("export HERE/x.json --run nowhere", "'nowhere'"),
    ("compare nowhere latest", "'nowhere'"),
    ("compare latest HERE/text.txt", "text.txt cannot be opened"),
    ("compare latest latest --threshold -1%", "--threshold: '-1%' will not do"),
    ("compare latest latest --threshold lots", "--threshold: 'lots' will not do"),
    ("compare latest latest --chart HERE/x.doc", "x.doc"),
    ("compare latest latest --json HERE/ok.json --markdown HERE/none/x.md", "none is no folder; make it or name"),
    ("ab . . --call json:dumps --json HERE/none/x.json", "none is no folder; make it or name another"),
    ("history nowhere", "no run of nowhere is in the database; it holds attention"),
    ("history --metric speed", "'speed'"),
    ("clean --older-than soon", "--older-than: 'soon' will not do; give days, such as 30d"),
    ("clean --keep -1", "-1 is not in the range x>=0"),
    ("merge HERE/good.sqlite OUT/results.sqlite", "is this database itself; name another"),
    ("merge OUT/results.sqlite", "is this database itself; name another"),
]


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    path = tmp_path_factory.mktemp("good") / "results.sqlite"
    params = attention.Params(
        device="cpu", budget_s=0.01, seq_lens=[16], num_heads=2, kinds=["dense"], backward=False, quality_patterns=[]
    )
    with Store(path) as store:
        sweep.measure(attention, params, store=store, progress=False).finish()
    return path


@pytest.fixture
def here(tmp_path, measured):
    folder = tmp_path / "here"
    folder.mkdir()
    (folder / "text.txt").write_text("no database\n" * 100)
    shutil.copy(measured, folder / "good.sqlite")
    (folder / "cut.sqlite").write_bytes(measured.read_bytes()[:5000])
    for name, statement in (("foreign", "CREATE TABLE t (x)"), ("newer", "PRAGMA user_version = 99")):
        if name == "newer":
            shutil.copy(measured, folder / "newer.sqlite")
        with contextlib.closing(sqlite3.connect(folder / f"{name}.sqlite")) as db:
            db.execute(statement)
            db.commit()
    return folder


def _files(folder):
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not path.name.endswith(("-wal", "-shm"))
    }


def _tell(arguments, tmp_path, here):
    named = [word.replace("HERE", str(here)).replace("OUT", str(tmp_path / "out")) for word in arguments.split()]
    takes_output = named and named[0] not in ("join", "nope") and "--output" not in named
    ended = CliRunner().invoke(main, [*named, *(["--output", str(tmp_path / "out")] if takes_output else [])])
    return ended


@pytest.mark.parametrize(("arguments", "said"), WITHOUT_DATABASE)
def test_it_is_told_in_one_line_and_nothing_is_written(tmp_path, here, arguments, said):
    before = _files(tmp_path)
    ended = _tell(arguments, tmp_path, here)
    assert ended.exit_code == 2, ended.output
    assert said in ended.output, ended.output
    assert "Traceback" not in ended.output and (not arguments or len(ended.output.strip().splitlines()) == 1)
    assert _files(tmp_path) == before and not (tmp_path / "out").exists()


@pytest.mark.parametrize(("arguments", "said"), WITH_DATABASE)
def test_it_is_told_in_one_line_and_the_database_stays_as_it_is(tmp_path, here, measured, arguments, said):
    (tmp_path / "out").mkdir()
    shutil.copy(measured, tmp_path / "out" / "results.sqlite")
    before = _files(tmp_path)
    ended = _tell(arguments, tmp_path, here)
    assert ended.exit_code == 2, ended.output
    assert said in ended.output, ended.output
    assert len(ended.output.strip().splitlines()) == 1 and "Traceback" not in ended.output
    assert _files(tmp_path) == before
