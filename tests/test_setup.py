import re
import tomllib

import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

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
    assert {"pip": ["-r requirements.lock"]} in yaml.safe_load(
        (ROOT / "environment.yml").read_text()
    )["dependencies"]


def test_nothing_installs_the_project_that_has_our_import_name_on_the_index():
    assert PROJECT["name"] != "nanolib"
    sources = ("*.md", "docs/*.md", "*.yml", "nanolib/**/*.py")
    for page in [page for pattern in sources for page in ROOT.glob(pattern)]:
        text = page.read_text(encoding="utf-8")
        assert not re.search(r"install [^\n`]*\bnanolib(?!-workbook)(\[|\s|`|$)", text), page
