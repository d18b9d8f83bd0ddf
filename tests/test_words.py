"""Words that documentation, notebooks, docstrings and messages avoid, as in CONTRIBUTING.md."""

import ast
import re
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).parents[1]
WORDS = (
    r"told|tells?",
    r"said",
    r"beside",
    r"meanwhile",
    r"anew",
    r"alike",
    r"will not do",
    r"asked for|asks for|as asked",
    r"(?<!there )(?:is|are|was|were) no (?!longer\b)[a-z]\w*",
    r"so many",
    r"stands?(?! for\b| alone\b|-in)|stood",
    r"lies?(?! within\b| between\b| outside\b| in \[)",
    r"held (?:by|in|for)|holders?",
    r"pays",
    r"roofs?",
    r"(?:seen|not seen|unseen) on",
)
AVOIDED = re.compile(rf"\b(?:{'|'.join(WORDS)})\b", re.IGNORECASE)
CODE = re.compile(r"```.*?```|`[^`\n]*`", re.DOTALL)
FILES = (
    *("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "outputs/reference/README.md"),
    *("action.yml", "action/gate.sh", "CITATION.cff", "pyproject.toml"),
    *("docs/*.md", "docs/*.py", "notebooks/*.ipynb", "nanolib/**/*.py", "nanolib/**/*.jinja"),
)


def _prose(path):
    """The texts of a file that people read, without code and names."""
    source = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        nodes = (getattr(node, "value", "") for node in ast.walk(ast.parse(source)))
        source = "\n".join(text for text in nodes if isinstance(text, str) and " " in text.strip())
    elif path.suffix == ".ipynb":
        cells = nbformat.reads(source, as_version=4).cells
        source = "\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
    return CODE.sub("``", source)


@pytest.mark.parametrize("pattern", FILES)
def test_no_sentence_has_a_word_of_the_list(pattern):
    paths = [*ROOT.glob(pattern)]
    words = {path: AVOIDED.findall(_prose(path)) for path in paths}
    assert paths and not {path: found for path, found in words.items() if found}
