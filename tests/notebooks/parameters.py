"""Write the parameters cell of each notebook from its `Params`, in `make notebooks`."""

import inspect
import json
import re
from typing import Literal, get_args, get_origin

import nbformat

from nanolib.experiments import ALL
from nanolib.paths import checkout


def cell_of(params):
    """The parameters that people change, a line each: type, default and the class's words on it.

    The others are in `settings`. `papermill --help-notebook` reads the cell line by line and takes
    what has an equals sign as a parameter, so no comment within `settings` has one.
    """
    said = {}
    for base in reversed(params.__mro__):
        said |= _attributes(base.__doc__ or "")
    own = [name for name in params.__annotations__ if name in params.model_fields]
    texts = {}
    for name in dict.fromkeys([*own, *params.model_fields]):
        field = params.model_fields[name]
        default = json.loads(json.dumps(field.get_default(call_default_factory=True)))
        comment = f"{said[name]}{_choices(field.annotation, said[name])}"
        texts[name] = (type(default).__name__, _literal(default), comment)
    lines = ["{}: {} = {}  # {}".format(name, *texts.pop(name)) for name in params.MAIN or [*texts]]
    if not texts:
        return "\n".join(lines)
    settings = [f'    "{name}": {value},  # {text}' for name, (_, value, text) in texts.items()]
    own_name = (
        "you can set an entry by its own name too. An entry that you leave out keeps its default"
    )
    return "\n".join([*lines, "settings: dict = {", *settings, f"}}  # {own_name}"])


def _attributes(docstring):
    """Name → what a docstring in Google's form says of it, on one line, styled as a comment."""
    _, _, part = inspect.cleandoc(docstring).partition("Attributes:\n")
    entries = re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", part.split("\n\n")[0], re.MULTILINE)
    found = {}
    for name, text in entries:
        text = re.sub(r"\s+", " ", text).replace("`", "").removesuffix(".")
        is_word = re.match(r".[a-z ]", text)  # and no abbreviation
        found[name] = text[0].lower() + text[1:] if is_word else text
    return found


def _choices(annotation, said):
    """A parameter's values, where its words name neither all of them nor their place in nanolib."""
    inner = get_args(annotation)[0] if get_origin(annotation) is list else annotation
    values = [str(value) for value in get_args(inner)] if get_origin(inner) is Literal else []
    if "nanolib." in said or all(value in said for value in values):
        return ""
    return f": {', '.join(values)}"


def _literal(value):
    """As Python writes it, strings in double quotes, and several dicts of a list on a line each."""
    if isinstance(value, list) and len(value) > 1 and isinstance(value[0], dict):
        return "[\n" + "".join(f"    {_literal(item)},\n" for item in value) + "]"
    return json.dumps(value) if isinstance(value, str) else repr(value).replace("'", '"')


if __name__ == "__main__":
    for name, load in ALL.items():
        path = checkout() / "notebooks" / f"{name}.ipynb"
        notebook = nbformat.read(path, as_version=4)
        cell = next(one for one in notebook.cells if "parameters" in one.metadata.get("tags", []))
        cell.source = cell_of(load().Params)
        nbformat.write(notebook, path)
