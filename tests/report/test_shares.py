"""A share, or an interval of one, is shown between 0 and 1, or it is said why not."""

import pytest

from nanolib.experiments.distributed.rank_rows import part_rows
from nanolib.measurement import Measurement
from tests.report.cases import timed


def test_the_interval_of_a_time_share_stays_between_nothing_and_all():
    waits = [0.0, 0.0, 3.0, 0.0, 0.0, 0.0, 9.0, 0.0]
    runs = [{"comp_local": 9.0, "wait": ms, "comm_sum": 0.0} for ms in waits]
    found = [row for row in part_rows([runs], "fused", (), None) if row.metric == "time_share"]
    assert {row.scope for row in found} == {"fused: compute", "fused: wait", "fused: communication"}
    assert all(0 <= row.low <= row.estimate <= row.high <= 1 for row in found)
    assert any(row.low == 0 < row.estimate for row in found) and any(row.high == 1 > row.estimate for row in found)


@pytest.mark.parametrize(("exposed", "said"), [(-2.0, "(0%)"), (4.0, "(25%)"), (20.0, "(100%)")])
def test_communication_takes_no_negative_share_of_a_step(say, exposed, said):
    found = [timed("alone", 7, 8, 9), timed("ddp", 15, 16, 20)]
    found.append(Measurement("exposed_communication", exposed, -3.0, 21.0, 0.95, 20, scope="ddp"))
    case = {"name": "tiny", "world_size": 4, "strategies": ["ddp"], "batch_size": 3, "seq_len": 64}
    (line,) = say("distributed", [(case, found)])
    assert f"ms of a step {said} is communication" in line
