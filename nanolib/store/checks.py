"""Whether rows are what this program writes: those of another database, or broken ones in our own, are not believed.

Each column has a reader, which gives the value that a stored one stands for or says what is wrong with it.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from nanolib.measurement import METRICS, BadInput, Provenance, RunStatus, Status, shown

BROKEN = "broken"  # how the row of a run that cannot be read is shown; no run is stored with it

MOST_NAME, MOST_TEXT, MOST_JSON, MOST_DEPTH = 200, 100_000, 4 << 20, 32  # characters, and levels of JSON
MOST_SAMPLES = 8 << 20  # of one measurement
MOST_ROWS = 1_000_000  # measurements of one run
_MOST_KNOWN = 1000  # characters of a text that is remembered
_DATE = re.compile(r"\d{4}-\d\d-\d\d(T\d\d:\d\d(:\d\d(\.\d{1,6})?)?(Z|\+00:00)?)?", re.ASCII)


class Broken(ValueError):
    """A value that this program does not write; the message says why."""


@dataclass(frozen=True)
class Column:
    """One column of a table.

    Attributes:
        read: Stored value → what it stands for; raises `Broken`.
        instead: Makes what is shown of a value that cannot be read.
    """

    read: Callable[[Any], Any]
    instead: Callable[[], Any]


def _text(value: Any, most: int = MOST_TEXT) -> str:
    if type(value) is not str:
        raise Broken(f"{shown(value)} is no text")
    if len(value) > most:
        raise Broken(f"{len(value):,} characters, of at most {most:,}")
    if not value.isascii():
        _encodable(value)
    return value


def _encodable(value: str) -> None:
    try:
        value.encode()
    except UnicodeEncodeError:
        raise Broken(f"{shown(value)} is no valid UTF-8") from None


def _short(value: Any) -> str:
    return _text(value, 1000)


def _name(value: Any) -> str:
    text = _text(value, MOST_NAME)
    if not text or not text.isprintable():
        raise Broken(f"{shown(value)} is {'no name: it has control characters' if text else 'empty'}")
    return text


def _one_of(known: Any) -> Callable[[Any], str]:
    names = frozenset(map(str, known))

    def read(value: Any) -> str:
        if type(value) is not str or value not in names:
            raise Broken(f"{shown(value)} is unknown to this version")
        return value

    return read


def _number(value: Any) -> float | None:
    if value is None or (type(value) in (float, int) and math.isfinite(value)):
        return value
    raise Broken(f"{shown(value)} is no finite number")


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**53:
        raise Broken(f"{shown(value)} is no count")
    return value


def _optional(read: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda value: None if value is None else read(value)


def _samples(value: Any) -> bytes | None:
    """The samples as they are stored, after a look at each."""
    if value is None:
        return value
    if type(value) is not bytes or len(value) % 8 or len(value) > 8 * MOST_SAMPLES:
        raise Broken(f"{shown(value)} is no row of float64")
    if not all(map(math.isfinite, memoryview(value).cast("d"))):
        raise Broken("not every sample is finite")
    return value


def _moment(value: Any) -> str:
    return _text(value, 40)


# JSON


def _refuse(constant: str) -> None:
    raise Broken(f"{constant} is no JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse)
_LARGE = re.compile(r"\d{19}|[eE]\+?\d{3}")  # without such digits no number is too large


def _check_numbers(found: Any) -> None:
    """Whether all numbers are finite, and fit into 64 bits where they are whole."""
    for item in found.values() if isinstance(found, dict) else found if isinstance(found, list) else ():
        _check_numbers(item)
    if isinstance(found, float) and not math.isfinite(found):
        raise Broken(f"{shown(found)} is no finite number")
    if isinstance(found, int) and not -(2**63) <= found < 2**63:
        raise Broken("a number that is too large")


def parsed(value: Any, *kinds: type) -> Any:
    """JSON as it is stored: of one of these types, with finite numbers, not too long nor nested too deep.

    Raises:
        Broken: It is not.
    """
    text = _text(value, MOST_JSON)
    if text.count("[") + text.count("{") > MOST_DEPTH:
        _check_depth(text)
    try:
        found = _DECODER.decode(text)
    except Broken:
        raise
    except ValueError:
        raise Broken(f"{shown(text)} is no JSON") from None
    if _LARGE.search(text):
        _check_numbers(found)
    if not isinstance(found, kinds):
        raise Broken(f"{shown(text)} is no JSON {' or '.join(_KINDS[kind] for kind in kinds)}")
    if "\\u" in text:  # half of a pair of surrogates parses, and cannot be written anywhere
        _encodable(json.dumps(found, ensure_ascii=False))
    return found


_KINDS = {dict: "object", list: "list"}
_STRINGS = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)


def _check_depth(text: str) -> None:
    depth = most = 0
    for mark in re.finditer(r"[\[\]{}]", _STRINGS.sub("", text)):
        depth += 1 if mark[0] in "[{" else -1
        most = max(most, depth)
    if most > MOST_DEPTH:
        raise Broken(f"JSON of more than {MOST_DEPTH} levels")


def _object(value: Any) -> dict[str, Any]:
    return parsed(value, dict)


def _flat(value: Any) -> dict[str, Any]:
    found = parsed(value, dict)
    for name, item in found.items():
        if isinstance(item, dict | list):
            raise Broken(f"{shown(name)}: {shown(item)} is no single value")
    return found


def _texts(value: Any) -> list[str]:
    found = parsed(value, list)
    for item in found:
        _text(item)
    return found


def _flags(value: Any) -> list[str]:
    """Flags, known or not: a later version may have more of them."""
    found = parsed(value, list)
    for item in found:
        _name(item)
    return found


def _gpus(value: Any) -> list[dict[str, Any]]:
    found = parsed(value, list)
    for gpu in found:
        if not isinstance(gpu, dict) or not isinstance(gpu.get("name"), str):
            raise Broken(f"{shown(gpu)} is no GPU with a name")
        if any(isinstance(item, dict | list) for item in gpu.values()):
            raise Broken(f"{shown(gpu)} holds more than single values")
    return found


# Factors that say the same in every experiment; one that is missing, or null, says nothing.
_TEXT_FACTORS = (
    "name",
    "dtype",
    "device",
    "attention_type",
    "optimisation",
    "mode",
    "phase",
    "look",
    "precision",
    "preset",
)
_TEXT_FACTORS += ("variant", "pattern", "direction", "arm")
_COUNT_FACTORS = ["seq_len", "batch_size", "world_size", "nodes"]
_FACTORS: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(_TEXT_FACTORS, lambda value: isinstance(value, str)),
    **dict.fromkeys(_COUNT_FACTORS, lambda value: type(value) is int and 0 < value < 2**53),
    **dict.fromkeys(("compiled", "causal"), lambda value: isinstance(value, bool)),
    "warmup_steps": lambda value: isinstance(value, int | list),
    **dict.fromkeys(
        ("forms", "prefill_forms", "strategies"),
        lambda value: isinstance(value, list) and all(isinstance(item, str) for item in value),
    ),
}


def _factors(value: Any) -> dict[str, Any]:
    found = parsed(value, dict)
    for name, item in found.items():
        if item is not None and name in _FACTORS and not _FACTORS[name](item):
            raise Broken(f"{name}: {shown(item)} is of the wrong type")
    return found


def _json_factors(value: Any) -> str:
    """The factors as they are stored, after a look at them."""
    _factors(value)
    return value


# What reading and comparing count with, where it is there.
_COUNTED = {"attempts": 0, "warmup_cut": 0, "calls_per_block": 1}


def _details(value: Any) -> dict[str, Any]:
    found = parsed(value, dict)
    for name, least in _COUNTED.items():
        if name in found and (type(found[name]) is not int or not least <= found[name] < 2**31):
            raise Broken(f"{name}: {shown(found[name])} is no count")
    return found


def _of(read: Callable[[Any], Any], instead: Callable[[], Any] = str) -> Column:
    return Column(read, instead)


def _none() -> None:
    return None


_RUN_STATUS, _STATUS, _PROVENANCE = _one_of(RunStatus), _one_of(Status), _one_of(Provenance)
_OPTIONAL_TEXT, _OPTIONAL_COUNT = _of(_optional(_short)), _of(_optional(_count), _none)
COLUMNS: dict[str, dict[str, Column]] = {
    "machines": {
        "machine_id": _of(_name),
        **dict.fromkeys(("cpu", "system", "driver", "torch", "governor"), _OPTIONAL_TEXT),
        **dict.fromkeys(("cores", "ram_gib", "threads"), _OPTIONAL_COUNT),
        "gpus": _of(_gpus, list),
        "dtypes": _of(_flat, dict),
    },
    "runs": {
        "rowid": _of(lambda value: value, int),
        "run_id": _of(_name),
        "experiment": _of(_name, lambda: "?"),
        **dict.fromkeys(("suite", "label", "device", "git_revision", "fingerprint"), _of(_short)),
        "machine_id": _of(_name, lambda: "?"),
        "params": _of(_object, dict),
        "versions": _of(_flat, dict),
        "cases": _of(_count, int),
        "started": _of(_moment),
        "duration_s": _of(_number, _none),
        "status": _of(_RUN_STATUS, lambda: BROKEN),
        "message": _of(_text),
        **dict.fromkeys(("process", "launch"), _of(_short)),
        "disturbances": _of(_texts, list),
    },
    "measurements": {
        "id": _of(_count, int),
        "run_id": _of(_name, lambda: "?"),
        "experiment": _of(_name, lambda: "?"),
        **dict.fromkeys(("suite", "label"), _of(_short)),
        "machine_id": _of(_name, lambda: "?"),
        "case_id": _of(_name, lambda: "?"),
        "factors": _of(_factors, dict),
        "metric": _of(_one_of(METRICS), lambda: "case_time"),
        **dict.fromkeys(("scope", "method"), _of(_short)),
        "unit": _of(_name, lambda: "s"),
        **dict.fromkeys(("estimate", "low", "high", "confidence", "predicted"), _of(_number, _none)),
        "n": _of(_count, int),
        "samples": _of(_samples, _none),
        "provenance": _of(_PROVENANCE, lambda: Provenance.MEASURED.value),
        "status": _of(_STATUS, lambda: Status.ERROR.value),
        "message": _of(_text),
        "flags": _of(_flags, list),
        "details": _of(_details, dict),
    },
    "traces": {"trace_id": _of(_count, int), "run_id": _of(_name), "case_id": _of(_short), "names": _of(_texts, list)},
}
COLUMNS["figures"] = {**COLUMNS["runs"], **COLUMNS["measurements"], "factors": Column(_json_factors, str)}


def read_row(table: str, names: Sequence[str], row: Sequence[Any]) -> tuple[list[Any], str]:
    """What the values of a row stand for, and what is wrong with the first that stands for nothing; empty for a sound one.

    Args:
        table: A key of `COLUMNS`.
        names: The columns of the row.
        row: As SQLite gives it.
    """
    try:
        columns = [COLUMNS[table][name] for name in names]
    except KeyError as error:
        name = shown(error.args[0])
        raise BadInput(f"database: {table} has a column {name} that is none of its own; drop it") from None
    wrong, values = "", []
    for name, column, value in zip(names, columns, row, strict=True):
        try:
            values.append(column.read(value))
        except Broken as error:
            wrong = wrong or f"{name}: {error}"
            values.append(column.instead())
    return values, wrong or _wrong_together(table, dict(zip(names, values, strict=True)))


def unsound(table: str, names: Sequence[str], row: Sequence[Any], sound: set[Any]) -> str:
    """What is wrong with a row, as `read_row` tells it; empty for nothing.

    Args:
        table: A key of `COLUMNS`.
        names: The columns of the row.
        row: As SQLite gives it.
        sound: Texts of columns that were found sound before, to which those of this row are added: most come again and again.
    """
    columns = COLUMNS[table]
    for name, value in zip(names, row, strict=True):
        known = (name, value) if type(value) is str else None
        if known not in sound:
            try:
                columns[name].read(value)
            except Broken as error:
                return f"{name}: {error}"
            if known and len(value) <= _MOST_KNOWN and len(sound) < MOST_ROWS:
                sound.add(known)
    return _wrong_together(table, dict(zip(names, row, strict=True)))


def _wrong_together(table: str, row: Mapping[str, Any]) -> str:
    if table == "measurements" and "unit" in row and row["unit"] != METRICS[row["metric"]].unit:
        return f"unit: {shown(row['unit'])} is not that of {row['metric']}"
    return ""


def check_moment(started: str) -> None:
    """Whether a moment is written as this program does, and has come.

    Raises:
        Broken: It is not, or lies more than a day ahead.
    """
    if not _DATE.fullmatch(started):
        raise Broken(f"{shown(started)} is no moment such as 2026-01-31T12:00:00.000000Z")
    try:
        moment = datetime.fromisoformat(started).replace(tzinfo=UTC)
    except ValueError:
        raise Broken(f"{shown(started)} is no moment of the calendar") from None
    if moment > datetime.now(UTC) + timedelta(days=1):
        raise Broken(f"{shown(started)} lies in the future; set the clock of that machine")


@functools.cache
def trace_condition(table: str, columns: tuple[str, ...], named: tuple[str, ...], real: tuple[str, ...]) -> str:
    """SQL that holds for a sound row of a trace table; `?` is how many names its trace has, once for each named column."""
    parts = ["typeof(number) = 'integer'"]
    for column in columns:
        if column in real:
            parts.append(f"({column} IS NULL OR (typeof({column}) = 'real' AND abs({column}) < 9e999))")
        else:
            parts.append(f"typeof({column}) = 'integer'")
        if column in named:
            parts.append(f"{column} >= 0 AND {column} < ?")
    return " AND ".join(parts)
