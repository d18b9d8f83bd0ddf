"""Each public name has an example that runs, and a place on the API page."""

import doctest
import importlib
import inspect

import pytest

from docs.api import MODULES, write

PUBLIC = {
    f"{module.__name__}.{name}": getattr(module, name)
    for module in map(importlib.import_module, MODULES)
    for name in module.__all__
    if callable(getattr(module, name))
}
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_name_has_an_example_that_runs(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = doctest.DocTestFinder(recurse=False).find(
        PUBLIC[name], name, inspect.getmodule(PUBLIC[name])
    )
    examples = [test for test in found if test.examples]
    assert examples, f"{name}: its docstring has no example"
    for test in examples:
        said = []
        assert not doctest.DocTestRunner(optionflags=FLAGS).run(test, out=said.append).failed, (
            "".join(said)
        )


def test_the_api_page_shows_each_public_name_with_its_example(tmp_path):
    assert write(tmp_path).read_text()
    for name in PUBLIC:
        module, _, own = name.rpartition(".")
        page = (tmp_path / f"{module.replace('.', '/')}.html").read_text()
        assert f'id="{own}"' in page and "&gt;&gt;&gt;" in page
