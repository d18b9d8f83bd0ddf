"""The system's Chromium, from which nothing may leave this machine."""

import contextlib
import os
import re
import shutil
import subprocess
import sys
import time
import urllib.request
from types import SimpleNamespace

import pytest

from nanolib.paths import checkout
from tests.ports import free_port

_NAMES = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = next(filter(None, map(shutil.which, _NAMES)), None)
_QUIET = "--disable-background-networking --disable-component-update --disable-sync"
FLAGS = f"--no-sandbox --disable-gpu {_QUIET} --disable-dev-shm-usage".split()


@pytest.fixture(scope="module")  # one that idles starts processes of its own beside other tests
def browser():
    """Chromium without a window; skipped, with the reason, where there is none."""
    if CHROMIUM is None:
        missing = "no Chromium here: install Debian's chromium to run the browser tests"
        pytest.fail(missing) if os.environ.get("CI") else pytest.skip(missing)
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield chromium
        chromium.close()


_HERE = ("http://localhost", "http://127.0.0.1", "ws://localhost", "file:", "data:", "blob:")


@contextlib.contextmanager
def watching(browser):
    """A page and its complaints; its requests elsewhere are refused, and there must be none."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    page, left, complaints = context.new_page(), [], []

    def look(route):
        url = route.request.url
        if url.startswith(_HERE):
            route.continue_()
        else:
            left.append(url)
            route.abort()

    def listen(said):
        if said.type == "error":
            complaints.append(said.text)

    page.set_default_timeout(240_000)
    page.route("**/*", look)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("console", listen)
    page.on("dialog", lambda dialog: complaints.append(dialog.message))
    yield SimpleNamespace(page=page, complaints=complaints)
    context.close()
    assert left == []


@pytest.fixture
def watched(browser):
    with watching(browser) as made:
        yield made


def _take_less_time(folder):
    """How sure the figures are, and of which lengths, is nothing that a browser shows wrong."""
    shorter = {
        r"(budget_s: float =) [\d.]+": r"\1 0.03",
        r"(seq_lens: list =) \[256, 1024, 2048\]": r"\1 [64, 128]",
        r"(quality_steps\W+) \d+": r"\1 5",
    }
    for notebook in (folder / "notebooks").glob("*.ipynb"):
        text = notebook.read_text(encoding="utf-8")
        for value, less in shorter.items():
            text = re.sub(value, less, text)
        notebook.write_text(text, encoding="utf-8")


@pytest.fixture(scope="session")
def lab(tmp_path_factory):
    """JupyterLab on localhost over a copy of the notebooks: its address with the token."""
    folder = tmp_path_factory.mktemp("lab")
    shutil.copytree(checkout() / "notebooks", folder / "notebooks")
    _take_less_time(folder)
    port = free_port()
    environment = {
        "JUPYTER_CONFIG_DIR": str(folder / "config"),
        "JUPYTER_DATA_DIR": str(folder / "data"),
        "JUPYTER_RUNTIME_DIR": str(folder / "runtime"),
        "NANOLIB_OUTPUT": str(folder / "outputs"),
        "PYTHONPATH": str(checkout()),
    }
    options = f"--no-browser --ip=127.0.0.1 --port={port} --ServerApp.port_retries=0"
    options += " --IdentityProvider.token=t --allow-root --LabApp.news_url="
    options += " --LabApp.expose_app_in_browser=True"
    server = subprocess.Popen(
        [sys.executable, "-m", "jupyterlab", *options.split(), f"--notebook-dir={folder}"],
        env=os.environ | environment,
        stdout=(folder / "log").open("w"),
        stderr=subprocess.STDOUT,
    )
    try:
        for _ in range(600):
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/api?token=t").read()
                break
            except OSError:
                assert server.poll() is None, (folder / "log").read_text()
                time.sleep(0.1)
        yield f"http://127.0.0.1:{port}/lab/tree/notebooks/%s.ipynb?token=t&reset"
    finally:
        server.terminate()
        server.wait(20)
