"""Check whether a case can run, and measure the cases of a group in one launch of ranks."""

from collections.abc import Callable, Sequence

from nanolib.measurement import Unsupported
from nanolib.run.case import Case, RanksCase
from nanolib.run.memory_plan import shortage
from nanolib.run.params import Params
from nanolib.run.timeout import Outcome, PredictedOutOfMemory


def check_case(case: Case) -> None:
    """Check that a case can run on this machine.

    Raises:
        Unsupported: This machine cannot run the case.
        PredictedOutOfMemory: The plan of the case exceeds the free memory.
    """
    if reason := case.unsupported() or case.plan().unsupported:
        raise Unsupported(reason)
    if reason := shortage(case.plan(), case.device):
        raise PredictedOutOfMemory(reason)


def measure_launch(
    cases: Sequence[RanksCase], params: Params, report: Callable[..., object]
) -> dict[str, Outcome]:
    """Measure the cases of a group on the same ranks. If the launch fails, all its cases fail.

    Args:
        cases: Cases of a group.
        params: Parameters of the notebook. The time limit applies to the launch.
        report: Function that receives the id of a case, and the id with each row.

    Returns:
        Case id → outcome of the case.
    """
    outcomes, ready, launch = {case.case_id: Outcome() for case in cases}, [], Outcome()
    for case in cases:
        report(case.case_id)
        with outcomes[case.case_id].within(params.case_timeout_s):
            check_case(case)
            ready.append(case)
    with launch.within(params.case_timeout_s):
        for case, row in ready[0].launch(ready, params) if ready else ():
            outcomes[case.case_id].rows.append(row)
            report(case.case_id, row)
    for case in ready:
        own = outcomes[case.case_id]
        own.status, own.message, own.details = launch.status, launch.message, launch.details
        own.seconds += launch.seconds / len(ready)
    return outcomes
