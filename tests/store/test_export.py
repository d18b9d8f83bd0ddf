"""An export names no person, machine or folder, in any column and format."""

import json

import pytest

from nanolib.compare.runs import compare_rows
from nanolib.measurement import BadInput, Measurement, Status
from nanolib.store import Store, export
from nanolib.store.export import redact
from nanolib.store.schema import columns_of
from tests.store.rows import LATENCY, make_run

HOME, USER, HOST = "/data/people/zander", "zander", "vaultbox.corp.example"


@pytest.fixture(autouse=True)
def _here(monkeypatch):
    """Give the machine known names."""
    monkeypatch.setenv("LOGNAME", USER)
    monkeypatch.setenv("HOME", HOME)
    monkeypatch.setattr("platform.node", lambda: HOST)
    export._private.cache_clear()
    yield
    export._private.cache_clear()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (HOME, "~"),
        (f"File '{HOME}/runs/train.py', line 3", "File '…/train.py', line 3"),
        ("/home/quilla/x.txt", "~/x.txt"),
        ("/Users/quilla/secret/x.txt:3", "…/x.txt:3"),
        ("no such file: /srv/quilla/data/", "no such file: …/"),
        ("--path=/srv/quilla/x", "--path=…/x"),
        (r"C:\Users\quilla\secret\x.txt", "…/x.txt"),
        ("results_of_zander and ZANDER's", "results_of_user and user's"),
        ("on vaultbox", "on host"),
        ("VAULTBOX.corp.example:3", "host:3"),
        ({"path": "/srv/quilla/m.bin", "traceback": "File x", "corpus": "y"}, {"path": "…/m.bin"}),
        ({"k": [1, ("/srv/quilla/v",)]}, {"k": [1, ["…/v"]]}),
        ("https://docs.pytorch.org/x/y 3/4", "https://docs.pytorch.org/x/y 3/4"),
        ("forward/backward package.module:build …/x", "forward/backward package.module:build …/x"),
    ],
)
def test_texts_lose_what_names_somebody_and_keep_the_rest(text, expected):
    assert redact(text) == expected


@pytest.mark.parametrize(("name", "told"), [("ann", "user"), ("li", "li"), ("root", "root")])
def test_names_of_at_least_three_letters_are_replaced(monkeypatch, name, told):
    monkeypatch.setenv("LOGNAME", name)
    assert redact(f"by {name}") == f"by {told}"


@pytest.mark.parametrize("name", ["max", "dense", "cuda"])
def test_keys_and_words_of_nanolib_stay_if_they_are_the_name_of_a_user(monkeypatch, name):
    monkeypatch.setenv("LOGNAME", name)
    details = {"activations": {"mean": 0.1, "max": 3}}
    factors = {"attention_type": "dense", "name": "dense (flash)", "mode": "max-autotune"}
    row = {"factors": factors, "details": details, "scope": "over dense", "device": "cuda:0"}
    assert redact(row) == row
    row = {"factors": {"model": f"{name}.models:build"}, "source": f"by {name}"}
    assert redact(row) == {"factors": {"model": "user.models:build"}, "source": "by user"}


# Before a name is added here: an export copies the column to other people.
COLUMNS = {
    "machines": "machine_id cpu cores ram_gib gpus system driver torch threads governor dtypes",
    "runs": "run_id experiment suite label machine_id device params versions git_revision"
    " fingerprint cases started duration_s status message process launch interference",
    "measurements": "run_id case_id factors metric scope unit estimate low high confidence n"
    " samples predicted provenance method status message flags details",
}


@pytest.mark.parametrize("table", COLUMNS)
def test_each_exported_column_is_known(store, table):
    assert columns_of(store.connection, table) == COLUMNS[table].split()


@pytest.mark.parametrize("ending", [".sqlite", ".json"])
def test_no_column_of_an_export_tells_of_folders_users_or_hosts(tmp_path, store, ending):
    text = f"{HOME}/diary.txt of zander on vaultbox, | /srv/quilla/x"
    rest = {
        "status": Status.ERROR,
        "message": text,
        "scope": text,
        "details": {"traceback": text, "at": text},
    }
    rows = [Measurement("case_duration", 1.0, **rest), LATENCY]
    named = dict.fromkeys(("label", "suite", "device", "process", "launch"), text)
    named |= {"rows": {"c": ({"name": text, "corpus": text}, rows)}, "params": {"path": text}}
    store.add(make_run("a", interference=[text], **named))
    store.update_run("a", status="running", message=text)
    store.add_power_samples([{"t_s": 0.1, "watts": 5.0}], source=text)
    target = tmp_path / "shared" / f"x{ending}"
    target.parent.mkdir()
    export.write(store, ["a"], target)
    content = target.read_text(errors="replace")
    words = ("zander", "vaultbox", "quilla", "/data", "/srv")
    assert not any(word in content for word in words) and "forward" in content
    assert list(target.parent.iterdir()) == [target]
    if ending == ".sqlite":
        with Store(target, create=False) as shared:
            assert shared.runs()[["status", "process"]].to_numpy().tolist() == [["interrupted", ""]]


def test_a_database_for_others_pairs_with_ones_own_and_json_keeps_every_digit(tmp_path, store):
    tiny = Measurement("relative_error", 1.2345678901234e-17, 1e-17, 2e-17, 0.95, 3)
    store.add(make_run("a", rows={"c": ({"name": "x"}, [LATENCY, tiny])}))
    store.add(make_run("b"))
    store.add_power_samples([{"t_s": 0.1, "watts": 5.0}], run_id="a")
    export.write(store, ["a"], tmp_path / "x.json")
    *_, row = json.loads((tmp_path / "x.json").read_text())["measurements"]
    assert (row["estimate"], row["low"], row["predicted"]) == (1.2345678901234e-17, 1e-17, None)
    export.write(store, ["a"], tmp_path / "x.sqlite")
    mine = store.measurements(["a"], samples=True)
    with Store(tmp_path / "x.sqlite", create=False) as shared:
        theirs = shared.measurements(samples=True)
        assert shared.connection.execute("SELECT watts FROM power_samples").fetchall() == [(5.0,)]
    assert set(compare_rows(mine, theirs).counts) == {"equivalent"}
    for frame in (mine, theirs):
        frame["samples"] = frame["samples"].map(list)
    assert theirs.drop(columns="id").equals(mine.drop(columns="id"))


def test_what_is_there_is_not_overwritten_and_a_failure_leaves_nothing(
    tmp_path, store, monkeypatch
):
    store.add(make_run("a"))
    folder = tmp_path / "shared"
    folder.mkdir()
    export.write(store, ["a"], folder / "x.json")
    with pytest.raises(BadInput, match="exists; name a new file"):
        export.write(store, ["a"], folder / "x.json")
    with pytest.raises(BadInput, match="there are no runs"):
        export.write(store, [], folder / "y.json")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pathlib.Path.replace", full)
    with pytest.raises(OSError, match="No space left"):
        export.write(store, ["a"], folder / "y.json")
    assert [file.name for file in folder.iterdir()] == ["x.json"]
