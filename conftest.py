"""Tests write only to a folder of their own, and wait for no device that someone measures on."""

import atexit
import gc
import os
import shutil
import signal
import tempfile
from pathlib import Path

import hypothesis
import pytest

hypothesis.settings.register_profile(
    "untimed", deadline=None
)  # no test times anything, hypothesis neither
hypothesis.settings.load_profile("untimed")

_FOLDER = Path(tempfile.mkdtemp(prefix="nanolib-tests-"))
atexit.register(shutil.rmtree, _FOLDER, ignore_errors=True)
# compiled once for all workers, which inherit this
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(_FOLDER / "inductor"))
os.environ["TMPDIR"] = str(_FOLDER)  # device locks lie there
tempfile.tempdir = None
os.environ["NANOLIB_OUTPUT"] = str(_FOLDER / "outputs")
if "PYTEST_XDIST_WORKER" in os.environ:
    # workers share the cores; threads that spin for each other take thrice as long
    os.environ.setdefault("OMP_NUM_THREADS", "1")
# a shell's background job ignores it, and its children with it
signal.signal(signal.SIGINT, signal.default_int_handler)
os.environ.pop(
    "JPY_SESSION_NAME", None
)  # notebooks run here as in a batch, from a Jupyter terminal too


@pytest.fixture(autouse=True)
def _output_folder_stays(monkeypatch):
    """A command's --output sets the variable for its own process; in tests that process goes on."""
    monkeypatch.setenv("NANOLIB_OUTPUT", os.environ["NANOLIB_OUTPUT"])


@pytest.fixture
def small_ceilings(monkeypatch):
    """For sweeps where no ceiling decides what is asserted: each measures its own, small ones."""
    from nanolib.run import peaks

    monkeypatch.setattr(peaks, "_MATRIX", {"cpu": 256})
    monkeypatch.setattr(peaks, "_COPY_BYTES", {"cpu": 2**22})


@pytest.fixture(autouse=True, scope="module")
def _old_objects_are_set_aside():
    """Each measurement collects garbage first, which would visit all that other files imported."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def pytest_collection_modifyitems(items):
    """Files that take long come first, so that no worker is left with one of them at the end."""
    long = {
        i.path
        for i in items
        if i.path.suffix == ".ipynb"
        or i.get_closest_marker("slow")
        or i.get_closest_marker("notebook")
    }
    items.sort(key=lambda item: item.path not in long)
