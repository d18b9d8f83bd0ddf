"""What must never be: code from a file of data, a shell, an open door."""

import sys

import pytest

from nanolib.measurement import BadInput, exact
from nanolib.paths import checkout
from nanolib.report.page import build
from nanolib.store import Store
from tests.shown import SECTIONS
from tests.store.rows import make_run

HOSTILE = "'); DROP TABLE runs; -- <script>alert(1)</script>"


def test_a_database_makes_nothing_run_or_vanish(tmp_path, monkeypatch):
    (tmp_path / "evil_module.py").write_text(
        f"open({str(tmp_path / 'made')!r}, 'w')\ndef build(): pass\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    rows = {
        HOSTILE: (
            {"name": HOSTILE, "model": "evil_module:build"},
            [exact("flops", 1.0, scope=HOSTILE)],
        )
    }
    params = {"model": "evil_module:build", "device": "cpu"}
    with Store(tmp_path / "r.sqlite") as store:
        named = {"label": HOSTILE, "suite": HOSTILE, "run_id": HOSTILE}
        store.add(make_run(experiment="model", params=params, rows=rows, **named))
        assert store.resolve(HOSTILE) == [HOSTILE]
        with pytest.raises(BadInput):
            store.resolve("' OR 1 = 1 --")
        page = build(store, [HOSTILE], tmp_path / "report", SECTIONS, pictures=False)
        assert len(store.runs()) == 1
    assert "evil_module" not in sys.modules and not (tmp_path / "made").exists()
    assert "<script>alert(1)" not in page.read_text()


def test_jupyterlab_is_open_to_this_machine_alone_and_keeps_its_token():
    (line,) = [
        line for line in (checkout() / "Makefile").read_text().splitlines() if "jupyter lab" in line
    ]
    assert "--ip=127.0.0.1" in line and "token" not in line and "password" not in line
