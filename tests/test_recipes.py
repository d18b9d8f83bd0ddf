"""Follow docs/recipes.md to the letter in a copy; its numbers are in the report."""

import os
import re
import sys

import pandas as pd
import pytest

from nanolib.paths import checkout
from tests.processes import ended
from tests.working_tree import copied

PAGE = (checkout() / "docs" / "recipes.md").read_text(encoding="utf-8")
TITLES = [
    "A new attention pattern",
    "A new attention",
    "A new metric, and its meter",
    "A new notebook",
]
REPORT = """
from nanolib.experiments import sections
from nanolib.paths import output_folder
from nanolib.report.page import build
from nanolib.store import Store
with Store(create=False) as store:
    build(store, store.resolve("all"), output_folder() / "report", sections(), pictures=False)
"""
BLOCK = re.compile(
    r"(?:^`(?P<file>[\w/.]+)`\n\n)?^```(?P<kind>\w+)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL
)


def _recipe(title):
    """Each block under a title: the last file that is named above it, its kind and its text."""
    section = PAGE.split(f"## {title}\n")[1].split("\n## ")[0]
    file = ""
    for found in BLOCK.finditer(section):
        file = found["file"] or file
        yield file, found["kind"], found["text"]


def _changed(source, change):
    """A change applied to a file's text, whose lines it must find once."""
    lines = change.splitlines(keepends=True)
    before = "".join(line[1:] for line in lines if line[0] != "+")
    assert source.count(before) == 1, f"{before!r} stands {source.count(before)} times"
    return source.replace(before, "".join(line[1:] for line in lines if line[0] != "-"))


def _follow(copy, title):
    """Write and change what a recipe says; the commands that it ends with."""
    touched, commands = set(), []
    for file, kind, text in _recipe(title):
        if kind == "console":
            commands += text.splitlines()
            continue
        path = copy / file
        if kind == "diff":
            text = _changed(path.read_text(encoding="utf-8"), text)
        else:
            assert not path.exists() or file in touched
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
        touched.add(file)
    return commands


@pytest.mark.notebook
@pytest.mark.slow
def test_what_the_recipes_add_has_its_numbers_in_the_report(tmp_path):
    copy, output = copied(tmp_path / "copy"), tmp_path / "outputs"
    commands = [command for title in TITLES for command in _follow(copy, title)]
    environment = {"PYTHONPATH": str(copy), "NANOLIB_OUTPUT": str(output)}
    # one report of all, without pictures, in the place of one after each run
    for command in [*commands, f"python -c '{REPORT}'"]:
        line = command.replace("nano run", "nano run --no-report")
        line = re.sub(r"^nano ", "python -m nanolib.cli ", line)
        line = line.replace("python", sys.executable, 1)
        done = ended("bash", "-c", line, cwd=copy, env=os.environ | environment)
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    assert (copy / "notebooks" / "copies.ipynb").is_file()
    lines = (output / "report" / "profiling_report.md").read_text(encoding="utf-8").splitlines()
    table = pd.read_csv(output / "report" / "attention_summary.csv")
    for name in ("dilated", "chunked"):
        own = table[table["name"].str.startswith(name)]
        assert len(own) and (own["page_faults"] >= 0).all(), name
    (line,) = [line for line in lines if line.startswith("| 64 |")]
    assert re.match(r"\| 64 \| [\d.,]+ \\\[[\d.,]+ … [\d.,]+\\\] \| ok \|", line), line
    assert any("A copy of 64 MiB takes" in line for line in lines)
