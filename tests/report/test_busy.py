"""Where other processes used the machine, no section orders timings: it gives the figures, and says that it draws no order."""

import re

import pytest

from nanolib.measurement import METRICS, Flag
from nanolib.store import Store
from tests.features import results
from tests.report.cases import inference
from tests.report.rows import ended
from tests.report.test_model_memory import generation
from tests.shown import SECTIONS, VERDICTS

_ORDER = re.compile(
    r"faster than|slower than|fastest|slowest|as fast as|no clear difference|told apart|comes nearest|largest part|is beaten"
    r"|hardly pays|more still pays|compute-bound|communication-bound|bound by waiting|% against",
    re.IGNORECASE,
)


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    with Store(results(tmp_path_factory.mktemp("busy")), create=False) as store:
        return store.shown(store.resolve("all"))[0]


def _busy(rows):
    timed = [METRICS[metric].is_timed for metric in rows["metric"]]
    flags = [
        [*flags, Flag.BUSY_MACHINE.value] if one else flags for flags, one in zip(rows["flags"], timed, strict=True)
    ]
    return rows.assign(flags=flags)


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.experiment)
def test_no_section_orders_timings_that_others_disturbed(section, stored):
    quiet, busy = (VERDICTS[section.experiment](rows) for rows in (stored, _busy(stored)))
    assert len(busy) <= 5 and not [line for line in busy if _ORDER.search(line)]
    orders = any(_ORDER.search(line) for line in quiet)
    assert any("busy: no order drawn" in line for line in busy) == orders


def test_no_batch_is_beaten_by_timings_that_others_disturbed(measured):
    cases = [inference(), generation(1, 1.9, 2, 2.1), generation(4, 1.9, 2, 2.1), generation(16, 20, 21, 22)]
    rows = measured("model", [(factors, [ended(), *found]) for factors, found in cases])
    quiet, busy = ("\n".join(VERDICTS["model"](part)) for part in (rows, _busy(rows)))
    assert "batch 16 is beaten" in quiet and "hardly pays" in quiet
    assert (
        not _ORDER.search(busy) and "Machine busy: no order drawn: d ln(tokens/s) / d ln(batch) up to batch 16" in busy
    )
