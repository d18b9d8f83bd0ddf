"""How much code there is: tokens without comments and docstrings, and lines. Tokens are the ruler, since lines can be packed.

python tests/lines.py            nanolib and its tests
python tests/lines.py --folders  and where nanolib's are
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
_LONG = 200  # characters of a string from which its words count
_SILENT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}
_COMMENTS = {
    ".js": r"(?s:/\*.*?\*/)|(?m:^\s*//.*$)",
    ".css": r"(?s:/\*.*?\*/)",
    ".html": r"(?s:<!--.*?-->|\{#.*?#\})",
    ".jinja": r"(?s:<!--.*?-->|\{#.*?#\})",
    ".json": r"(?!)",
    ".yml": r"(?m:^\s*#.*$)",
}


@dataclass
class Size:
    """How large some code is: files, tokens and lines."""

    files: int = 0
    tokens: int = 0
    lines: int = 0

    def __add__(self, other: Size) -> Size:
        """Both together."""
        return Size(self.files + other.files, self.tokens + other.tokens, self.lines + other.lines)

    def __str__(self) -> str:
        """In columns."""
        return f"{self.tokens:8,} tokens {self.lines:7,} lines {self.files:4} files"


def python(source: str) -> Size:
    """Of a module, without comments, docstrings, newlines and indents."""
    silent: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(
            node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        ) and ast.get_docstring(node, clean=False):
            silent.update(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    tokens, lines = 0, set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in _SILENT or token.start[0] in silent:
            continue
        long = token.type == tokenize.STRING and len(token.string) > _LONG
        tokens += len(token.string.split()) if long else 1
        lines.update(range(token.start[0], token.end[0] + 1))
    return Size(1, tokens, len(lines))


def written(source: str, suffix: str) -> Size:
    """Of a template, a script, a style or data: words and signs, without comments."""
    source = re.sub(_COMMENTS[suffix], "", source)
    tokens = re.findall(r"\w+|[^\w\s]", source)
    return Size(1, len(tokens), sum(bool(line.strip()) for line in source.splitlines()))


def counted(root: Path) -> Iterator[tuple[Path, Size]]:
    """Each file of a folder, and its size."""
    for path in sorted(root.rglob("*")):
        if path.suffix == ".py":
            yield path.relative_to(root), python(path.read_text(encoding="utf-8"))
        elif path.suffix in _COMMENTS and root.name == "nanolib":
            yield path.relative_to(root), written(path.read_text(encoding="utf-8"), path.suffix)


if __name__ == "__main__":
    if "--folders" in sys.argv[1:]:
        folders: dict[str, Size] = defaultdict(Size)
        for path, size in counted(ROOT / "nanolib"):
            folders["/".join(path.parts[:-1][:2]) or "."] += size
        for folder, size in sorted(folders.items(), key=lambda item: -item[1].tokens):
            print(f"{size}  {folder}")
    for name in ("nanolib", "tests"):
        print(f"{sum((size for _, size in counted(ROOT / name)), Size())}  {name}")
