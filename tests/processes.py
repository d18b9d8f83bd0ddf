"""How tests run commands, and tell processes apart."""

import site
import subprocess
import venv

import psutil
from click.testing import CliRunner

from nanolib.cli import main


def ended(*command, **options):
    """A command when it has ended, however it did: its exit code, output and errors."""
    return subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=600, **options
    )


def invoked(*words, **options):
    """A command of nano when it has ended, in this process: its exit code and output."""
    return CliRunner().invoke(main, [*map(str, words)], **options)


def new_environment(folder):
    """An environment with this one's packages after its own: its interpreter, and its folder."""
    venv.create(folder, symlinks=True)
    (own,) = folder.glob("lib/python*/site-packages")
    (own / "behind.pth").write_text("\n".join(site.getsitepackages()))
    return str(folder / "bin" / "python"), own


def said(process):
    """Its command, which a rank has from who forked it; empty where it has ended."""
    try:
        if process.status() == psutil.STATUS_ZOMBIE:
            return ""
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""
