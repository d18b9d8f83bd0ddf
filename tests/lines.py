"""How many lines of code nanolib has: without blanks, comments and docstrings; templates, scripts and styles counted.

python tests/lines.py            the sum
python tests/lines.py --folders  and where they are
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1] / "nanolib"
_SILENT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
_COMMENTS = {
    ".js": r"(?s:/\*.*?\*/)|(?m:^\s*//.*$)",
    ".css": r"(?s:/\*.*?\*/)",
    ".html": r"(?s:<!--.*?-->|\{#.*?#\})",
    ".jinja": r"(?s:<!--.*?-->|\{#.*?#\})",
}


def python(source: str) -> int:
    """Lines with a token that is neither a comment nor part of a docstring."""
    silent: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and ast.get_docstring(
            node, clean=False
        ):
            silent.update(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _SILENT:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - silent)


def written(source: str, suffix: str) -> int:
    """Lines of a template, a script or a style that hold more than a comment."""
    return sum(bool(line.strip()) for line in re.sub(_COMMENTS[suffix], "", source).splitlines())


def counted(root: Path = ROOT) -> Counter[str]:
    """Lines of each file of the package, by its path in it."""
    lines: Counter[str] = Counter()
    for path in root.rglob("*"):
        if path.suffix == ".py":
            lines[str(path.relative_to(root))] = python(path.read_text(encoding="utf-8"))
        elif path.suffix in _COMMENTS:
            lines[str(path.relative_to(root))] = written(path.read_text(encoding="utf-8"), path.suffix)
    return lines


if __name__ == "__main__":
    lines = counted()
    if "--folders" in sys.argv[1:]:
        folders: Counter[str] = Counter()
        for path, count in lines.items():
            folders["/".join(Path(path).parts[:-1][:2]) or "."] += count
        for folder, count in folders.most_common():
            print(f"{count:6,}  {folder}")
    print(f"{sum(lines.values()):,}")
