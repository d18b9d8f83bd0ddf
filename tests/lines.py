"""How much code there is: tokens without comments and docstrings, since lines can be packed.

python tests/lines.py            nanolib and its tests
python tests/lines.py --folders  and where nanolib's are
"""

import ast
import io
import re
import sys
import tokenize
from collections import defaultdict
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
_DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def python(source):
    """Of a module, without comments, docstrings, newlines and indents."""
    silent = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, _DOCUMENTED) and ast.get_docstring(node, clean=False):
            silent.update(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    tokens = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in _SILENT or token.start[0] in silent:
            continue
        long = token.type == tokenize.STRING and len(token.string) > _LONG
        tokens += len(token.string.split()) if long else 1
    return tokens


def written(source, suffix):
    """Of a template, a script, a style or data: words and signs, without comments."""
    source = re.sub(_COMMENTS[suffix], "", source)
    return len(re.findall(r"\w+|[^\w\s]", source))


def counted(root):
    """Each file of a folder, and its size."""
    for path in sorted(root.rglob("*")):
        if path.suffix == ".py":
            yield path.relative_to(root), python(path.read_text(encoding="utf-8"))
        elif path.suffix in _COMMENTS and root.name == "nanolib":
            yield path.relative_to(root), written(path.read_text(encoding="utf-8"), path.suffix)


def show(name, sizes):
    """Print how large some files are together."""
    print(f"{sum(sizes):8,} tokens {len(sizes):4} files  {name}")


if __name__ == "__main__":
    if "--folders" in sys.argv[1:]:
        folders = defaultdict(list)
        for path, size in counted(ROOT / "nanolib"):
            folders["/".join(path.parts[:-1][:2]) or "."].append(size)
        for folder, sizes in sorted(folders.items()):
            show(folder, sizes)
    for name in ("nanolib", "tests"):
        show(name, [size for _, size in counted(ROOT / name)])
