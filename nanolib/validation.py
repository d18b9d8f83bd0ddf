"""Bad input gets one clear line: pydantic models whose errors name the field, the value and the remedy."""

from __future__ import annotations

import math
import os
import re
import stat
import types
import typing
import unicodedata
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import pydantic
import yaml

from nanolib.measurement import MOST_LABEL, RUN_ID, BadInput, did_you_mean, shown

_REMEDY = {
    "greater_than": "give a number above {gt}",
    "greater_than_equal": "give {ge} or more",
    "less_than": "give a number below {lt}",
    "less_than_equal": "give {le} or less",
    "finite_number": "give a finite number",
    "int_parsing": "give a whole number",
    "int_type": "give a whole number",
    "int_from_float": "give a whole number",
    "float_parsing": "give a number",
    "float_type": "give a number",
    "bool_parsing": "give true or false",
    "bool_type": "give true or false",
    "string_type": "give text",
    "list_type": "give a list, such as [1, 2]",
    "dict_type": "give a mapping, such as {{key: value}}",
    "literal_error": "use one of {expected}",
    "too_short": "give at least {min_length} value(s)",
    "too_long": "give at most {max_length} values",
    "string_too_long": "give at most {max_length} characters",
}


_MAX_BYTES = 100_000  # of a params file
_MAX_VALUES = 10_000  # in a document, each alias counted as what it stands for
_MAX_DEPTH = 32
_MAX_LINES = 20  # of complaints
_OTHER_NUMBER = re.compile(r"[-+]?(0[0-7_]+|[0-9][0-9_]*(:[0-9.]+)+)")  # to base 8 or 60, as YAML 1.1 has it
_MAX_INT = 2**63 - 1  # what a database can hold
_UNPRINTABLE = (
    "Cc",
    "Cf",
    "Cs",
    "Zl",
    "Zp",
)  # control characters, those that turn text around, half characters, line ends


def free_label(text: str) -> str:
    """`text`, when it does not name runs already.

    Raises:
        ValueError: It does.
    """
    if text in ("all", "latest", "newest") or text.startswith("latest~") or RUN_ID.fullmatch(text):
        raise ValueError(f"{shown(text)} names runs already; choose another")
    return text


def label_of(name: str, text: str) -> str:
    """`text`, when it can stand in a line, is no longer than a name and names no runs already.

    Raises:
        BadInput: It cannot, or is longer.
    """
    if len(text) > MOST_LABEL:
        raise BadInput(f"{name}: {shown(text)} will not do; give at most {MOST_LABEL} characters")
    if complaint := _misfit(text):
        raise BadInput(f"{name}: {complaint}")
    try:
        return free_label(text)
    except ValueError as error:
        raise BadInput(f"{name}: {error}") from None


def _misfit(value: Any, depth: int = 0) -> str:
    """What is wrong with a value that JSON, a database or a line of text cannot hold; empty where they can."""
    remedy = ""
    if isinstance(value, str):
        if odd := [c for c in value if unicodedata.category(c) in _UNPRINTABLE]:
            remedy = f"leave out the unprintable character {odd[0]!a}"
    elif isinstance(value, Mapping | list | tuple):
        if len(value) > _MAX_VALUES:
            remedy = f"give at most {_MAX_VALUES} values"
        elif depth == _MAX_DEPTH:
            remedy = f"nest at most {_MAX_DEPTH} levels"
        elif isinstance(value, Mapping) and (odd := [key for key in value if not isinstance(key, str)]):
            remedy = f"give names as keys, not {shown(odd[0])}"
        else:
            inner = [*value, *value.values()] if isinstance(value, Mapping) else value
            return next(filter(None, (_misfit(item, depth + 1) for item in inner)), "")
    elif isinstance(value, float):
        remedy = "" if math.isfinite(value) else "give a finite number"
    elif isinstance(value, int):
        remedy = "" if abs(value) <= _MAX_INT else f"give a number up to {_MAX_INT}"
    elif value is not None:
        remedy = f"give text, numbers, lists and mappings alone, not {type(value).__name__}"
    return f"{shown(value)} will not do; {remedy}" if remedy else ""


def _path(location: tuple[int | str, ...]) -> str:
    parts = (part if isinstance(part, int) or part.isidentifier() else shown(part) for part in location)
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part[:60]}" for part in parts).lstrip(".")


def _complaint(error: Mapping[str, Any], prefix: str, known: list[str]) -> str:
    where = prefix + _path(error["loc"])
    if error["type"] == "extra_forbidden":
        hint = did_you_mean(error["loc"][-1], known)
        return f"{where}: unknown name; {hint and f'{hint} '}known: {', '.join(known)}"
    if error["type"] == "missing":
        return f"{where}: is missing; give a value"
    if error["type"] == "value_error":  # our own validators: they say it all
        text = str(error["ctx"]["error"])
        named = text.startswith(_path(error["loc"]) + ":")  # the validator said the field already
        return f"{where}: {text}" if error["loc"] and not named else prefix + text
    remedy = _REMEDY.get(error["type"])
    said = remedy.format(**error.get("ctx", {})) if remedy else error["msg"]
    return f"{where}: {shown(error['input'])} will not do; {said}"


def _is_text(annotation: Any) -> bool:
    if typing.get_origin(annotation) is typing.Literal:
        return True
    options = typing.get_args(annotation) if isinstance(annotation, types.UnionType) else (annotation,)
    return any(option is str for option in options)


def _is_list(annotation: Any) -> bool:
    return typing.get_origin(annotation) is list


class StrictModel(pydantic.BaseModel):
    """A pydantic model that refuses unknown names, NaN and booleans in place of numbers.

    Every way of building one raises `BadInput`, one line per bad field. Assignment is validated as a whole, and a refused
    assignment leaves the object as it was.

    Attributes:
        NAME: What stands before a field's name in a complaint; an experiment's parameters are stored under theirs.
    """

    NAME: ClassVar[str] = ""

    model_config = pydantic.ConfigDict(extra="forbid", allow_inf_nan=False, protected_namespaces=())

    def __init__(self, /, **values: Any) -> None:
        try:
            super().__init__(**values)
        except pydantic.ValidationError as error:
            raise self._bad_input(error) from None

    @classmethod
    def _bad_input(cls, error: pydantic.ValidationError) -> BadInput:
        prefix, known = f"{cls.NAME}." if cls.NAME else "", list(cls.model_fields)
        first: dict[Any, Mapping[str, Any]] = {}  # of each field: a list of a thousand wrong values is one mistake
        for one in error.errors():
            first.setdefault(one["loc"][:1] or str(one.get("ctx")), one)
        lines = [_complaint(one, prefix, known) for one in first.values()]
        return BadInput(*dict.fromkeys(lines[:_MAX_LINES]))

    @pydantic.model_validator(mode="before")
    @classmethod
    def _read_strings(cls, values: Any) -> Any:
        """Parse what papermill's -p, -y and YAML 1.1 hand over as text: `1e-3`, `[3, 4]`, `null`."""
        if not isinstance(values, Mapping):
            return values
        return {name: cls._read(name, value) for name, value in values.items()}

    @classmethod
    def _read(cls, name: str, value: Any) -> Any:
        field = cls.model_fields.get(name)
        if field is None:
            return value
        if isinstance(value, str) and not _is_text(field.annotation):
            try:
                parsed = _parse(value)
            except _Refused as error:
                raise ValueError(f"{name}: {shown(value)} will not do; {error}") from None
            except yaml.YAMLError:
                if odd := [pair for pair in ("[]", "{}") if value.count(pair[0]) != value.count(pair[1])]:
                    raise ValueError(
                        f"{name}: {shown(value)} has not as many {odd[0][0]} as {odd[0][1]}; close each"
                    ) from None
                parsed = value
            value = value if isinstance(parsed, str) else parsed
        if _is_list(field.annotation) and not isinstance(value, list | tuple | Mapping) and value is not None:
            value = [value]
        items = value if isinstance(value, list | tuple) else [value]
        if any(isinstance(item, bool) for item in items) and not _allows_bool(field.annotation):
            raise ValueError(f"{name}: {shown(value)} is true or false where something else belongs; give a value")
        if complaint := _misfit(value):
            raise ValueError(f"{name}: {complaint}")
        return value

    @classmethod
    def collect(cls, namespace: Mapping[str, Any]) -> Self:
        """One out of a notebook's `globals()`.

        Raises:
            BadInput: One line per field that will not do, with the cell and line that set it.
        """
        names = [name for name in cls.model_fields if name in namespace]
        try:
            return cls(**{name: namespace[name] for name in names})
        except BadInput as error:
            cells = namespace.get("In", [])  # what IPython has run, by its numbers
            raise BadInput(*(line + _set_at(line, names, cells) for line in error.lines)) from None

    def __setattr__(self, name: str, value: Any) -> None:
        """Validate the whole object with the new value, then take it."""
        if name in type(self).__private_attributes__:
            return super().__setattr__(name, value)
        if name not in type(self).model_fields:
            raise BadInput(
                f"{name}: unknown name; {did_you_mean(name, type(self).model_fields, 'it has no such field')}"
            )
        changed = type(self)(**self.model_dump() | {name: value})
        return super().__setattr__(name, getattr(changed, name))

    def replace(self, **changes: Any) -> Self:
        """A copy with `changes`, validated."""
        return type(self)(**self.model_dump() | changes)


def _set_at(complaint: str, names: Sequence[str], cells: Sequence[str]) -> str:
    """Where a notebook last set the field that a complaint begins with: ` (cell [2], line 7)`; empty where nothing tells."""
    field = re.match(r"(?:\w+\.)?(\w+)", complaint)
    if field is None or field[1] not in names:
        return ""
    sets = re.compile(rf"{field[1]}\s*(?::[^=]*)?=(?!=)")
    for at in reversed(range(len(cells))):
        lines = [number for number, line in enumerate(cells[at].split("\n"), 1) if sets.match(line)]
        if lines:
            return f" (cell [{at}], line {lines[-1]})"
    return ""


def _allows_bool(annotation: Any) -> bool:
    inner = typing.get_args(annotation) or (annotation,)
    return any(option in (bool, Any, dict) or typing.get_origin(option) is dict for option in (annotation, *inner))


class _Refused(yaml.YAMLError):
    """YAML that is well-formed, and still not taken."""


class _Loader(yaml.SafeLoader):
    """The safe loader, which looks at a document before it makes anything of it."""

    _depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """The next node, with what is in it.

        Raises:
            YAMLError: It is too deep.
        """
        if self._depth > _MAX_DEPTH:
            raise yaml.YAMLError(f"nest at most {_MAX_DEPTH} levels")
        self._depth += 1
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def get_single_node(self) -> yaml.Node | None:
        """The document's root.

        Raises:
            _Refused: A name is given twice in a mapping, or the document is too large with its aliases expanded.
        """
        root = super().get_single_node()
        if root is not None:
            _extent(root, {}, 0)
        return root

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """What a node stands for.

        Raises:
            _Refused: It looks like a date or a number, and is none; or YAML reads another number than stands there.
        """
        if node.tag.endswith((":int", ":float")) and _OTHER_NUMBER.fullmatch(node.value):
            number = super().construct_object(node)
            raise _Refused(f"{shown(node.value)} is {number} to YAML; write {number}, or what you mean in plain digits")
        try:
            return super().construct_object(node, deep)
        except (ValueError, OverflowError) as error:
            raise _Refused(f"{shown(node.value)} cannot be read ({error}); put quotes around text") from None


def _extent(node: yaml.Node, known: dict[yaml.Node, tuple[int, int]], depth: int) -> tuple[int, int]:
    """How many values a node stands for, aliases expanded, and how many levels."""
    if node in known:
        return known[node]
    if depth > _MAX_DEPTH:  # an alias of what it stands in has no end
        raise _Refused(f"nest at most {_MAX_DEPTH} levels")
    inner: list[yaml.Node] = []
    if isinstance(node, yaml.MappingNode):
        names = Counter(key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode))
        if twice := [name for name, times in names.items() if times > 1]:
            raise _Refused(f"{shown(twice[0])} is given twice; leave one out")
        inner = [one for pair in node.value for one in pair]
    elif isinstance(node, yaml.SequenceNode):
        inner = node.value
    extents = [_extent(one, known, depth + 1) for one in inner]
    values, levels = 1 + sum(count for count, _ in extents), 1 + max((deep for _, deep in extents), default=0)
    if values > _MAX_VALUES or levels > _MAX_DEPTH:
        raise _Refused(f"give at most {_MAX_VALUES} values in {_MAX_DEPTH} levels, what aliases stand for included")
    known[node] = values, levels
    return values, levels


def _parse(text: str) -> Any:
    loader = _Loader(text)
    try:
        return loader.get_single_data()
    finally:
        loader.dispose()


def read_value(name: str, text: str) -> Any:
    """A value of a command line as YAML has it: `16` is a number.

    Raises:
        BadInput: It is not YAML.
    """
    try:
        return _parse(text)
    except _Refused as error:
        raise BadInput(f"-p {name}: {error}") from None
    except yaml.YAMLError as error:
        raise BadInput(f"-p {name}: {shown(text)} is not YAML ({' '.join(str(error).split())[:100]})") from None


def read_yaml(path: Any) -> dict[str, Any]:
    """The mapping in a YAML file, by the safe loader.

    Raises:
        BadInput: The file is missing or too large, is not YAML, holds no mapping, or a name twice.
    """
    try:
        regular = stat.S_ISREG(Path(path).stat().st_mode)  # a pipe would be waited for
        with open(path if regular else os.devnull, "rb") as file:
            data = file.read(_MAX_BYTES + 1)
    except (OSError, ValueError) as error:  # the latter of a path with a zero byte
        raise BadInput(
            f"{path}: cannot be read ({getattr(error, 'strerror', error)}); give the path of a YAML file"
        ) from None
    if not regular or len(data) > _MAX_BYTES:
        wrong = f"is larger than {_MAX_BYTES} bytes" if regular else "is no regular file"
        raise BadInput(f"{path}: {wrong}; give the path of a YAML file")
    try:
        values = _parse(data.decode())
    except _Refused as error:
        raise BadInput(f"{path}: {error}") from None
    except UnicodeDecodeError as error:
        raise BadInput(f"{path}: is not valid YAML ({error}); save it as UTF-8") from None
    except yaml.YAMLError as error:
        raise BadInput(f"{path}: is not valid YAML ({error}); write `name: value` lines") from None
    if values is None:
        return {}
    if isinstance(values, dict) and (odd := [key for key in values if not isinstance(key, str)]):
        raise BadInput(f"{path}: a name is {shown(odd[0])} to YAML; put quotes around it")
    if not isinstance(values, dict):
        raise BadInput(f"{path}: holds {type(values).__name__}, not `name: value` lines; write one per parameter")
    return values
