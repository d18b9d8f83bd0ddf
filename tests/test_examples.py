"""Examples in the commands' help: each is one that the command takes."""

import shlex

import pytest

from nanolib.cli import main
from tests.processes import invoked


@pytest.mark.parametrize("name", main.commands)
def test_a_command_has_examples_that_it_takes_and_its_help_shows_each_in_a_line(name):
    command = main.commands[name]
    examples = command.epilog.partition("Examples:\n")[2].splitlines()
    assert examples
    shown = invoked(name, "--help", terminal_width=80).output
    assert shown.index("Examples:") > shown.index("Options:")
    for example in map(str.strip, examples):
        assert f"  {example}\n" in shown
        words = shlex.split(example)
        assert words[:2] == ["nano", name]
        command.make_context(name, words[2:])  # raises what the command line would be refused for
