"""Two environments: interpreters that the user names, and what differs between them."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from nanolib.measurement import BadInput, shown
from nanolib.paths import expanded

OLDEST = (3, 11)  # what runs `worker.py`
_MOST_NAMED = 3  # differences in a version's title
_LOOK_S = 60
_TELL = (
    "import importlib.metadata as m, json, sys\n"
    "found = {}\n"  # of a package that lies in two folders the first is imported
    "for d in m.distributions():\n"
    "    name = d.metadata['Name']\n"
    "    if name: found.setdefault(name.lower().replace('_', '-'), d.version)\n"
    "print(json.dumps({'python': list(sys.version_info[:3]), 'packages': found}))"
)


@dataclass(frozen=True)
class Interpreter:
    """An interpreter and what it can import.

    Attributes:
        python: The interpreter.
        packages: Name, in lower case → version; `python` is one of them.
    """

    python: str
    packages: Mapping[str, str]

    def lacks(self, package: str) -> list[str]:
        """What a package needs, as its metadata here say, and this environment has not; nothing where there are none."""
        try:
            needs = importlib.metadata.requires(package) or []
        except importlib.metadata.PackageNotFoundError:
            return []
        names = [re.split(r"[^\w.-]", need)[0].lower() for need in needs if "extra ==" not in need]
        return [name for name in names if name.replace("_", "-") not in self.packages]


def inspect_interpreter(python: str) -> Interpreter:
    """What an interpreter is.

    Args:
        python: Its path, or a name to be found on the path.

    Raises:
        BadInput: It is none, or too old.
    """
    found = shutil.which(expanded(python))
    if not found:
        raise BadInput(
            f"--python: {shown(python)} is no program; name an interpreter, such as .venv/bin/python"
        )
    found = str(
        Path(found).absolute()
    )  # and not resolved: a venv's interpreter is known by its own path
    try:
        done = subprocess.run(
            [found, "-c", _TELL],
            capture_output=True,
            text=True,
            timeout=_LOOK_S,
            check=True,
            stdin=subprocess.DEVNULL,
            env=os.environ
            | {"PYTHONSAFEPATH": "1"},  # a json.py of the working folder is not what is asked
        )
        told = json.loads(done.stdout.splitlines()[-1])
        version = tuple(told["python"])
    except (OSError, subprocess.SubprocessError, ValueError, LookupError, TypeError):
        raise BadInput(
            f"--python: {shown(python)} does not run Python; name an interpreter"
        ) from None
    if version < OLDEST:
        raise BadInput(
            f"--python: {shown(python)} is Python {'.'.join(map(str, version))}; give one of {'.'.join(map(str, OLDEST))} or newer"
        )
    return Interpreter(found, told["packages"] | {"python": ".".join(map(str, version))})


def differences(a: Interpreter, b: Interpreter) -> list[tuple[str, str, str]]:
    """Name, version in A and in B of what is not the same in both; `none` where one lacks it."""
    names = sorted({**a.packages, **b.packages}, key=lambda name: (name != "python", name))
    pairs = [(name, a.packages.get(name, "none"), b.packages.get(name, "none")) for name in names]
    return [pair for pair in pairs if pair[1] != pair[2]]


def titles(a: Interpreter, b: Interpreter) -> tuple[str, str]:
    """What tells each from the other, short: `numpy 1.26.4`."""
    differ = differences(a, b)
    if not differ:
        return "the first interpreter", "the second interpreter"
    more = f" and {len(differ) - _MOST_NAMED} more" if len(differ) > _MOST_NAMED else ""
    named = [
        [f"{name} {versions[side]}" for name, *versions in differ[:_MOST_NAMED]] for side in (0, 1)
    ]
    return tuple(", ".join(side) + more for side in named)
