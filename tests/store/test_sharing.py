"""What leaves this machine holds nothing private, in no column and no format."""

import json

import pytest

from nanolib.compare.compare import compare_rows
from nanolib.experiments import ALL
from nanolib.measurement import FLAG_TEXT, METRICS, Status, exact
from nanolib.report import export
from nanolib.run.suite.jobs import plan
from nanolib.store import Store
from nanolib.store.sharing import Redaction
from tests.store.columns import ENDINGS, fill, text_columns
from tests.store.rows import LATENCY, make_run

MARKS = ("quilla", "obrien", "zander", "s3same", "vaultbox", "sharedisk", "meetpoint")
HOME, USER, HOST = "/data/people/zander", "zander", "vaultbox.corp.example"
PRIVATE = [
    "/home/quilla/x",
    "file:///home/quilla/x",
    "-I/home/quilla/x",
    "cc -isystem/opt/quilla/include -Wl,-rpath,/opt/quilla/lib",
    "--path=/home/quilla",
    "~quilla/x",
    "x=~quilla/x",
    "../quilla/x",
    "./quilla/x.txt",
    r"..\quilla\x",
    r"C:\Users\quilla\x",
    r"-IC:\Users\quilla",
    r"C:\\Users\\quilla\\x",
    "C:/Users/quilla/x.txt",
    r"\\sharedisk\quilla\x",
    r"\\\\sharedisk\\quilla",
    "/home/quilla obrien/my obrien/x.txt",
    "/home/quilla obrien",
    "it is in /srv/quilla obrien/my data/x.txt today",
    "FileNotFoundError: '/srv/quilla obrien/x' is not there",
    'File "/home/quilla obrien/x.py", line 3',
    "run '--path=/srv/quilla obrien/x'",
    "/home/quilla's/obrien",
    "/home/quilla.py",
    "/home/quilla,/home/obrien:/home/quilla",
    "prefix/home/quilla/x",
    r"\/home\/quilla\/x",
    "quilla:s3same@vaultbox",
    "https://quilla:s3same@vaultbox.corp.example/x/y",
    "http://localhost:8888/lab/tree/home/quilla/x",
    "ssh://quilla@sharedisk/x",
    "git@sharedisk:quilla/x.git",
    "tcp://sharedisk:29500",
    "root@sharedisk",
    "https://example.org/?file=%2fhome%2Fquilla",
    "C:%5CUsers%5Cquilla",
    "/root/quilla/x",
    "zander",
    "results_of_zander and ZANDER's",
    "x/data/people/zander/y",
    HOME,
    "on vaultbox",
    "VAULTBOX.corp.example:3",
    "meetpoint:29500 is gone",
    "rank 3 on meetpoint was lost; cannot connect to Meetpoint:29500",
    "mount /quilla is full",
    "no space left on /quilla",
    "weights in (/quilla), cache=/sharedisk.",
    "token=s3same",
    "API_KEY = 's3same'",
    "run with HF_TOKEN=s3same, then",
    '{"password": "s3same"}',
    "Authorization: Bearer s3same.x-y",
    "sent bearer s3same",
    "login failed for {'user': 'x', 'token': 's3same'}",
    "environ({'HF_TOKEN': 'x_s3same', 'A': 'b'})",
    "HF_TOKEN: x_s3same",
    "AWS_SECRET_ACCESS_KEY = s3same/x+y",
    "PGPASSWORD=s3same",
    "DB_PASS=s3same",
    "private_key: s3same",
    "curl --token s3same --password s3same",
    "password=ab,s3same;quilla",
    'password="quilla s3same"',
    "{'password': 'quilla s3same'}",
    "Authorization: Digest username=quilla, nonce=s3same",
    '{"Authorization": ["Bearer s3same"]}',
    "hf_s3sameABCDEF and ghp_s3sameABCDEF",
    "sk-s3sameABCDEF, AKIAS3SAMEABCDEF",
    "xoxb-s3sameABCDEF: glpat-s3-sameABCDEF-s3same",
    "sk-proj-s3sameABCDEF or sk-ant-api03-s3same",
    f"secret: {'a' * 1200}s3same",
    "github_pat_s3sameABCDEF AIzaS3sameABCDEF",
    "$HOME/quilla/x",
    "${DATA}/quilla/x.txt",
    r"%USERPROFILE%\\quilla",
    "／home／quilla／x",
    "∕srv∕quilla∕x",
    "\x1b[31m/srv/quilla/x\x1b[0m",
    "/srv/qui\x1b[1mlla/x",
]
HARMLESS = [
    *("tokens/s", "GB/s", "FLOP/s", "ms/token", "1/2", "2026-11-22", "12/31/2026", "a/b", "and/or", "n/a", "I/O error"),
    *("package.module:build", "torch.nn:Linear", "float8_e4m3fn/float8_e5m2", "nanolib/store/database.py", "latest~1"),
    *("the square root of x", "3 tokens/s at 5 GB/s", "~10 ms/token", "~half", "(a+b)/c/d", "2.13.0+cpu", "a // b", "…/x"),
    *("a token takes 3 J", "per token: 3 J", "new_tokens=8", "tokens: 5", "no secret is known", "a bearer", "ms:4/5"),
    *("every_kth_token=16", "J/token=0.3", "per token = 4", "bearer of news", "$5/hour", "fix:attn/ring", "main:ab/cd"),
    *("ratio:a/b", "mode:inference/training", "secret: no", "asked without this node's NANOLIB_SECRET; nothing was run"),
    *("https://docs.pytorch.org/x/y 3/4", "x: y/z", "1:2/3", "GB/s, read and written", "50 %", "dense (flash)", "a@", "@b"),
    *("192 or 50 on a node", "read / written", "ms / token", "10 /s", "1 /2", "/", "/ alone", "either/or /", "x/ y", "(n) /3"),
]  # fmt: skip


@pytest.fixture
def here(monkeypatch):
    """A machine whose names are known."""
    for name in ("LOGNAME", "USER", "SUDO_USER"):
        monkeypatch.setenv(name, USER)
    monkeypatch.setenv("HOME", HOME)
    monkeypatch.setattr("platform.node", lambda: HOST)


@pytest.mark.parametrize("text", PRIVATE)
def test_nothing_private_is_left_of_a_text(here, text):
    hosts = ("meetpoint", "meetpoint.corp.example")
    told = [Redaction([{"rendezvous": f"{host}:29500"}]).value({text: [text]}) for host in hosts]
    assert not [mark for mark in (*MARKS, "/home") if mark in json.dumps(told).lower()], told


@pytest.mark.parametrize("text", HARMLESS)
def test_what_is_no_path_stays(here, text):
    for host in ("localhost", "node.corp.example", "192.168.50.1", "c4.corp.example"):
        assert Redaction([{"rendezvous": f"{host}:29500"}]).value(text) == text


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("/srv/a/b/model.bin", "…/model.bin"),
        ("'/srv/my data/x.py', line 3", "'…/x.py', line 3"),
        ("see /srv/a/x.py:12: no such name", "see …/x.py:12: no such name"),
        ("(/srv/a/folder), twice", "(…), twice"),
        ("-I/usr/include -O2", "-I… -O2"),
        ("{'--path=/srv/a b/c': 1}", "{'--path=…': 1}"),
    ],
)
def test_a_path_leaves_its_files_name_and_the_sentence_around_it(text, told):
    assert Redaction().value(text) == told and Redaction().value(told) == told


def test_a_long_text_of_any_shape_is_redacted_as_a_short_one():
    """Every pattern of a redaction begins in few places: the worst of these would not end otherwise."""
    for part in ("a", "/a", "a ", " /a", "'/a", "a@", "~a", "a:/", "\\", "../", "--a", "/a a a a"):
        short, long = (Redaction().value(part * times) for times in (50, 5_000))
        assert long in (short, short * 100), part


def test_a_number_per_token_stays_and_a_key_goes_whatever_it_is():
    kept = {"per token": "12 ms", "energy_per_token": 3.0, "token": "word", "secret": None}
    assert Redaction().value(kept) == kept
    held = {"model_options": {"password": ["a"], "secret": {"x": "y"}, "width": 3}}
    assert Redaction().value(held) == {"model_options": {"password": "…", "secret": "…", "width": 3}}
    assert Redaction().value({"api_key": 12345, "secrets": ["x"], "hf_token": "hf_1234"}) == {
        "api_key": "…",
        "secrets": "…",
        "hf_token": "…",
    }


@pytest.mark.parametrize("user", ["dense", "latency", "causal", "max", "root", "al"])
def test_a_user_called_like_a_word_of_the_data_changes_none(here, monkeypatch, user):
    for name in ("LOGNAME", "USER", "SUDO_USER"):
        monkeypatch.setenv(name, user)
    monkeypatch.setenv("HOME", f"/home/{user}")
    assert Redaction().value(f"{user} by al") == f"{user} by al"
    assert Redaction().value(f"/home/{user}/x") == "…"


def test_cases_parameters_and_words_of_our_notebooks_stay_as_they_are(here):
    told = Redaction()
    for targets in (("quick",), ("full", "attention")):
        for job in plan(ALL, targets, {}, {}):
            values = json.loads(
                json.dumps([job.params.model_dump(mode="json"), *(case.factors for case in job.cases())])
            )
            assert told.value(values) == values
    words = [*METRICS, *(f"{metric.unit} {metric.title}" for metric in METRICS.values()), *FLAG_TEXT.values(), *Status]
    assert told.value(words) == words


@pytest.mark.parametrize("ending", ENDINGS)
def test_nothing_private_comes_out_of_any_column_in_any_format(here, tmp_path, ending):
    target = tmp_path / f"share{ending}"
    with Store(tmp_path / "r.sqlite") as store:
        export.write(store, fill(store.connection, PRIVATE), target)
    content = target.read_bytes().decode(errors="replace").lower()
    assert not [mark for mark in (*MARKS, "/home") if mark in content]
    if ending == ".sqlite":
        with Store(target) as shared:
            counts = [
                shared.connection.execute(f"SELECT count(*) FROM {t}").fetchone()
                for t in text_columns(shared.connection)
            ]
            assert counts == [(len(PRIVATE),)] * 4
            joined = "SELECT count(*) FROM measurements m JOIN runs USING (run_id) JOIN machines n ON m.machine_id = n.machine_id"
            assert shared.connection.execute(joined).fetchone() == (len(PRIVATE),)


@pytest.mark.parametrize("ending", ENDINGS)
def test_rows_that_differ_in_what_is_private_alone_are_numbered(tmp_path, ending):
    rows = [exact("flops", n, scope=f"/home/{n}/x") for n in range(3)] + [exact("flops", 3, scope="… (2)")]
    target = tmp_path / f"share{ending}"
    with Store(tmp_path / "r.sqlite") as store:
        store.add(make_run("a", rows={"c": ({}, rows)}))
        export.write(store, ["a"], target)
    if ending == ".sqlite":
        with Store(target) as shared:
            scopes = list(shared.measurements().scope)
            assert list(shared.measurements().estimate) == [0, 1, 2, 3]
        assert scopes == ["…", "… (2)", "… (3)", "… (2) (2)"]
    else:
        content = target.read_text()
        assert all(scope in content for scope in ("… (3)", "… (2) (2)"))


def test_what_is_exported_pairs_with_what_was_measured(here, tmp_path):
    rows = {f"{n:016x}": ({"seq_len": n, "name": "dense"}, [LATENCY, exact("flops", n)]) for n in range(1, 4)}
    with Store(tmp_path / "r.sqlite") as store:
        store.add(make_run("a", rows=rows))
        store.copy_to(tmp_path / "share.sqlite", ["a"])
        ours = store.measurements(samples=True)
        with Store(tmp_path / "share.sqlite") as shared:
            theirs = shared.measurements(samples=True)
            assert shared.runs().drop(columns="process").equals(store.runs().drop(columns="process"))
    assert ours.drop(columns="samples").equals(theirs.drop(columns="samples"))
    found = compare_rows(ours, theirs)
    assert found.counts == {"equivalent": 6} and found.same_machine
