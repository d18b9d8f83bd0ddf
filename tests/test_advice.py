"""Advice that can be followed: each parameter, command and package that a sentence names is there, for its notebook."""

import ast
import functools
import inspect
import re
import shlex
import tomllib
from pathlib import Path

import pytest
import yaml

import nanolib
from nanolib import cli
from nanolib.experiments import ALL
from nanolib.experiments.warmup.cases import _uncut
from nanolib.measurement import FLAG_TEXT, Flag
from nanolib.models.attention.patterns import Options
from nanolib.models.generation import WITHOUT_DECODING
from nanolib.models.transformer import WITHOUT_LOSS

PACKAGE = Path(nanolib.__file__).parent
NOTEBOOKS = {name: set(load().Params.model_fields) for name, load in ALL.items() if name != "summary"}
EVERYWHERE = set.intersection(*NOTEBOOKS.values())
PARAMETERS = set.union(*NOTEBOOKS.values())

# Words of an advice that are a parameter elsewhere, and here a word like any other: (notebook, word).
PLAIN = {("distributed", "threads"), ("attention", "sparse"), ("model", "attention")}
# Names inside a parameter's values, by notebook.
INSIDE = {"attention": set(Options.model_fields)}
# Files outside a notebook's folder, and the notebooks that say what stands in them.
SHARED = {"report/roofline.py": ["attention", "model"]}
# What follows "nano" in a sentence, or in a process's name, and is no command.
NO_COMMANDS = {"inside", "rank"}


def _strings(tree):
    """The text of each string that is no docstring; what is filled in later is a `{}`."""
    docstrings = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node, clean=False):
            docstrings.add(id(node.body[0].value))
    parts = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        if id(node) not in docstrings | parts and (text := _text(node)) is not None:
            yield text


def _text(node):
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part) or "{}" for part in node.values)
    return None


def _advice(tree):
    """What claims of a module advise: the argument, what its name is set to, what a function of the module makes of it."""
    for call in ast.walk(tree):
        if isinstance(call, ast.Call) and getattr(call.func, "id", "") == "Claim":
            for found in [*call.args[2:3], *(word.value for word in call.keywords if word.arg == "advice")]:
                yield from _told(tree, found)
                if isinstance(found, ast.Name):
                    for value in _values(tree, found.id):
                        yield from _told(tree, value)


def _values(tree, name):
    """What a name is set to in a module: alone, as one of several, or in a loop."""
    for node in ast.walk(tree):
        pairs = []
        if isinstance(node, ast.Assign):
            pairs = [(target, node.value) for target in node.targets]
        elif isinstance(node, ast.AugAssign | ast.For):
            pairs = [(node.target, node.value if isinstance(node, ast.AugAssign) else node.iter)]
        for target, value in pairs:
            several = isinstance(target, ast.Tuple) and len(target.elts) == len(getattr(value, "elts", ()))
            for one, its in zip(target.elts, value.elts, strict=True) if several else [(target, value)]:
                if name in {part.id for part in ast.walk(one) if isinstance(part, ast.Name)}:
                    yield its


def _told(tree, node):
    """The texts of an expression, and of what the module's functions in it return; not the names of columns."""
    columns = {id(part) for one in ast.walk(node) if isinstance(one, ast.Subscript) for part in ast.walk(one.slice)}
    called = {one.func.id for one in ast.walk(node) if isinstance(one, ast.Call) and isinstance(one.func, ast.Name)}
    lines = [
        line.value
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef) and function.name in called
        for line in ast.walk(function)
        if isinstance(line, ast.Return) and line.value is not None
    ]
    for part in (part for one in (node, *lines) for part in ast.walk(one) if id(part) not in columns):
        if (text := _text(part)) is not None and " " in text:
            yield text


def _views():
    """(notebook, module) of all that makes claims about a notebook."""
    for file in sorted(PACKAGE.rglob("*.py")):
        inside = file.relative_to(PACKAGE).as_posix()
        parts = inside.split("/")
        of = [parts[1]] if parts[0] == "experiments" and len(parts) > 2 else SHARED.get(inside, [])
        for notebook in of:
            if notebook in NOTEBOOKS:
                yield notebook, inside


def _unknown(notebook, text):
    """Words of a text that look like a parameter, or are one of another notebook, and are none of this one."""
    known = NOTEBOOKS[notebook] | INSIDE.get(notebook, set())
    names = set(re.findall(r"\b[a-z]+(?:_[a-z0-9]+)+\b", text)) | set(re.findall(r"\b([a-z]\w*)[:=] ?[\[{\d]", text))
    names |= {word for word in re.findall(r"[a-z_]+", text) if word in PARAMETERS}
    return {name for name in names - known if (notebook, name) not in PLAIN}


@pytest.mark.parametrize(("notebook", "module"), [*_views()])
def test_no_advice_names_a_parameter_that_the_notebook_lacks(notebook, module):
    tree = ast.parse((PACKAGE / module).read_text("utf-8"))
    found = {text: _unknown(notebook, text) for text in _advice(tree) if not text.startswith("nano ")}
    assert not {text: names for text, names in found.items() if names}


def test_the_advice_of_each_section_is_found():
    """The walk above sees what people are told: one that finds nothing would pass."""
    told = {notebook: set() for notebook in NOTEBOOKS}
    for notebook, module in _views():
        told[notebook] |= {*_advice(ast.parse((PACKAGE / module).read_text("utf-8")))}
    assert all(told.values())
    assert any("block_size" in text for text in told["attention"]) and any("{}" in text for text in told["distributed"])
    assert _unknown("attention", "Set model and corpus, or quality_nothing") == {"model", "corpus", "quality_nothing"}


@pytest.mark.parametrize("flag", list(Flag))
def test_a_flag_names_parameters_of_every_notebook_that_it_is_seen_in(flag):
    names = set(re.findall(r"\b[a-z]+(?:_[a-z]+)+\b", FLAG_TEXT[flag]))
    assert names <= (INSIDE["attention"] if flag is Flag.NOT_SPARSE else EVERYWHERE)


def test_a_setting_with_few_steps_is_not_told_to_raise_a_budget_that_it_has_not():
    assert Flag.FEW_BLOCKS not in _uncut([10.0, 11.0, 12.0, 10.0, 11.0, 12.0], "forward", "clock", {}).flags


@functools.cache
def _messages():
    files = sorted(PACKAGE.rglob("*.py"))
    strings = [(file, text) for file in files for text in _strings(ast.parse(file.read_text("utf-8")))]
    return [(file.relative_to(PACKAGE).as_posix(), text) for file, text in strings]


@pytest.mark.parametrize("text", [WITHOUT_LOSS, WITHOUT_DECODING])
def test_what_leaves_a_part_out_is_valid_in_the_notebook_that_it_names(text):
    found = re.findall(r"(.+?) in (\w+)(?:, |$)", text)
    assert len(found) >= 2 and set(re.findall(r"(\w+): ", text)) <= PARAMETERS
    for settings, notebook in found:
        values = yaml.safe_load("{" + settings.replace(" and ", ", ") + "}")
        assert set(values) <= NOTEBOOKS[notebook] and ALL[notebook]().Params(**values)


# Where errors are raised that several notebooks show: they name the notebook beside what it alone has.
MODELS = sorted((PACKAGE / "models").rglob("*.py"))
STEPS = PACKAGE / "experiments" / "model" / "steps.py"


@pytest.mark.parametrize("file", [*MODELS, STEPS], ids=lambda file: file.name)
def test_an_error_that_several_notebooks_show_names_what_all_of_them_have(file):
    users = set.intersection(*(NOTEBOOKS[name] for name in ("model", "warmup", "energy", "fp8")))
    for text in _strings(ast.parse(file.read_text("utf-8"))):
        for name in re.findall(r"\b(?:set|raise|lower|or) (\w+) to\b|\b(\w+) to (?:false|0)\b", text):
            assert {*name} - {""} - PARAMETERS or {*name} - {""} <= users, text


def test_commands_in_messages_are_there_with_their_options():
    commands = cli.main.commands
    seen = set()
    for module, text in _messages():
        for said in re.findall(r"(?:^|run: |run |, or |, |`|; |until then, |write: )nano ([a-z]+(?: [^;,`]*)?)", text):
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
            if name == "run" and words[:1] == ["quick"] and len(words) > 1 and words[1].isidentifier():
                assert words[1] in ALL, (module, text)
    assert {"run", "doctor", "ab", "compare", "history", "clean"} <= seen


def test_packages_are_installed_from_the_checkout_and_exist():
    """The index's nanolib is another project."""
    project = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text("utf-8"))["project"]
    extras = set()
    for module, text in _messages():
        assert not re.search(r"nanolib\[|pip install nanolib", text), (module, text)
        extras |= {*re.findall(r"pip install -e ['\"]\.\[(\w+)\]['\"]", text)}
    assert extras == {"hf", "ray", "amd", "apple", "cuda"} <= set(project["optional-dependencies"])


def test_no_advice_is_to_distrust_a_number():
    assert not [(module, text) for module, text in _messages() if re.search(r"\bdistrust|\btrust no\b", text)]


def test_the_notebooks_tell_nobody_to_install_nanolib_from_the_index():
    folder = PACKAGE.parent
    pages = [*folder.glob("*.md"), *(folder / "docs").rglob("*.md"), *(folder / "notebooks").glob("*.ipynb")]
    assert pages and not [page for page in pages if re.search(r"pip install ['\"]?nanolib", page.read_text("utf-8"))]


def test_the_walk_reads_what_a_claim_takes():
    from nanolib.report.claim import Claim

    assert [*inspect.signature(Claim).parameters][:3] == ["answer", "sure", "advice"]
