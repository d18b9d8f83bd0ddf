"""What nanolib offers and shows, as one mapping.

`python tests/features.py` writes it anew after a change that is meant. A command, an option, a
parameter, a metric, a chart, a column or a sentence that gets lost in a rewrite is seen by this
list alone.
"""

import gzip
import json
import sys
import tempfile
from pathlib import Path

STORED = Path(__file__).parent / "stored"
LIST, RESULTS = STORED / "features.json", STORED / "results.sqlite.gz"


def results(folder):
    """The results of the quick suite as it is stored, on a machine without a GPU."""
    path = Path(folder) / "stored.sqlite"
    path.write_bytes(gzip.decompress(RESULTS.read_bytes()))
    return path


def features():
    from nanolib.experiments import ALL
    from nanolib.measurement import METRICS

    with tempfile.TemporaryDirectory() as folder:
        return {
            "commands": commands(),
            "parameters": {
                name: load().Params().model_dump(mode="json") for name, load in ALL.items()
            },
            "metrics": {
                name: [metric.unit, metric.direction, metric.title]
                for name, metric in METRICS.items()
            },
            "report": report(Path(folder)),
        }


def commands():
    from nanolib.cli import main

    return {
        name: sorted(option for parameter in command.params for option in parameter.opts)
        for name, command in main.commands.items()
    }


def report(folder):
    """Its files, and of each section the charts, the columns and the verdict."""
    from nanolib.report.page import build
    from nanolib.store import Store
    from tests.shown import SECTIONS

    with Store(results(folder), create=False) as store:
        ids = store.resolve("all")
        page = build(store, ids, folder / "report", SECTIONS)
        rows, _ = store.report_data(ids)
    sections = {
        section.experiment: {
            "question": section.question,
            "charts": list(section.charts),
            "tables": {title: dict(table.columns) for title, table in section.tables.items()},
            "cells": {title: cells(table.of(rows)) for title, table in section.tables.items()},
            "verdict": list(map(str, section.verdict(rows))),
        }
        for section in SECTIONS
    }
    return {"files": sorted(file.name for file in page.parent.iterdir()), "sections": sections}


def cells(table):
    """The first and last lines of each column of a table: a figure in the wrong column is seen."""
    lines = [*range(min(4, len(table))), *range(max(4, len(table) - 2), len(table))]
    return {
        name: [_text(table[name].iloc[at]) for at in lines]
        for name in table.columns
        if name != "id"
    }


def _text(value):
    """As far as it is the same on every machine."""
    return f"{value:.5g}" if isinstance(value, float) else str(value)[:200]


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    LIST.write_text(json.dumps(features(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
