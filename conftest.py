"""Tests write nowhere but to a folder of their own, and wait for no device that someone measures on."""

import os
import tempfile
from pathlib import Path

_FOLDER = Path(tempfile.mkdtemp(prefix="nanolib-tests-"))
os.environ["TMPDIR"] = str(_FOLDER)  # device locks lie there
tempfile.tempdir = None
os.environ["NANOLIB_OUTPUT"] = str(_FOLDER / "outputs")
os.environ.pop("JPY_SESSION_NAME", None)  # notebooks run here as in a batch, from a Jupyter terminal too
