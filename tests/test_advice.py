"""Each parameter, command and package that a sentence names exists, for its notebook."""

import ast
import functools
import re
import shlex
import tomllib
from pathlib import Path

import pytest

import nanolib
from nanolib import cli
from nanolib.experiments import ALL
from nanolib.models.attention.patterns import Options
from tests.test_features import SAID

PACKAGE = Path(nanolib.__file__).parent

# What follows "nano" in a sentence, or in a process's name, and is no command.
NO_COMMANDS = {"inside", "rank", "compares"}


def _text(node):
    """Return the text of a string; a value that is filled in later is `{}`."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part) or "{}" for part in node.values)
    return None


@functools.cache
def _messages():
    """Of each file its texts, docstrings among them."""
    messages = []
    for file in sorted(PACKAGE.rglob("*.py")):
        texts = map(_text, ast.walk(ast.parse(file.read_text("utf-8"))))
        messages += [(file.relative_to(PACKAGE).as_posix(), text) for text in texts if text]
    return messages


def test_commands_in_messages_are_there_with_their_options():
    commands = cli.main.commands
    seen = set()
    for module, text in _messages():
        for said in re.findall(
            r"(?:^|run: |run |, or |, |`|; |until then, |write: )nano ([a-z]+(?: [^;,`]*)?)", text
        ):
            try:
                name, *words = shlex.split(said)
            except ValueError:
                name, *words = said.split()
            if name in NO_COMMANDS:
                continue
            assert name in commands, (module, text)
            seen.add(name)
            options = {option for parameter in commands[name].params for option in parameter.opts}
            given = {word for word in words if re.fullmatch(r"--[a-z-]+", word)}
            assert given <= options, (module, text)
            if (
                name == "run"
                and words[:1] == ["quick"]
                and len(words) > 1
                and words[1].isidentifier()
            ):
                assert words[1] in ALL, (module, text)
    assert {"run", "doctor", "ab", "compare", "history", "clean"} <= seen


def test_packages_are_installed_from_the_checkout_and_exist():
    """The index's nanolib is another project."""
    project = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text("utf-8"))["project"]
    extras = set()
    for module, text in _messages():
        assert not re.search(r"nanolib\[|pip install nanolib", text), (module, text)
        extras |= {*re.findall(r"['\"]?\.\[(\w+)\]['\"]?", text)}
    assert extras == {"hf", "ray", "amd", "apple", "cuda"} <= set(project["optional-dependencies"])


NOTEBOOKS = {
    name: set(load().Params.model_fields) for name, load in ALL.items() if name != "summary"
}


@pytest.mark.parametrize("notebook", NOTEBOOKS)
def test_no_advice_names_a_parameter_of_another_notebook_alone(notebook):
    """Of what stored results are told: the sentences of the list."""
    known = NOTEBOOKS[notebook] | set(Options.model_fields)
    told = " ".join(SAID["report"]["sections"][notebook]["verdict"])
    advice = " ".join(re.findall(r"Next: ([^.]*)", told))
    names = set(re.findall(r"\b[a-z]+(?:_[a-z0-9]+)+\b", advice))
    assert not names - known
