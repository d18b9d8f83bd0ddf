"""What nanolib answers, in the words of the sheet: cases with their factors, predictions, plans, exact rows. Nothing is timed."""

import contextlib
import json
from collections import defaultdict
from collections.abc import Mapping
from unittest import mock

import numpy as np
import torch

from nanolib.measurement import Measurement
from tests.golden import names
from tests.golden.sheet import DECIMALS

_MACHINE = 2**34  # bytes, on every machine the same
# Python's own sources, which are trained on, differ between its versions.
_TEXT = " ".join(f"{n} times {n} is {n * n}." for n in range(20_000)).encode()


@contextlib.contextmanager
def everywhere_alike():
    """One thread, so much memory, one text; no ranks are started, and what the system gave the process is not asked."""
    text = torch.frombuffer(bytearray(_TEXT), dtype=torch.uint8)
    stand_ins = {
        names.MEMORY: lambda *_: _MACHINE,
        names.TEXT: lambda *_, **__: text,
        names.RANKS: lambda _, cases, __: ([_RANK] * cases[0].world_size, ()),
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


class _Figures(dict):
    """The same figure under every name."""

    def __init__(self, figure):
        self.figure = figure

    def __contains__(self, key):
        return True

    def __missing__(self, key):
        return self.figure


# A rank's answer: figures of which none gets into the sheet.
_RANK = defaultdict(
    lambda: True,
    {
        "links": [],
        "bytes": {},
        "errors": {},
        "blocks": _Figures([1.0] * 6),
        "parts": _Figures([{"comp_attention": 1.0}] * 6),
        "peaks": _Figures(0),
        "weights": _Figures(0),
        "busy": [False] * 6,
        "peak method": "",
    },
)


def cases(suite, notebook):
    """Each case by its line in the sheet."""
    found = names.ALL[notebook]().cases(names.params_of(suite, notebook))
    by_line = {line_of(case): case for case in found}
    assert len(by_line) == len(found), "the factors in the sheet do not tell all cases apart"
    return by_line


def line_of(case):
    """The class and the factors that are not empty."""
    words = [_word(names.CASES, type(case).__name__)]
    for name, value in case.factors.items():
        if name not in names.NOT_FACTORS and value not in ({}, "", None, (), []):
            words.append(f"{_word(names.FACTORS, name)}={_factor(value)}")
    return " ".join(words)


def _factor(value):
    if isinstance(value, str):
        return value.replace(" ", "_")
    if isinstance(value, Mapping):
        items = [f"{key}:{_factor(item)}" for key, item in value.items()]
        return "{" + ",".join(items) + "}"
    if isinstance(value, list | tuple):
        return ",".join(map(_factor, value))
    return json.dumps(value)


def all_of(suite, notebook, case):
    """Everything that is said of a case: of the full suite, which no machine runs in an hour, what is said without running it."""
    kind = type(case).__name__
    on_ranks = kind in names.ON_RANKS  # formulas alone, whatever the suite
    found = {f"planned {scope}": str(peak) for scope, peak in case.plan().peaks.items()}
    for name, value in case.predict().items():
        # rows and plans say what depends on the algorithm
        if name not in names.NOT_PREDICTED and not isinstance(value, dict):
            found[f"predicted {_word(names.PREDICTED, name)}"] = _text(name, value)
    if kind in names.NOT_RUN or not (suite == "quick" or on_ranks):
        return found
    for row in names.rows_of(case, names.params_of(suite, notebook), _untimed):
        if row.metric in names.LEFT_OUT or row.method in names.NOT_METHODS or row.estimate is None:
            continue
        if on_ranks and row.method != "formula":  # what ranks would have counted
            continue
        metric = _word(names.METRICS, row.metric)
        title = f"{metric} {row.scope} ({_word(names.METHODS, row.method)})".replace("  ", " ")
        found[title] = _text(row.metric, row.estimate)
        if row.predicted is not None:
            found[f"{title} predicted"] = _text(row.metric, row.predicted)
    return found


def _untimed(clock, phases, *_):
    """In the place of blocks of calls: none is called."""
    return np.ones((6, 1, len(phases))), {"calls_per_block": 1}


def _text(metric, value):
    if metric in names.ROUNDED:
        return f"~{round(value, DECIMALS) + 0.0:.{DECIMALS}f}"  # no negative zero
    if metric in names.MIB:
        value *= 2**20
    return str(int(value)) if float(value).is_integer() else repr(float(value))


def _word(table, word):
    if word not in table:
        raise KeyError(
            f"{word!r} is in no table of tests/golden/names.py: say there what it is called in the sheet"
        )
    return table[word]
