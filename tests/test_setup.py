import re
import subprocess
import sys
import tomllib

import yaml
from packaging.requirements import Requirement

import nanolib
from nanolib.paths import checkout

ROOT = checkout()


def _pins():
    lines = (ROOT / "requirements.lock").read_text().splitlines()
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))


def _canonical(name):
    return re.sub(r"[-_.]+", "-", name).lower()


def test_the_lock_pins_everything_that_the_project_asks_for():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pins = {_canonical(name): version for name, version in _pins().items()}
    for text in project["dependencies"] + project["optional-dependencies"]["dev"]:
        wanted = Requirement(text)
        assert _canonical(wanted.name) in pins, text
        assert wanted.specifier.contains(pins[_canonical(wanted.name)]), text
    assert pins["torch"] == "2.13.0"


def test_no_page_installs_the_project_that_has_our_import_name_on_the_index():
    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["name"] != "nanolib"
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *ROOT.glob("*.yml")]
    for page in pages:
        text = page.read_text(encoding="utf-8")
        assert not re.search(r"install [^\n`]*\bnanolib(?!-workbook)(\[|\s|`|$)", text), page


def test_the_conda_environment_installs_the_lock():
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    pip = next(entry["pip"] for entry in environment["dependencies"] if isinstance(entry, dict))
    assert pip == ["-r requirements.lock"]


def test_importing_what_comes_first_imports_nothing_heavy():
    heavy = ("torch", "pandas", "pydantic", "scipy", "altair")
    code = (
        f"import sys, nanolib.cli, nanolib.store; print([m for m in {heavy} if m in sys.modules])"
    )
    command = [sys.executable, "-c", code]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "[]\n"


def test_the_citation_and_the_project_name_one_version_and_one_licence():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert (citation["version"], citation["license"]) == (project["version"], project["license"])
    assert nanolib.__version__ == project["version"]
    assert (ROOT / "CHANGELOG.md").read_text().splitlines()[2] == f"## {project['version']}"
    assert "Version 2.0, January 2004" in (ROOT / "LICENSE").read_text()
