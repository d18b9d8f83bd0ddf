import re
import tomllib

import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import nanolib
from nanolib.paths import checkout

ROOT = checkout()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_the_lock_pins_everything_that_the_project_asks_for():
    lines = (ROOT / "requirements.lock").read_text().splitlines()
    pinned = (line.split("==") for line in lines if line and not line.startswith("#"))
    pins = {canonicalize_name(name): version for name, version in pinned}
    for text in PROJECT["dependencies"] + PROJECT["optional-dependencies"]["dev"]:
        wanted = Requirement(text)
        assert wanted.specifier.contains(pins[canonicalize_name(wanted.name)]), text
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    assert {"pip": ["-r requirements.lock"]} in environment["dependencies"]


def test_nothing_installs_the_project_that_has_our_import_name_on_the_index():
    assert PROJECT["name"] != "nanolib"
    sources = ("*.md", "docs/*.md", "*.yml", "nanolib/**/*.py")
    for page in [page for pattern in sources for page in ROOT.glob(pattern)]:
        text = page.read_text(encoding="utf-8")
        assert not re.search(r"install [^\n`]*\bnanolib(?!-workbook)(\[|\s|`|$)", text), page


def test_the_citation_and_the_project_name_one_version_and_one_licence():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert (citation["version"], citation["license"]) == (PROJECT["version"], PROJECT["license"])
    assert nanolib.__version__ == PROJECT["version"]
    assert (ROOT / "CHANGELOG.md").read_text().splitlines()[2] == f"## {PROJECT['version']}"
    assert "Version 2.0, January 2004" in (ROOT / "LICENSE").read_text()


def test_jupyterlab_is_open_to_this_machine_alone_and_keeps_its_token():
    lines = (ROOT / "Makefile").read_text().splitlines()
    (line,) = [line for line in lines if "jupyter lab" in line]
    assert "--ip=127.0.0.1" in line and "token" not in line and "password" not in line
