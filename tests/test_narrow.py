"""Tables and help in terminals of 80 columns, of 120, and where nothing says how wide it is."""

import json

import pandas as pd
import pytest
from click.testing import CliRunner

from nanolib.cli import main
from nanolib.cli.command import echo, echo_table
from nanolib.paths import checkout

REFERENCE = checkout() / "outputs" / "reference" / "amd-epyc-2-cores-quick"
WIDE = pd.DataFrame({"case": ["dense", "window"], "note": ["x" * 30, "y" * 50], "ms": ["1.5", "2"], "p": ["", "0.01"]})


def _printed(capsys, monkeypatch, width):
    monkeypatch.setenv("COLUMNS", width)
    echo_table(WIDE)
    return capsys.readouterr().out.splitlines()


def test_a_table_that_is_too_wide_is_told_line_by_line_and_loses_nothing(capsys, monkeypatch):
    lines = _printed(capsys, monkeypatch, "40")
    assert lines == [
        "dense",
        f"    note {'x' * 30}",
        "    ms 1.5",
        "window",
        f"    note {'y' * 50}",
        "    ms 2 · p 0.01",
    ]
    assert len(_printed(capsys, monkeypatch, "120")) == 3
    monkeypatch.delenv("COLUMNS")
    echo_table(pd.concat([WIDE] * 2, axis=1).set_axis([f"c{i}" for i in range(8)], axis=1))
    assert len(capsys.readouterr().out.splitlines()) == 3  # in a pipe nothing limits it


def test_a_sentence_breaks_between_words_and_json_never(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "20")
    echo("  twelve twelve twelve", "say " + "x" * 25)
    echo(text := json.dumps({"said": "a sentence of many more letters than fit"}), whole=True)
    assert capsys.readouterr().out.splitlines() == ["  twelve twelve", "    twelve", "say " + "x" * 25, text]


@pytest.mark.parametrize(
    "command",
    [
        ["runs"],
        ["history", "--all"],
        ["plan", "decoder_tiny", "--memory", "8GiB", "-p", "num_layers=2"],
        ["run", "quick", "attention", "--dry-run"],
        *([name, "--help"] for name in main.commands),
    ],
    ids=" ".join,
)
def test_no_line_is_wider_than_the_terminal(command, tmp_path, monkeypatch):
    width = 80
    (tmp_path / "results.sqlite").write_bytes((REFERENCE / "results.sqlite").read_bytes())
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("NANOLIB_OUTPUT", str(tmp_path))
    result = CliRunner().invoke(main, command)
    assert result.exit_code == 0, result.output
    long = [line for line in result.stdout.splitlines() if len(line) > width and " " in line.strip()[:width]]
    assert not long, long[:3]
