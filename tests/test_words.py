"""Words that documentation, notebooks, docstrings and messages avoid; CONTRIBUTING.md says what to write instead."""

import ast
import re
from pathlib import Path

import nbformat

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


def _texts(path):
    """Yield the texts of a file that people read, each with its line, or its cell in a notebook."""
    source = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.lineno, node.value
    elif path.suffix == ".ipynb":
        for number, cell in enumerate(nbformat.reads(source, as_version=4).cells):
            if cell.cell_type == "markdown":
                yield number, cell.source
    else:
        yield 1, source


def test_no_sentence_has_a_word_of_the_list():
    found = []
    for pattern in FILES:
        paths = [*ROOT.glob(pattern)]
        assert paths, pattern
        for path in paths:
            for line, text in _texts(path):
                prose = CODE.sub("``", text)
                words = AVOIDED.findall(prose) if " " in prose.strip() else []  # or it is a name
                found += [f"{path.relative_to(ROOT)}:{line}: {word}" for word in words]
    assert not found, "\n".join(found)
