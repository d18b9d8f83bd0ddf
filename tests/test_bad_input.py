"""Bad input over all commands: one line that names the field, the value and the remedy, exit code 2, nothing written."""

import contextlib
import os
import shlex
import shutil
import sqlite3

import pytest
from click.testing import CliRunner

from nanolib.cli import main
from nanolib.experiments.attention import cases as attention
from nanolib.run import sweep
from nanolib.store import Store

# `OUT` is the output folder, `HERE` a folder with files: text.txt, cut.sqlite, foreign.sqlite, newer.sqlite, good.sqlite.
WITHOUT_DATABASE = [
    ("", "Usage"),
    ("nope", "No such command 'nope'"),
    ("run --nope", "No such option '--nope'"),
    ("run quik", "'quik' is neither a suite (full, quick) nor a notebook of quick (attention, "),
    ("run atention", "; did you mean attention?"),
    ("open", "index.html is not there; run nano run, or nano report"),
    ("run quick nothing", "'nothing' is neither a suite"),
    ("run attention -p", "'--output' is no name=value pair"),
    ("run attention -p seq_lens", "'seq_lens' is no name=value pair"),
    ("run attention -p =3", "'=3' is no name=value pair"),
    ("run attention -p seq_len=[8]", "attention.seq_len: unknown name; did you mean seq_lens?"),
    ("run attention -p seq_lens=[0]", "attention.seq_lens: 0 will not do"),
    ("run attention -p seq_lens=[1", "attention.seq_lens: '[1' has not as many [ as ]; close each"),
    (f"run attention -p seq_lens={'[' * 3000}", "attention.seq_lens: "),
    (f"run attention -p seed={'9' * 5000}", "attention.seed: "),
    ("runs --output ~nobody-of-that-name/x", "~nobody-of-that-name/x/results.sqlite does not exist"),
    ("run model -p corpus=~nobody-of-that-name/x", "model.corpus: '~nobody-of-that-name/x' does not exist"),
    ("run attention -p seq_lens=[-5]", "attention.seq_lens: -5 will not do"),
    ("run attention -p attention_types=[fast]", "attention.attention_types"),
    ("run attention -p dtypes=[int8]", "'int8' is no dtype; use "),
    ("run attention -p device=tpu", "attention.device: 'tpu' is not here; use auto or one of"),
    ("run attention -p budget_s=0", "attention.budget_s: 0 will not do; give a number above 0"),
    ("run attention -p budget_s=nan", "attention.budget_s: 'nan' will not do; give a finite number"),
    ("run attention -p case_timeout_s=-1", "attention.case_timeout_s: -1 will not do; give a number above 0"),
    ("run attention -p isolation=yes", "attention.isolation: 'yes' will not do; use one of 'none' or 'process'"),
    ("run attention -p rel_ci=2", "attention.rel_ci: 2 will not do"),
    ("run attention -p seed=x", "attention.seed: 'x' will not do; give a whole number"),
    ("run model -p presets=[tiny]", "'tiny' is no preset; use "),
    ("run model -p presets=[decoder-tiny]", "'decoder-tiny' is no preset; did you mean decoder_tiny? use "),
    ("run model -p model=mine", "model.model"),
    ("run model -p model=no.such:thing", "there is no module 'no'; install it or start in its folder"),
    ("run model -p model=hf:Nope", "transformers has no model class 'Nope'"),
    ("run model -p overrides={d_modl:8}", "model."),
    ("run warmup -p steps=-1", "warmup.steps: -1 will not do"),
    ("run fp8 -p recipes=[x]", "fp8.recipes: unknown name"),
    ("run energy -p mode=x", "energy.mode: unknown name"),
    ("run distributed -p world_sizes=[0]", "distributed.world_sizes[0]: 0 will not do"),
    ("run distributed -p nodes=2", "distributed.rendezvous: '' is no HOST:PORT"),
    ("run distributed -p algorithms=[star]", "distributed.algorithms[0]: 'star' will not do; use one of"),
    ("run quick -p seed=1", "parameters belong to one notebook"),
    ("run attention -p 'attention_types=[{a: 1}]'", "attention.attention_types: {'a': 1} names no kind; give kind"),
    (
        "run attention -p 'attention_types=[{kind: {a: 1}}]'",
        "attention.attention_types: attention_type: {'a': 1} is no attention kind",
    ),
    (
        "run attention -p attention_types=[[dense]]",
        "attention.attention_types[0]: ['dense'] will not do; give a mapping",
    ),
    ("run attention -p 'attention_types=[{kind: dense, kind: sparse}]'", "'kind' is given twice; leave one out"),
    (
        "run attention -p 'attention_types=[{1: dense}]'",
        "attention.attention_types: {1: 'dense'} will not do; give names as keys, not 1",
    ),
    (
        "run attention -p 'attention_types=[{kind: sparse, window: 99999999999999999999}]'",
        "attention.attention_types: 99999999999999999999",
    ),
    (
        "run attention -p 'attention_types=[{kind: sparse, window: 999999999999}]'",
        "attention_options.window: 999999999999 will",
    ),
    (
        "run attention -p 'attention_types=[{kind: dense, backend: .nan}]'",
        "attention.attention_types: nan will not do; give a finite",
    ),
    (f"run attention -p seq_lens={'[' * 40}1{']' * 40}", "attention.seq_lens[0]: "),
    (f"run attention -p seq_lens=[{','.join(map(str, range(1, 200)))}]", "attention.seq_lens: "),
    ("run attention -p seq_lens=[8,8]", "attention.seq_lens: 8 is given twice; leave one out"),
    ("run attention -p seq_lens=null", "attention.seq_lens: None will not do; give a list"),
    ("run attention -p 'seq_lens={a: 1}'", "attention.seq_lens: {'a': 1} will not do; give a list"),
    ("run attention -p seq_lens=[[8]]", "attention.seq_lens[0]: [8] will not do; give a whole number"),
    ("run attention -p seq_lens=[true]", "attention.seq_lens: [True] is true or false where something else belongs"),
    (f"run attention -p seed=1 -p dtypes=[{'x' * 9000}]", "xxx' is no dtype; use float32"),
    ("run attention -p seed=1 -p seed=2", "-p: 'seed' is given twice; give it once"),
    ("run attention -p budget_s=1e400", "attention.budget_s: '1e400' will not do; give a finite number"),
    ("run attention -p budget_s=.inf", "attention.budget_s: inf will not do; give a finite number"),
    ("run attention -p head_dim=-64", "attention.head_dim: -64 will not do; give a number above 0"),
    ("run attention -p device=", "attention.device: '' is not here"),
    ("run attention -p quality_patterns=[spiral]", "attention.quality_patterns: 'spiral' is no pattern; use window"),
    (
        f"run attention -p seq_lens={list(range(1, 65))} -p batch_sizes={list(range(1, 66))}".replace(", ", ","),
        "64 val",
    ),
    ("run attention attention", "run: 'attention' is named twice; name it once"),
    ("run quick quick", "run: 'quick' is named twice; name it once"),
    ("run distributed-memory distributed-memory", "run: 'distributed-memory' is named twice"),
    (f"run attention --label {'x' * 10_000}", "xxx' will not do; give at most 200 characters"),
    (
        "run attention --label 01234567-89ab-cdef-0123-456789abcdef",
        "label: '01234567-89ab-cdef-0123-456789abcdef' names runs already; choose another",
    ),
    ("run attention --label latest~1", "label: 'latest~1' names runs already; choose another"),
    ("run attention --label newest", "label: 'newest' names runs already; choose another"),
    ("run attention --label 'a\nb'", r"attention.label: 'a\nb' will not do; leave out the unprintable character '\n'"),
    ("run attention --label a\0b", r"leave out the unprintable character '\x00'"),
    ("run attention --label a\x1b[31mb", r"leave out the unprintable character '\x1b'"),
    ("run attention --output HERE/text.txt", "text.txt is no folder; name another"),
    ("run model -p model=a..b:c", "model.model: 'a..b:c' names no function"),
    ("run model -p 'model=no such:thing'", "model.model: 'no such:thing' names no function"),
    ("run model -p 'model_options={a: 1}'", "model.model_options: there is no model to take them"),
    ("run model -p model=hf:", "transformers has no model class ''"),
    ("run model -p model=hf:AutoModel", "transformers has no model class 'AutoModel'"),
    ("run model -p model=hf:GPT2LMHeadModel -p 'model_options={n_lyer: 2}'", "'n_lyer' is no field of GPT2Config; did"),
    ("run model -p model=hf:GPT2LMHeadModel -p 'model_options={n_embd: x}'", "does not take {'n_embd': 'x'}"),
    ("run model -p model=hf:GPT2LMHeadModel -p 'model_options={vocab_size: 99}'", "vocab_size 99 cannot hold the 256"),
    (
        "run model -p model=hf:GPT2LMHeadModel -p 'model_options={n_positions: 8}'",
        "exceeds the max_position_embeddings 8",
    ),
    (
        "run model -p model=hf:GPT2LMHeadModel -p 'model_options={attn_implementation: a/b}'",
        "'a/b' asks for a download",
    ),
    ("run model -p model=hf:GPT2LMHeadModel -p 'model_options={trust_remote_code: 1}'", "is no field of GPT2Config"),
    ("run model -p model=hf:T5ForConditionalGeneration", "reads two sequences"),
    ("run model -p seq_lens=[99999999]", "model.seq_lens[0]: 99999999 will not do; give 16777216 or less"),
    ("run model -p 'overrides={num_layers: 999999}'", "config.num_layers: 999999 will not do"),
    ("run model -p 'overrides={attention_options: {windo: 3}}'", "attention_options.windo: no attention kind takes it"),
    (
        "run model -p 'overrides={d_model: 64, d_model: 32}'",
        "'d_model' is given twice; leave one out",
    ),
    ("run model -p corpus=HERE/empty.txt", "empty.txt' holds 0 bytes; give a text of at least two"),
    (f"run model -p corpus={'x' * 4000}", "xxx' cannot be read (File name too long)"),
    ("run warmup -p seq_len=[64]", "warmup.seq_len: [64] will not do; give a whole number"),
    ("run warmup -p preset=[decoder_tiny]", "warmup.preset: '[decoder_tiny]' is no preset"),
    ("run energy -p phases=[prefill,prefill]", "energy.phases: 'prefill' is given twice"),
    ("run energy -p idle_s=-1", "energy.idle_s: -1 will not do; give 0.1 or more"),
    ("run fp8 -p shapes=[[16,16,17]]", "fp8.shapes: [16, 16, 17]: 17 is no multiple of 16"),
    ("run fp8 -p 'overrides={dtype: float32}'", "fp8.overrides: dtype is chosen by precisions; leave it out"),
    ("run distributed -p 'overrides={d_model: 8}'", "distributed.overrides: there is no preset to change"),
    ("run distributed -p rendezvous=here", "distributed.rendezvous: 'here' is no HOST:PORT"),
    ("run summary -p database=HERE/none.sqlite", "none.sqlite' is no file; name a database"),
    ("run summary -p runs=[[latest]]", "summary.runs[0]: ['latest'] will not do; give text"),
    ("ab HERE/date.yml HERE/date.yml attention", "'2024-13-45' cannot be read (month must be in 1..12); put quotes"),
    ("ab HERE/twice.yml HERE/twice.yml attention", "twice.yml: 'seed' is given twice; leave one out"),
    ("ab HERE/laughs.yml HERE/laughs.yml attention", "laughs.yml: give at most 10000 values in 32 levels"),
    ("ab HERE/itself.yml HERE/itself.yml attention", "itself.yml: nest at most 32 levels"),
    ("ab HERE/deep.yml HERE/deep.yml attention", "deep.yml: is not valid YAML (nest at most 32 levels)"),
    ("ab HERE/large.yml HERE/large.yml attention", "large.yml: is larger than 100000 bytes"),
    ("ab HERE/pipe.yml HERE/pipe.yml attention", "pipe.yml: is no regular file; give the path of a YAML file"),
    ("ab HERE/folder.yml HERE/folder.yml attention", "folder.yml: is no regular file"),
    ("ab HERE/zero.yml HERE/zero.yml attention", "zero.yml: is not valid YAML (unacceptable character #x0000"),
    ("ab HERE/latin.yml HERE/latin.yml attention", "latin.yml: is not valid YAML ('utf-8' codec"),
    ("ab . . --call a:b --label all", "--label: 'all' names runs already; choose another"),
    ("ab . . --call a:b --json /", "/: this is a folder; name a file"),
    ("ab . . --call a:b --json x --markdown ./x", "./x: two outputs are to be written here"),
    ("ab . . --call json:dumps --budget nan", "--budget: 'nan' will not do; give seconds, such as 60s"),
    ("ab . . --call json:dumps --budget 1e400", "--budget: '1e400' will not do"),
    ("ab . . --call json:dumps --timeout 0", "--timeout: '0' will not do"),
    ("ab . . --call json:dumps --threshold nan", "--threshold: 'nan' will not do; give a share such as 5%"),
    ("ab . . --call json:dumps --metric speed", "--metric: 'speed' cannot be compared so"),
    ("ab . . --call a:b --shard 3/2", "--shard: '3/2' is no part"),
    ("ab . . --call a:b --total soon", "--total: 'soon' will not do"),
    (f"ab . . --call json:dumps --label {'x' * 10_000}", "give at most 200 characters"),
    ("join 10.0.0.1:80 --wait nan", "'nan' will not do; give a finite number."),
    ("join 10.0.0.1:80 --wait inf", "'inf' will not do; give a finite number."),
    (f"join {'x' * 10_000}", "xxx' is no HOST:PORT"),
    ("doctor --budget nan", "doctor.budget_s: nan will not do; give a finite number"),
    ("doctor --budget 1e400", "doctor.budget_s: inf will not do; give a finite number"),
    ("runs --output HERE/text.txt", "text.txt is no folder; name another"),
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
    ("clean", "none is given; say which runs to delete"),
    ("clean --older-than 3d", "does not exist"),
    ("clean --older-than -3d", "--older-than: '-3d' will not do"),
    ("merge", "Missing argument 'DATABASE...'"),
    ("merge /nowhere.sqlite", "/nowhere.sqlite does not exist"),
    ("merge HERE/text.txt", "text.txt cannot be opened (file is not a database)"),
    ("merge HERE/foreign.sqlite", "foreign.sqlite is not nanolib's; name another"),
    ("merge HERE/newer.sqlite", "has schema 99, this nanolib 4; move it away and measure again"),
    ("merge HERE/cut.sqlite", "cut.sqlite"),
    ("merge HERE/good.sqlite HERE/text.txt", "text.txt cannot be opened"),
    ("ab one", "revision: 'one' is given; give two"),
    ("ab nowhere . --call json:dumps", "'nowhere' is no commit"),
    ("ab . . --call dumps", "'dumps' names no function; write package.module:function"),
    ("ab . . --call json:dumps --budget soon", "--budget: 'soon' will not do"),
    ("doctor --budget 0", "doctor.budget_s: 0.0 will not do; give a number above 0"),
    ("doctor --budget much", "'much' is not a valid float"),
]
PARAMS_FILES = {
    "date.yml": b"label: 2024-13-45",
    "twice.yml": b"seed: 1\nseed: 2",
    "laughs.yml": b"a: &a [1]\n"
    + b"\n".join(b"%c: &%c [%s]" % (n, n, b",".join([b"*%c" % (n - 1)] * 9)) for n in b"bcdefg"),
    "itself.yml": b"kinds: &a [*a]",
    "deep.yml": b"kinds: " + b"[" * 3000 + b"]" * 3000,
    "large.yml": b"# nothing\n" * 100_000,
    "zero.yml": b"seed: \0",
    "latin.yml": b"label: \xe9",
    "empty.txt": b"",
}
LONG = "x" * 5000
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
    (f"compare {LONG} latest", "xxx' is not in the database"),
    (f"compare {LONG}/{LONG} latest", "File name too long; name another place"),
    (f"export HERE/x.json --run {LONG}", "xxx' is not in the database"),
    (f"clean --run latest~{LONG}", "xxx' is not there; the database holds 1 launch(es) of attention"),
    (f"reproduce {LONG}", "File name too long; name another place"),
    (f"{LONG}", "No such command"),
    (f"report --to HERE/{LONG}", "cannot be made (File name too long); name another folder"),
    ("history nowhere", "no run of nowhere is in the database; it holds attention"),
    ("history --metric speed", "'speed'"),
    ("clean --older-than nan", "--older-than: 'nan' will not do"),
    ("report --to HERE/text.txt", "text.txt"),
    ("clean --older-than soon", "--older-than: 'soon' will not do; give days, such as 30d"),
    ("clean --keep -1", "-1 is not in the range x>=0"),
    ("merge HERE/good.sqlite OUT/results.sqlite", "is this database itself; name another"),
    ("merge OUT/results.sqlite", "is this database itself; name another"),
]


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    path = tmp_path_factory.mktemp("good") / "results.sqlite"
    params = attention.Params(
        device="cpu",
        budget_s=0.01,
        seq_lens=[16],
        num_heads=2,
        attention_types=["dense"],
        backward=False,
        quality_patterns=[],
    )
    with Store(path) as store:
        sweep.measure(attention, params, store=store, progress=False).finish()
    return path


@pytest.fixture
def here(tmp_path, measured):
    folder = tmp_path / "here"
    folder.mkdir()
    (folder / "text.txt").write_text("no database\n" * 100)
    for name, content in PARAMS_FILES.items():
        (folder / name).write_bytes(content)
    (folder / "folder.yml").mkdir()
    os.mkfifo(folder / "pipe.yml")
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
    named = [word.replace("HERE", str(here)).replace("OUT", str(tmp_path / "out")) for word in shlex.split(arguments)]
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
    assert LONG not in ended.output
    assert _files(tmp_path) == before
