"""Bad input gets one clear line: pydantic models whose errors name the field, the value and the remedy."""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Mapping
from typing import Any, Self

import pydantic
import yaml

from nanolib.measurement import BadInput

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


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _path(location: tuple[int | str, ...]) -> str:
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location).lstrip(".")


def _complaint(error: Mapping[str, Any], prefix: str, known: list[str]) -> str:
    where = prefix + _path(error["loc"])
    if error["type"] == "extra_forbidden":
        near = difflib.get_close_matches(str(error["loc"][-1]), known, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        return f"{where}: unknown name; {hint}known: {', '.join(known)}"
    if error["type"] == "missing":
        return f"{where}: is missing; give a value"
    if error["type"] == "value_error":  # our own validators: they say it all
        text = str(error["ctx"]["error"])
        named = text.startswith(_path(error["loc"]) + ":")  # the validator said the field already
        return f"{where}: {text}" if error["loc"] and not named else prefix + text
    remedy = _REMEDY.get(error["type"])
    said = remedy.format(**error.get("ctx", {})) if remedy else error["msg"]
    return f"{where}: {_shown(error['input'])} will not do; {said}"


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
    """

    model_config = pydantic.ConfigDict(extra="forbid", allow_inf_nan=False, protected_namespaces=())

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except pydantic.ValidationError as error:
            raise self._bad_input(error) from None

    @classmethod
    def _bad_input(cls, error: pydantic.ValidationError) -> BadInput:
        prefix = cls.complaint_prefix()
        lines = (_complaint(e, prefix, list(cls.model_fields)) for e in error.errors())
        return BadInput(*dict.fromkeys(lines))

    @classmethod
    def complaint_prefix(cls) -> str:
        """What stands before a field's name in a complaint."""
        return ""

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
                parsed = yaml.safe_load(value)
            except (yaml.YAMLError, ValueError, RecursionError):  # such as a number of 5,000 digits
                parsed = value
            value = value if isinstance(parsed, str) else parsed
        if _is_list(field.annotation) and not isinstance(value, list | tuple | Mapping) and value is not None:
            value = [value]
        items = value if isinstance(value, list | tuple) else [value]
        if any(isinstance(item, bool) for item in items) and not _allows_bool(field.annotation):
            raise ValueError(f"{name}: {_shown(value)} is true or false where something else belongs; give a value")
        return value

    @classmethod
    def collect(cls, namespace: Mapping[str, Any]) -> Self:
        """One out of a notebook's `globals()`.

        Raises:
            BadInput: One line per field that will not do.
        """
        return cls(**{name: namespace[name] for name in cls.model_fields if name in namespace})

    def __setattr__(self, name: str, value: Any) -> None:
        """Validate the whole object with the new value, then take it."""
        if name not in type(self).model_fields:
            near = difflib.get_close_matches(name, list(type(self).model_fields), n=1)
            raise BadInput(f"{name}: unknown name; {f'did you mean {near[0]}?' if near else 'it has no such field'}")
        changed = type(self)(**self.model_dump() | {name: value})
        super().__setattr__(name, getattr(changed, name))

    def replace(self, **changes: Any) -> Self:
        """A copy with `changes`, validated."""
        return type(self)(**self.model_dump() | changes)


def _allows_bool(annotation: Any) -> bool:
    inner = typing.get_args(annotation) or (annotation,)
    return any(option in (bool, Any, dict) or typing.get_origin(option) is dict for option in (annotation, *inner))


def read_yaml(path: Any) -> dict[str, Any]:
    """The mapping in a YAML file, by the safe loader.

    Raises:
        BadInput: The file is missing, is not YAML, or holds no mapping.
    """
    try:
        with open(path, encoding="utf-8") as file:
            values = yaml.safe_load(file)
    except OSError as error:
        raise BadInput(f"{path}: cannot be read ({error.strerror}); give the path of a YAML file") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise BadInput(f"{path}: is not valid YAML ({error}); write `name: value` lines") from None
    if values is None:
        return {}
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise BadInput(f"{path}: holds {type(values).__name__}, not `name: value` lines; write one per parameter")
    return values
