"""How tests run commands, and tell processes apart."""

import subprocess

import psutil


def ended(*command, **options):
    """A command when it has ended, however it did: its exit code, output and errors."""
    return subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=600, **options
    )


def said(process):
    """Its command, which a rank has from who forked it; empty where it has ended."""
    try:
        if process.status() == psutil.STATUS_ZOMBIE:
            return ""
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""
