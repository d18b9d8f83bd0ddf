"""Examples in the commands' help: each is one that the command takes."""

import shlex

import pytest

from nanolib.cli import main
from tests.processes import invoked

EXAMPLES = [
    (name, example.strip())
    for name, command in main.commands.items()
    for example in command.epilog.partition("Examples:\n")[2].splitlines()
]


def test_each_command_has_one_and_its_help_shows_it_in_a_line():
    assert {name for name, _ in EXAMPLES} == set(main.commands)
    for name, example in EXAMPLES:
        shown = invoked(name, "--help", terminal_width=80).output
        assert f"  {example}\n" in shown and shown.index("Examples:") > shown.index("Options:")


@pytest.mark.parametrize(("name", "example"), EXAMPLES)
def test_an_example_is_taken(name, example):
    words = [
        word for word in shlex.split(example) if "=" not in word or not word.split("=")[0].isupper()
    ]
    assert words[:2] == ["nano", name]
    command = main.commands[name]
    command.make_context(name, words[2:])  # raises what the command line would be refused for
