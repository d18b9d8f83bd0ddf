"""The system's Chromium, from which nothing may leave this machine."""

import contextlib
import os
import re
import shutil
import subprocess
import sys
import time
import urllib.request

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


class Watched:
    """A page whose requests to anywhere else are refused and counted, and whose complaints are kept."""

    def __init__(self, browser):
        self.context = browser.new_context(viewport={"width": 1280, "height": 900})
        self.page, self.left, self.complaints = self.context.new_page(), [], []
        self.page.set_default_timeout(240_000)
        self.page.route("**/*", self._look)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("console", self._listen)
        self.page.on("dialog", lambda dialog: self.complaints.append(dialog.message))

    def _listen(self, said):
        self.complaints += [said.text] if said.type == "error" else []

    def _look(self, route):
        url = route.request.url
        if url.startswith(_HERE):
            route.continue_()
        else:
            self.left.append(url)
            route.abort()


@contextlib.contextmanager
def watching(browser):
    """A page under watch; at its end nothing has left this machine."""
    made = Watched(browser)
    yield made
    made.context.close()
    assert made.left == []


@pytest.fixture
def watched(browser):
    with watching(browser) as made:
        yield made


@contextlib.contextmanager
def as_it_was(page):
    """A page at which several tests look, since drawing it takes seconds: its size, its folds and the mouse are put back."""
    folds = page.evaluate("() => [...document.querySelectorAll('details')].map(one => one.open)")
    yield page
    page.set_viewport_size({"width": 1280, "height": 900})
    page.evaluate(
        "folds => document.querySelectorAll('details').forEach((one, at) => { one.open = folds[at]; })",
        folds,
    )
    page.mouse.move(0, 0)


def _take_less_time(folder):
    """How sure the figures are, and of which lengths, is nothing that a browser shows wrong."""
    shorter = {
        r"(budget_s: float =) [\d.]+": r"\1 0.03",
        r"(seq_lens: list =) \[256, 1024, 2048\]": r"\1 [64, 128]",
        r"(quality_(?:finetune_)?steps\W+) \d+": r"\1 5",
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
    own = ("config", "data", "runtime")
    environment = {f"JUPYTER_{name.upper()}_DIR": str(folder / name) for name in own}
    environment |= {"NANOLIB_OUTPUT": str(folder / "outputs"), "PYTHONPATH": str(checkout())}
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
