"""What a version's code imports from elsewhere, read and not run: it is imported once, before versions are forked."""

from __future__ import annotations

import ast
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

from nanolib.ab.worktree import Version


def imported_by_all(versions: Sequence[Version], modules: Sequence[str]) -> list[str] | None:
    """What all versions import from elsewhere at the top of some modules, and of those of their own that these import.

    Args:
        versions: Which.
        modules: Names of modules of theirs.

    Returns:
        Names in the order of the first version's imports; what is imported inside functions is not among them. None where a
        version sets variables of the environment: libraries look at them while they are imported.
    """
    found = [_elsewhere(version, modules) for version in versions]
    if None in found:
        return None
    first, *others = found
    return [name for name in first if all(name in other for other in others)]


def _elsewhere(version: Version, modules: Sequence[str]) -> dict[str, None] | None:
    folders = [Path(folder) for folder in version.import_folders]
    found: dict[str, None] = {}
    seen, waiting = set(), list(modules)
    while waiting:
        name = waiting.pop(0)
        files = list(_files(folders, name))
        if not files:
            found[name] = None
        for file, package in files:
            if file not in seen:
                seen.add(file)
                tree = _tree(file)
                if any(map(_sets_variable, ast.walk(tree))):
                    return None
                for imported, things in _imports(tree, package):
                    # of what lies outside, nobody knows what is a module
                    inside = any(
                        folder.joinpath(*imported.split(".")).is_dir() for folder in folders
                    )
                    waiting += [imported, *(f"{imported}.{thing}" for thing in things if inside)]
    return found


def _tree(file: Path) -> ast.Module:
    """A file's syntax; nothing where it cannot be read, as its version will say."""
    try:
        with warnings.catch_warnings(
            action="ignore"
        ):  # of doubtful escapes, which are the version's affair
            return ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return ast.Module([], [])


def _sets_variable(node: ast.AST) -> bool:
    """Whether it is `os.environ[...] = ...`, `os.environ.update(...)` or the like."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        changes = node.func.attr in ("setdefault", "update", "pop") and _is_environment(
            node.func.value
        )
        return changes or node.func.attr in ("putenv", "unsetenv")
    return (
        isinstance(node, ast.Subscript)
        and not isinstance(node.ctx, ast.Load)
        and _is_environment(node.value)
    )


def _is_environment(node: ast.AST) -> bool:
    return getattr(node, "attr", getattr(node, "id", "")) == "environ"


def _files(folders: Sequence[Path], name: str) -> Iterator[tuple[Path, str]]:
    """The files in these folders that run when a module is imported, of its packages and its own, each with its package."""
    parts = name.split(".")
    for folder in folders:
        for n in range(1, len(parts) + 1):
            place = folder.joinpath(*parts[:n])
            for file, package in (
                (place.with_suffix(".py"), parts[: n - 1]),
                (place / "__init__.py", parts[:n]),
            ):
                if file.is_file():
                    yield file, ".".join(package)


def _imports(tree: ast.Module, package: str) -> Iterator[tuple[str, list[str]]]:
    """What a file of a package imports when it is run, and what from it."""
    for node in tree.body:
        for statement in node.body if isinstance(node, ast.Try) else [node]:
            if isinstance(statement, ast.Import):
                yield from ((alias.name, []) for alias in statement.names)
            elif isinstance(statement, ast.ImportFrom):
                parts = package.split(".")
                above = parts[: len(parts) - statement.level + 1] if statement.level else []
                base = ".".join([*above, *filter(None, [statement.module])])
                yield base, [alias.name for alias in statement.names]
