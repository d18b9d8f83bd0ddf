"""Each command and option that a sentence names exists."""

import ast
import re
from pathlib import Path

import nanolib
from nanolib import cli
from nanolib.experiments import ALL

PACKAGE = Path(nanolib.__file__).parent

# What follows "nano" in a sentence, or in a process's name, and is no command.
NO_COMMANDS = {"inside", "rank", "compares"}
COMMAND = re.compile(
    r"(?:^|run: |run |, or |, |`|; |until then, |write: )nano ([a-z]+)((?: [^;,`]*)?)"
)


def _text(node):
    """Return the text of a string; a value that is filled in later is `{}`."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part) or "{}" for part in node.values)
    return ""


# Of each file its texts, docstrings among them.
MESSAGES = [
    (file.name, _text(node))
    for file in sorted(PACKAGE.rglob("*.py"))
    for node in ast.walk(ast.parse(file.read_text("utf-8")))
]


def test_commands_in_messages_are_there_with_their_options():
    seen = set()
    for module, text in MESSAGES:
        for name, rest in COMMAND.findall(text):
            if name in NO_COMMANDS:
                continue
            seen.add(name)
            options = {
                option for parameter in cli.main.commands[name].params for option in parameter.opts
            }
            assert {*re.findall(r"(?<!\S)--[a-z-]+(?!\S)", rest)} <= options, (module, text)
            assert name != "run" or {*re.findall(r"^ quick ([a-z]\w*)", rest)} <= {*ALL}, (
                module,
                text,
            )
    assert {"run", "doctor", "ab", "compare", "history", "clean"} <= seen
