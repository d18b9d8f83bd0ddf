"""Results of version 0.1 are results: they open, merge, are exported, and pair with those of today."""

import json

import pytest

from nanolib.compare.compare import compare_rows
from nanolib.report import export
from nanolib.store import Store
from tests.features import STORED, results


@pytest.fixture
def before(tmp_path):
    return results(tmp_path)


def test_their_cases_are_those_that_the_same_parameters_give_today_but_for_ceilings_that_take_longer(before):
    pinned = json.loads((STORED / "case_ids.json").read_text())
    with Store(before, create=False) as store:
        rows = store.measurements()
    for experiment, part in rows[rows["experiment"] != "warmup"].groupby("experiment"):  # whose cases are processes now
        same = part[part.get("factor.ceiling").isna()] if "factor.ceiling" in part else part
        assert set(same.case_id) == set(pinned[f"quick/{experiment}.yml"]), experiment
    assert rows.experiment.nunique() == 6


def test_they_merge_once_and_come_out_again(before, tmp_path):
    with Store(tmp_path / "new.sqlite") as store:
        assert (store.merge(before), store.merge(before)) == (6, 0)
        rows = store.measurements(samples=True)
        assert len(rows) == 1189
        for ending in ("sqlite", "json", "csv", "md"):
            export.write(store, store.resolve("all"), tmp_path / f"out.{ending}")
    with Store(tmp_path / "out.sqlite", create=False) as store:
        found = compare_rows(rows, store.measurements(samples=True))
    assert not {line.finding for line in found.lines} & {"new", "vanished", "changed"} and not found.regressed
