"""Stored results merge once, are exported, and pair with what comes out."""

from nanolib.compare.runs import compare_rows
from nanolib.report import export
from nanolib.store import Store
from tests.features import results


def test_they_merge_once_and_come_out_again(tmp_path):
    stored = results(tmp_path)
    with Store(tmp_path / "new.sqlite") as store:
        assert (store.merge(stored), store.merge(stored)) == (6, 0)
        rows = store.measurements(samples=True)
        assert len(rows) == 1155
        for ending in ("sqlite", "json", "csv"):
            export.write(store, store.resolve("all"), tmp_path / f"out.{ending}")
    with Store(tmp_path / "out.sqlite", create=False) as store:
        found = compare_rows(rows, store.measurements(samples=True))
    assert (
        not {line.finding for line in found.lines} & {"new", "missing", "changed"}
        and not found.regressed
    )
