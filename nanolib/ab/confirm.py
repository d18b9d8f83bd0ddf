"""Steps that a history shows, measured again: the revisions around them side by side, on the machine of the history."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from nanolib.ab.question import TIMED, Question, ask, stored
from nanolib.ab.rounds import Log, Settings
from nanolib.compare.compare import Line
from nanolib.compare.history import Change, History
from nanolib.measurement import BadInput
from nanolib.store import Store


def confirm(
    found: Sequence[History], store: Store, start: Path, machine_id: str, settings: Settings, log: Log = lambda _: None
) -> dict[int, Line | str]:
    """Measure the latest step of each history in the revisions around it, in turns; the answers go to the store.

    Args:
        found: The histories; those without a step are passed over.
        store: Where their runs are.
        start: A folder of the repository.
        machine_id: Of this machine.
        settings: How.
        log: Told in one line each what is going on.

    Returns:
        Index of the history → the finding, or why there is none.
    """
    params = store.runs().set_index("run_id")["params"]
    results: dict[int, Line | str] = {}
    questions: dict[tuple[str, ...], dict[int, History]] = {}
    for index, history in enumerate(found):
        if (step := history.latest) is None:
            continue
        if reason := _unmeasurable(history, step, machine_id):
            results[index] = reason
            continue
        # as before the step: an older version does not know what was added since
        given = json.dumps(params[history.points["run_id"].iloc[step.at - 1]])
        key = (history.experiment, step.before, step.after, history.metric, given)
        questions.setdefault(key, {})[index] = history
    for (experiment, before, after, metric, given), histories in questions.items():
        job = (experiment, json.loads(given), json.loads(given))
        cases = frozenset(history.case_id for history in histories.values())
        question = Question((before, after), start, [job], metric=metric, case_ids=cases)
        try:
            answer = ask(question, settings, log)
        except BadInput as error:
            results |= dict.fromkeys(histories, f"cannot be measured: {error}")
            continue
        store.add(stored(answer, question))
        lines = {(line.case, line.metric): line for line in answer.comparison.lines}
        for index, history in histories.items():
            results[index] = lines.get((history.case, history.figure), "cannot be measured: it is not timed in both")
    return results


def _unmeasurable(history: History, step: Change, machine_id: str) -> str:
    """Why a step cannot be measured again; empty where it can."""
    if history.machine_id != machine_id:
        return "cannot be measured: another machine's"
    if history.metric not in TIMED:
        return f"needs no measuring: {history.metric} is counted"
    if step.before == step.after:
        return "cannot be measured: both runs are of one revision"
    for revision in (step.before, step.after):
        if not revision or revision.endswith("+"):
            return f"cannot be measured: {revision or 'the revision'} was not committed"
    return ""
