"""Two environments: interpreters that the user names, and how their packages differ."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from nanolib.measurement import BadInput, shown
from nanolib.paths import expanded

OLDEST = (3, 11)  # that runs `worker.py`
_MOST_NAMED = 3  # differences in a version's title
_TIMEOUT_S = 60
# If a package is in two folders, the first one is imported.
_LIST_PACKAGES = """
import importlib.metadata as m, json, sys
found = {}
for d in m.distributions():
    name = d.metadata['Name']
    if name: found.setdefault(name.lower().replace('_', '-'), d.version)
print(json.dumps({'python': list(sys.version_info[:3]), 'packages': found}))
"""


@dataclass(frozen=True)
class Interpreter:
    """An interpreter and what it can import.

    Attributes:
        python: The interpreter.
        packages: Name, in lower case → version; `python` is one of them.
    """

    python: str
    packages: Mapping[str, str]


def inspect_interpreter(python: str) -> Interpreter:
    """List the packages of an interpreter.

    Args:
        python: Its path, or a name to be found on the path.

    Raises:
        BadInput: It is not an interpreter, or too old.
    """
    found = shutil.which(expanded(python))
    if not found:
        raise BadInput(
            f"--python: {shown(python)} is not a program; name an interpreter, such as .venv/bin/python"
        )
    found = str(Path(found).absolute())  # not resolved: its own path leads to its environment
    try:
        done = subprocess.run(
            [found, "-c", _LIST_PACKAGES],
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=True,
            stdin=subprocess.DEVNULL,
            # a json.py of the working folder must not be imported
            env=os.environ | {"PYTHONSAFEPATH": "1"},
        )
        answer = json.loads(done.stdout.splitlines()[-1])
        version = tuple(answer["python"])
    except (OSError, subprocess.SubprocessError, ValueError, LookupError, TypeError):
        raise BadInput(
            f"--python: {shown(python)} does not run Python; name an interpreter"
        ) from None
    number, oldest = (".".join(map(str, one)) for one in (version, OLDEST))
    if version < OLDEST:
        raise BadInput(f"--python: {shown(python)} is Python {number}; give {oldest} or newer")
    return Interpreter(found, answer["packages"] | {"python": number})


def differences(a: Interpreter, b: Interpreter) -> list[tuple[str, str, str]]:
    """List what differs: name, version in A and version in B; `none` if one lacks it."""
    names = sorted({**a.packages, **b.packages}, key=lambda name: (name != "python", name))
    pairs = [(name, a.packages.get(name, "none"), b.packages.get(name, "none")) for name in names]
    return [pair for pair in pairs if pair[1] != pair[2]]


def titles(a: Interpreter, b: Interpreter) -> tuple[str, str]:
    """Name each by how it differs from the other, briefly: `numpy 1.26.4`."""
    differ = differences(a, b)
    if not differ:
        return "the first interpreter", "the second interpreter"
    rest = len(differ) - _MOST_NAMED
    more = f" and {rest} more" if rest > 0 else ""
    of_a = ", ".join(f"{name} {version}" for name, version, _ in differ[:_MOST_NAMED])
    of_b = ", ".join(f"{name} {version}" for name, _, version in differ[:_MOST_NAMED])
    return of_a + more, of_b + more
