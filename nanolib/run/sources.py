"""Which code makes a number: a hash of nanolib's sources, and the revision of a checkout."""

from __future__ import annotations

import functools
import hashlib
import subprocess
from pathlib import Path

import nanolib


@functools.cache
def source_digest() -> str:
    """A hash of nanolib's own sources: edited code is another version, whatever git says."""
    root = Path(nanolib.__file__).parent
    digest = hashlib.sha256()
    for file in sorted(root.rglob("*.py")):
        digest.update(str(file.relative_to(root)).encode() + file.read_bytes())
    return digest.hexdigest()[:12]


@functools.cache
def git_revision() -> str:
    """The revision of nanolib's own checkout, with `+` when files differ from it; empty outside one."""
    root = Path(nanolib.__file__).parent.parent
    if not (root / ".git").exists():
        return ""
    command = ["git", "-C", str(root), "describe", "--always", "--dirty=+", "--exclude=*"]
    try:
        return subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=10
        ).stdout.strip()
    except (
        OSError,
        subprocess.SubprocessError,
    ):  # no git, or no commit yet: the sources' digest still tells
        return ""
