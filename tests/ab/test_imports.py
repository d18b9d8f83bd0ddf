from pathlib import Path

import pytest

from nanolib.ab.imports import imported_by_all
from nanolib.ab.worktree import Version


@pytest.fixture
def version(tmp_path):
    def make(name, folder="", **files):
        for path, text in files.items():
            file = (
                tmp_path / name / (path.replace("__", "/").replace("/package", "/__init__") + ".py")
            )
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        return Version(name, "", tmp_path / name, Path(folder))

    return make


def _imported(*versions, module="work"):
    return imported_by_all(versions, [module])


def test_what_is_imported_at_the_top_is_found_in_its_order(version):
    text = '"""Text."""\nimport torch.nn, json as j\nfrom numpy.linalg import norm\n'
    text += (
        "try:\n    import scipy\nexcept ImportError:\n    pass\ndef later():\n    import pandas\n"
    )
    assert _imported(version("a", work=text)) == ["torch.nn", "json", "numpy.linalg", "scipy"]


def test_own_modules_are_followed_and_not_named(version):
    a = version(
        "a",
        work="import own.deep.leaf\nfrom own import thing, value\nimport json",
        own__package="import math\nvalue = 1",
        own__thing="from . import value\nfrom .deep import leaf\nimport glob",
        own__deep__package="from ..other import x\nimport wave",
        own__deep__leaf="from . import missing\nimport work\nimport csv",
        own__other="import zlib",
        own__unused="import bz2",
    )
    assert sorted(_imported(a)) == ["csv", "glob", "json", "math", "wave", "zlib"]


def test_only_what_lies_outside_of_all_versions_and_is_imported_by_all(version):
    a = version("a", work="import json, wave, torch")
    b = version("b", work="import torch, json, wave", wave="import csv")
    assert _imported(a, b) == ["json", "torch"]
    assert _imported(a, version("c", work="import csv")) == []


def test_code_under_src_and_in_the_folder_of_the_command_counts(version):
    a = version("a", "tools", src__own="import json", tools__work="import own, wave")
    assert sorted(_imported(a)) == ["json", "wave"]


@pytest.mark.parametrize(
    "text",
    [
        "import os\nos.environ['OMP_NUM_THREADS'] = '1'",
        "import os\nos.environ.setdefault('A', '1')",
        "import os\ndef later():\n    os.environ.update(A='1')",
        "import os\nos.putenv('A', '1')",
    ],
)
def test_where_a_version_sets_variables_nothing_may_be_imported_before(version, text):
    calm = version(
        "a",
        work="import own, os\nprint(os.environ['HOME'], os.environ.get('A'))",
        own="import json",
    )
    assert sorted(_imported(calm)) == ["json", "os"]
    assert _imported(calm, version("b", work="import own, os", own=text)) is None
