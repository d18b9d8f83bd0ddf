"""Where other processes used the machine, no section orders timings: it gives the figures, and says that it draws no order."""

import re

import pytest

from nanolib.measurement import METRICS, Flag
from nanolib.store import Store
from tests.features import results
from tests.shown import SECTIONS, VERDICTS

_ORDER = re.compile(
    r"faster than|slower than|fastest|slowest|as fast as|no clear difference|told apart|comes nearest|largest part|is beaten"
    r"|hardly pays|more still pays|compute-bound(?! in \d)|communication-bound|limited by waiting"
    r"|is higher|is lower|profiling overhead",
    re.IGNORECASE,
)


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    with Store(results(tmp_path_factory.mktemp("busy")), create=False) as store:
        return store.shown(store.resolve("all"))[0]


def _busy(rows):
    # stored rows may have metrics that nanolib no longer makes
    timed = [name in METRICS and METRICS[name].is_timed for name in rows["metric"]]
    flags = [
        [*flags, Flag.BUSY_MACHINE.value] if one else flags
        for flags, one in zip(rows["flags"], timed, strict=True)
    ]
    return rows.assign(flags=flags)


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.experiment)
def test_no_section_orders_timings_that_others_disturbed(section, stored):
    quiet, busy = (VERDICTS[section.experiment](rows) for rows in (stored, _busy(stored)))
    assert len(busy) <= 5 and not [line for line in busy if _ORDER.search(line)]
    orders = any(_ORDER.search(line) for line in quiet)
    assert any("busy: no order drawn" in line for line in busy) == orders
