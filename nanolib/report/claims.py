"""Make the findings that several notebooks share: faster, the fastest, and runs that are too short."""

import pandas as pd

from nanolib.measurement import LEARNING_STEPS, SMOKE_TEST
from nanolib.report.finding import Estimate, Finding, Order, unclear
from nanolib.report.overview import join_words
from nanolib.report.tables import ONE, gains, in_ms, times


def compare_speed(
    line: pd.Series, what: str, other: str, column: str = "speed_up"
) -> tuple[str, str]:
    """Return the text and the evidence of a finding about the speed of a line.

    Args:
        line: Line of a table from `with_speed_ups`.
        what: Name of the line, as in a sentence.
        other: Name of the baseline, as in a sentence.
        column: Name of the column with the speed-up.
    """
    ratio, order = times(line, column), Estimate.of(line, column).compare_to(ONE)
    if order is Order.NO_DIFFERENCE:
        return unclear(f"{what} and {other}", ratio)
    return f"{what} is {'faster' if order is Order.ABOVE else 'slower'} than {other}", ratio


def find_fastest(
    lines: pd.DataFrame, name: str, column: str, kind: str, where: str, about: str
) -> list[Finding]:
    """Return a finding about the fastest of several cases that were timed in turns.

    Args:
        lines: Lines of a table from `with_speed_ups`.
        name: Name of the column with the names of the cases.
        column: Name of the column with the times, ms.
        kind: What the cases are, such as `dense kernel`.
        where: Sizes of the cases, such as `at 64 tokens`.
        about: Heading of the finding.
    """
    lines = lines.sort_values(column, kind="stable")
    for _, best in lines.iterrows():
        orders = {one.name: one.compare_to(ONE) for one in best["speed_up_over"]}
        if Order.BELOW not in orders.values():
            break
    else:
        return []
    ties = [other for other, order in orders.items() if order is Order.NO_DIFFERENCE]
    tied = lines[lines[name].isin([best[name], *ties])]
    evidence = join_words(in_ms(line, column) for _, line in tied.iterrows())
    text, next_step = f"{best[name]} is the fastest {kind} {where}", ""
    if len(tied) > 1:
        text, evidence = unclear(f"{join_words(tied[name])} {where}", evidence)
        next_step = "increase budget_s"
    among = set((tied if len(tied) > 1 else lines)[name])
    compared = gains(best, f"{best[name]} {where}", among=among)
    return [Finding(text, evidence, next_step, about, compared)] if compared else []


def drop_short(
    table: pd.DataFrame, what: str, parameter: str
) -> tuple[pd.DataFrame, list[Finding]]:
    """Drop training runs that are too short to learn, and return a finding about these runs.

    Args:
        table: Table with the column `steps`.
        what: What the lines are, such as `recipes`.
        parameter: Parameter that sets the number of steps.
    """
    short = table[table["steps"] < LEARNING_STEPS]
    if short.empty:
        return table, []
    text = f"The loss of {len(short)} of {len(table)} {what} was not compared"
    evidence = f"{int(short['steps'].max())} training steps are {SMOKE_TEST}"
    next_step = f"set {parameter} to at least {LEARNING_STEPS}"
    return table.drop(short.index), [Finding(text, evidence, next_step)]
