"""Words that documentation, notebooks, docstrings and messages avoid; CONTRIBUTING.md says what to write instead."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).parents[1]
WORDS = {
    "told": r"told|tells?",
    "said": r"said",
    "beside": r"beside",
    "meanwhile": r"meanwhile",
    "anew": r"anew",
    "alike": r"alike",
    "will not do": r"will not do",
    "asked for": r"asked for|asks for|as asked",
    "is no X": r"(?<!there )(?:is|are|was|were) no (?!longer\b)[a-z]\w*",
    "so many": r"so many",
    "stands": r"stands?(?! for\b| alone\b|-in)|stood",
    "lies": r"lies?(?! within\b| between\b| outside\b| in \[)",
    "held": r"held (?:by|in|for)|holders?",
    "pays": r"pays",
    "roof": r"roofs?",
    "seen on": r"(?:seen|not seen|unseen) on",
}
PATTERNS = {name: re.compile(rf"\b(?:{words})\b", re.IGNORECASE) for name, words in WORDS.items()}
CODE = re.compile(r"```.*?```|`[^`\n]*`", re.DOTALL)

DOCS = [
    ROOT / name
    for name in (
        *("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "outputs/reference/README.md"),
        *("action.yml", "action/gate.sh", "CITATION.cff", "pyproject.toml"),
    )
]
PACKAGE = ROOT / "nanolib"
PLACES = {
    "docs": [*DOCS, *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "docs").glob("*.py"))],
    "notebooks": sorted((ROOT / "notebooks").glob("*.ipynb")),
    "nanolib": sorted(PACKAGE.glob("*.py")),
    "page": sorted(PACKAGE.rglob("*.jinja")),
    **{
        f"nanolib/{folder.name}": sorted(folder.rglob("*.py"))
        for folder in sorted(PACKAGE.iterdir())
        if (folder / "__init__.py").is_file()
    },
}


def _texts(path: Path) -> Iterator[tuple[int, str]]:
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


def _found(path: Path) -> Iterator[tuple[str, int, str]]:
    """Yield the file, line and phrase of each word of the list."""
    name = path.relative_to(ROOT).as_posix()
    for line, text in _texts(path):
        prose = CODE.sub(lambda code: "`" + "\n" * code[0].count("\n"), text)
        for pattern in PATTERNS.values():
            for match in pattern.finditer(prose):
                if " " in prose.strip():  # a sentence, not a name
                    yield name, line + prose.count("\n", 0, match.start()), match[0].lower()


@pytest.mark.parametrize("place", PLACES)
def test_no_sentence_has_a_word_of_the_list(place):
    assert PLACES[place]
    found = [
        f"{name}:{line}: {phrase}" for path in PLACES[place] for name, line, phrase in _found(path)
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("sentence", "phrase"),
    [
        ("the intervals cannot be told apart", "told"),
        ("'spares' is no attention kind", "is no attention"),
        ("there is no preset, and it is no longer used", ""),
        ("k stands for keys", ""),
        ("no clear difference", ""),
    ],
)
def test_the_list_finds_a_word_and_leaves_other_meanings(tmp_path, monkeypatch, sentence, phrase):
    monkeypatch.setattr("tests.test_words.ROOT", tmp_path)
    (tmp_path / "page.md").write_text(f"{sentence}\n")
    assert [found for _, _, found in _found(tmp_path / "page.md")] == ([phrase] if phrase else [])
