"""What is said of `nano compare`: it holds runs against each other that were collected apart."""

import re
from pathlib import Path

import click
import pytest

from nanolib.cli import main

ROOT = Path(__file__).parents[1]
TEXTS = {
    str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
    for path in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/*.md")]
}
TEXTS["nano compare --help"] = "nano compare: " + main.commands["compare"].get_help(
    click.Context(main.commands["compare"])
)
OF_AB = re.compile(r"interleav|\bpaired|\bpairs\b|in turns|side by side", re.IGNORECASE)


def _sentences(text):
    """Rows of tables, and sentences of everything else."""
    rows = [line for line in text.splitlines() if line.startswith("|")]
    prose = " ".join(line for line in text.splitlines() if not line.startswith("|"))
    return [*rows, *re.split(r"(?<=[.;:])\s", prose)]


@pytest.mark.parametrize("name", sorted(TEXTS))
def test_no_sentence_says_of_nano_compare_that_it_interleaves_or_pairs(name):
    said = [sentence for sentence in _sentences(TEXTS[name]) if "nano compare" in sentence]
    assert not [sentence for sentence in said if OF_AB.search(sentence)]


def test_the_help_of_nano_compare_says_what_a_gate_needs():
    said = " ".join(TEXTS["nano compare --help"].split())
    assert "collected apart" in said and "three or more earlier runs" in said and "nano ab decides" in said
