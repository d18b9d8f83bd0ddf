"""What nanolib answers, in the words of the sheet: cases with their factors, predictions, plans, exact rows. Nothing is timed."""

import contextlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any
from unittest import mock

import numpy as np
import torch

from nanolib.measurement import Measurement
from tests.golden import names
from tests.golden.sheet import Sheet

COUNT = "cases"
_GIB = 2**30
_MACHINE = 16 * _GIB  # bytes, on every machine the same
# Python's own sources, which are trained on, differ between its versions.
_TEXT = " ".join(f"{n} times {n} is {n * n}." for n in range(20_000)).encode()


@contextlib.contextmanager
def everywhere_alike() -> Iterator[None]:
    """One thread, so much memory, one text; no ranks are started, and what the system gave the process is not asked."""
    text = torch.frombuffer(bytearray(_TEXT), dtype=torch.uint8)
    stand_ins = {
        names.MEMORY: lambda *_: _MACHINE,
        names.TEXT: lambda *_, **__: text,
        names.RANKS: lambda _, case, *__, **___: ([_Anything()] * case.world_size, ()),
        names.RESIDENT: lambda _, scope: Measurement("resident_memory", scope=scope),
    }
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with contextlib.ExitStack() as stack:
        stack.callback(torch.set_num_threads, threads)
        for targets, stand_in in stand_ins.items():
            for target in targets:
                stack.enter_context(mock.patch(target, stand_in))
        yield


class _Anything(dict):
    """A rank's answer: figures of which none gets into the sheet."""

    def __missing__(self, key: str) -> Any:
        if key == "links":
            return []
        if key in ("bytes", "errors"):
            return {}
        if key in ("blocks", "parts", "peaks", "weights"):
            return _Figures(key)
        if key == "busy":
            return [False] * 6
        return "" if key == "peak method" else True


class _Figures(dict):
    def __init__(self, of: str) -> None:
        self.of = of

    def __contains__(self, key: object) -> bool:
        return True

    def __missing__(self, key: str) -> Any:
        return {"blocks": [1.0] * 6, "parts": [{"comp_attention": 1.0}] * 6}.get(self.of, 0)


def cases(suite: str, notebook: str) -> dict[str, Any]:
    """Each case by its line in the sheet."""
    found = names.cases_of(notebook, names.params_of(suite, notebook))
    by_line = {line_of(case): case for case in found}
    assert len(by_line) == len(found), "the factors in the sheet do not tell all cases apart"
    return by_line


def counts(by_line: Mapping[str, Any]) -> Sheet:
    """How many cases of each class there are."""
    return {
        COUNT: {
            name: str(count) for name, count in Counter(line.split()[0] for line in by_line).items()
        }
    }


def line_of(case: Any) -> str:
    """The class and the factors that are not empty."""
    words = [_word(names.CASES, type(case).__name__)]
    for name, value in case.factors.items():
        if name not in names.NOT_FACTORS and value not in ({}, "", None, (), []):
            words.append(f"{_word(names.FACTORS, name)}={_factor(value)}")
    return " ".join(words)


def _factor(value: Any) -> str:
    if isinstance(value, str):
        return names.WORDS.get(value, value).replace(" ", "_")
    if isinstance(value, Mapping):
        return (
            "{"
            + ",".join(
                f"{names.WORDS.get(name, name)}:{_factor(item)}" for name, item in value.items()
            )
            + "}"
        )
    if isinstance(value, list | tuple):
        return ",".join(map(_factor, value))
    return json.dumps(value)


def all_of(suite: str, notebook: str, case: Any) -> dict[str, str]:
    """Everything that is said of a case: of the full suite, which no machine runs in an hour, what is said without running it."""
    runs = (
        suite == "quick" or type(case).__name__ in names.ON_RANKS
    )  # of these formulas alone, whatever the suite
    return foretold(case) | (rows(suite, notebook, case) if runs else {})


def foretold(case: Any) -> dict[str, str]:
    """What formulas and plans say of a case."""
    found = {}
    for name, value in names.predicted(case).items():
        if name not in names.NOT_PREDICTED:
            found[f"predicted {_word(names.PREDICTED, name)}"] = _text(name, value)
    return found | {
        f"planned {_scope(scope)}": str(peak) for scope, peak in names.planned(case).items()
    }


def rows(suite: str, notebook: str, case: Any) -> dict[str, str]:
    """What it would store and is the same on every machine."""
    if type(case).__name__ in names.NOT_RUN:
        return {}
    found: dict[str, str] = {}
    for row in names.rows_of(case, names.params_of(suite, notebook), _untimed):
        if row.metric in names.LEFT_OUT or row.method in names.NOT_METHODS or row.estimate is None:
            continue
        on_ranks = type(case).__name__ in names.ON_RANKS
        if on_ranks and row.method != "formula":  # what ranks would have counted
            continue
        metric = _word(names.METRICS, row.metric)
        title = f"{metric} {_scope(row.scope)} ({_word(names.METHODS, row.method)})".replace(
            "  ", " "
        )
        found[title] = _text(row.metric, row.estimate)
        if row.predicted is not None:
            found[f"{title} predicted"] = _text(row.metric, row.predicted)
    return found


def _untimed(clock: Any, phases: Mapping[str, Any], *_: Any) -> tuple[np.ndarray, dict[str, Any]]:
    """In the place of blocks of calls: none is called."""
    return np.ones((6, 1, len(phases))), {"calls_per_block": 1}


def _text(metric: str, value: float) -> str:
    if metric in names.DECIMALS:
        return f"~{round(value, names.DECIMALS[metric]) + 0.0:.{names.DECIMALS[metric]}f}"  # no negative zero
    if metric in names.MIB:
        value *= 2**20
    return str(int(value)) if float(value).is_integer() else repr(float(value))


def _scope(scope: str) -> str:
    """Renamed as a whole, or part by part, or word by word."""
    if scope in names.WORDS:
        return names.WORDS[scope]
    for separator in (": ", " "):
        parts = scope.split(separator)
        if len(parts) > 1:
            return separator.join(map(_scope, parts))
    return scope


def _word(table: Mapping[str, str], word: str) -> str:
    if word not in table:
        raise KeyError(
            f"{word!r} is in no table of tests/golden/names.py: say there what it is called in the sheet"
        )
    return table[word]
