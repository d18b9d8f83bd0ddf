"""Stored or typed text is shown and does nothing to terminals, spreadsheets, databases or pages."""

import csv
import io
import json

import pandas as pd
import pytest

from nanolib.measurement import Measurement, printable
from nanolib.report.page import build, csv_text
from nanolib.report.tables import markdown_table
from nanolib.store import Store
from tests.processes import invoked
from tests.shown import SECTIONS
from tests.store.rows import LATENCY, make_run

HOSTILE = (
    "a\x1b[31mred\x1b]0;title\x07\x9b2J\r\x08\u202eevil\u2066\u200b\ufeff\u2028nano: fine\x00\x7fz"
    "<script>alert(1)'); DROP TABLE runs; --"
)
TYPED = HOSTILE.replace("\x00", "")  # no command line holds one


def test_what_acts_is_escaped_and_all_else_stays():
    assert printable("a\x1b[0m\u202e\u200b\n\x9b") == r"a\x1b[0m\u202e\u200b\n\x9b"
    stays = "7 µs × 3 — dense […] Ünïcödé 漢字 😀"
    assert printable(stays) == stays
    assert printable("".join(map(chr, (*range(0x3000), 0xD800, 0xFEFF, 0xE0001)))).isprintable()


@pytest.fixture
def hostile(tmp_path):
    """Two runs of one case whose texts act, in every column in which they may stand."""
    texts = {
        "runs": "suite label device git_revision fingerprint message process launch",
        "machines": "cpu system driver torch",
        "measurements": "scope unit method message",
    }
    words = json.dumps({"name": HOSTILE, "torch": HOSTILE, HOSTILE: HOSTILE})
    with Store(tmp_path / "out" / "results.sqlite") as store:
        for run_id in ("run-a", "run-b"):
            memory = Measurement("peak_memory", 5.0, 5.0, 5.0, n=1)
            rows = {"c": ({"name": "x"}, [Measurement("case_duration", 1.0, n=1), memory, LATENCY])}
            store.add(make_run(run_id, experiment=HOSTILE, rows=rows, interference=[HOSTILE]))
        db = store.connection
        broken = "run_id = 'run-b' AND metric = 'case_duration'"
        db.execute(f"UPDATE measurements SET status = 'error' WHERE {broken}")
        for table, columns in texts.items():
            for column in columns.split():
                db.execute(f"UPDATE {table} SET {column} = ?", (HOSTILE,))  # columns of the schema
        db.execute("UPDATE runs SET params = ?, versions = ?", (words, words))
        db.execute("UPDATE measurements SET factors = ?, details = ?", (words, words))
    return tmp_path


@pytest.mark.parametrize(
    "arguments",
    [
        "runs",
        "report run-a --to reportTYPED",
        "compare run-a run-b --all",
        "compare TYPED run-b",
        "history --all",
        "export xTYPED.json",
        "merge TYPED",
        "run warmup --dry-run -p device=TYPED",
        "runs --TYPED",
    ],
)
def test_no_text_acts_on_the_terminal(hostile, monkeypatch, arguments):
    monkeypatch.chdir(hostile)
    monkeypatch.setenv("NANOLIB_OUTPUT", str(hostile / "out"))
    ended = invoked(*(word.replace("TYPED", TYPED) for word in arguments.split()))
    assert ended.output and ended.exit_code in (0, 1, 2), ended.exception
    assert not isinstance(ended.exception, Exception), ended.exception
    assert all(c.isprintable() or c == "\n" for c in ended.output), ascii(ended.output)
    assert "\nnano: fine" not in ended.output


def test_a_page_shows_it_as_text_and_no_code_that_a_database_names_is_run(hostile, monkeypatch):
    (hostile / "evil.py").write_text(f"open({str(hostile / 'made')!r}, 'w')")
    monkeypatch.syspath_prepend(str(hostile))
    params = json.dumps({"model": "evil:build", "device": "cpu"})
    with Store(hostile / "out" / "results.sqlite") as store:
        store.connection.execute("UPDATE runs SET experiment = 'model', params = ?", (params,))
        assert store.resolve(HOSTILE) == ["run-a", "run-b"]
        page = build(store, ["run-a", "run-b"], hostile / "report", SECTIONS, pictures=False)
        assert len(store.runs()) == 2
    assert not (hostile / "made").exists() and "<script>alert(1)" not in page.read_text()


@pytest.mark.parametrize(
    "text",
    ["=cmd()", "-1+cmd()", "+1", "@sum", "\t=cmd()", "\r+1"],
)
def test_no_cell_of_a_csv_is_a_formula(text):
    table = pd.DataFrame({text: [text, [text, "b"], (text,)], "n": [-1.5, 2.0, -3.0]})
    header, *cells = csv.reader(io.StringIO(csv_text(table)))
    for cell in (header[0], *(line[0] for line in cells)):
        assert cell.startswith("'") and cell.isprintable()
    assert [line[1] for line in cells] == ["-1.5", "2.0", "-3.0"]


@pytest.mark.parametrize("text", ["[a](http://x)", "<img src=x>", "a | b", "**a**"])
def test_markdown_of_a_cell_or_header_is_text(text):
    header, _, cell = markdown_table(pd.DataFrame({text: [text]})).split("\n")
    assert header == cell and cell.count("|") - cell.count("\\|") == 2
    assert not any(mark in cell.replace(f"\\{mark}", "") for mark in "[]<`*")
