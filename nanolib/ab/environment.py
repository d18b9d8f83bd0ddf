"""Two environments: interpreters that the user names, or made from requirements, and what differs between them."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import json
import os
import re
import shutil
import site
import subprocess
import sys
import venv
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from nanolib.measurement import BadInput, shown
from nanolib.paths import expanded

OLDEST = (3, 11)  # what runs `server.py`
_MOST_NAMED = 3  # differences in a version's title
_LOOK_S, _INSTALL_S = 60, 1800
_TELL = (
    "import importlib.metadata as m, json, sys\n"
    "found = {}\n"  # of a package that lies in two folders the first is imported
    "for d in m.distributions():\n"
    "    name = d.metadata['Name']\n"
    "    if name: found.setdefault(name.lower().replace('_', '-'), d.version)\n"
    "print(json.dumps({'python': list(sys.version_info[:3]), 'packages': found}))"
)


@dataclass(frozen=True)
class Environment:
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


def inspected(python: str, option: str = "--python") -> Environment:
    """What an interpreter is.

    Args:
        python: Its path, or a name to be found on the path.
        option: How the user named it.

    Raises:
        BadInput: It is none, or too old.
    """
    found = shutil.which(expanded(python))
    if not found:
        raise BadInput(f"{option}: {shown(python)} is no program; name an interpreter, such as .venv/bin/python")
    found = str(Path(found).absolute())  # and not resolved: a venv's interpreter is known by its own path
    try:
        done = subprocess.run(
            [found, "-c", _TELL],
            capture_output=True,
            text=True,
            timeout=_LOOK_S,
            check=True,
            stdin=subprocess.DEVNULL,
            env=os.environ | {"PYTHONSAFEPATH": "1"},  # a json.py of the working folder is not what is asked
        )
        told = json.loads(done.stdout.splitlines()[-1])
        version = tuple(told["python"])
    except (OSError, subprocess.SubprocessError, ValueError, LookupError, TypeError):
        raise BadInput(f"{option}: {shown(python)} does not run Python; name an interpreter") from None
    if version < OLDEST:
        raise BadInput(
            f"{option}: {shown(python)} is Python {'.'.join(map(str, version))}; give one of {'.'.join(map(str, OLDEST))} or newer"
        )
    return Environment(found, told["packages"] | {"python": ".".join(map(str, version))})


def differences(a: Environment, b: Environment) -> list[tuple[str, str, str]]:
    """Name, version in A and in B of what is not the same in both; `none` where one lacks it."""
    names = sorted({**a.packages, **b.packages}, key=lambda name: (name != "python", name))
    pairs = [(name, a.packages.get(name, "none"), b.packages.get(name, "none")) for name in names]
    return [pair for pair in pairs if pair[1] != pair[2]]


def titles(a: Environment, b: Environment) -> tuple[str, str]:
    """What tells each from the other, short: `numpy 1.26.4`."""
    differ = differences(a, b)
    if not differ:
        return "the first interpreter", "the second interpreter"
    more = f" and {len(differ) - _MOST_NAMED} more" if len(differ) > _MOST_NAMED else ""
    named = [[f"{name} {versions[side]}" for name, *versions in differ[:_MOST_NAMED]] for side in (0, 1)]
    return tuple(", ".join(side) + more for side in named)


def made(requirement: str, log: Callable[[str], None] = lambda _: None) -> Environment:
    """This interpreter's environment with a package of another version: a venv before whose packages it looks.

    It is kept in the user's cache, with the list of all that it can import as its lock, and made anew where it no longer agrees
    with that.

    Args:
        requirement: As pip takes it: `numpy==1.26.4`, a wheel, a folder.
        log: Told when one is made.

    Raises:
        BadInput: It cannot be installed.
    """
    here = inspected(sys.executable)
    asked = requirement
    if (file := expanded(requirement)).is_file():  # another file may get the name of an earlier one
        asked = hashlib.sha256(file.read_bytes()).hexdigest()
    key = hashlib.sha256(json.dumps([sys.executable, here.packages, asked], sort_keys=True).encode()).hexdigest()[:16]
    folder = _cache() / key
    python, lock = folder / "bin" / "python", folder / "lock.json"
    with _one_at_a_time(folder):
        if lock.is_file() and python.exists():
            kept = inspected(str(python), "--with")
            if json.loads(lock.read_text()) == kept.packages:
                return kept
        log(f"making an environment with {requirement}; it is kept for the next time")
        shutil.rmtree(folder, ignore_errors=True)
        _install(requirement, folder)
        new = inspected(str(python), "--with")
        lock.write_text(json.dumps(new.packages, indent=1))
    return new


@contextmanager
def _one_at_a_time(folder: Path) -> Iterator[None]:
    """Two commands that want the same environment wait for each other."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        claim = folder.with_suffix(".lock").open("w")
    except OSError as error:
        raise BadInput(f"--with: {folder.parent} cannot be written ({error.strerror}); set XDG_CACHE_HOME") from None
    with claim:
        fcntl.flock(claim, fcntl.LOCK_EX)
        yield


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nanolib" / "environments"


def _install(requirement: str, folder: Path) -> None:
    """A venv that sees this environment's packages behind its own, and the requirement in it."""
    try:
        venv.create(folder, with_pip=False, symlinks=True)
        (own,) = folder.glob("lib/python*/site-packages")
        shared = [place for place in [*site.getsitepackages(), site.getusersitepackages()] if Path(place).is_dir()]
        (own / "behind.pth").write_text("".join(f"import site; site.addsitedir({place!r})\n" for place in shared))
        done = subprocess.run(
            [*_installer(folder / "bin" / "python"), requirement],
            capture_output=True,
            text=True,
            timeout=_INSTALL_S,
            stdin=subprocess.DEVNULL,
        )
        if done.returncode:
            said = [line for line in done.stderr.splitlines() if "error" in line.lower()] or ["no reason given"]
            raise BadInput(f"--with: {shown(requirement)} cannot be installed ({said[-1].strip()[:200]})")
    except BaseException as error:
        shutil.rmtree(folder, ignore_errors=True)
        if isinstance(error, OSError | subprocess.SubprocessError):
            raise BadInput(f"--with: {shown(requirement)} cannot be installed ({error})") from None
        raise


def _has_pip() -> bool:
    """By its metadata: to look for the module makes setuptools' hook give up its distutils, for the rest of this process."""
    try:
        return bool(importlib.metadata.version("pip"))
    except importlib.metadata.PackageNotFoundError:
        return False


def _installer(python: Path) -> Sequence[str]:
    if _has_pip():
        return [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-input", "--"]
    if uv := shutil.which("uv"):
        return [uv, "pip", "install", "--quiet", "--python", str(python), "--"]
    raise BadInput("--with: neither pip nor uv is here; install one, or give --python twice")
