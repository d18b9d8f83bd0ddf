"""Select cases, draw charts and make findings for several notebooks."""

import functools
from collections.abc import Callable, Mapping, Sequence

import pandas as pd

from nanolib.measurement import LEARNING_STEPS, METRICS, SMOKE_TEST, Flag
from nanolib.report.plot import links, plot
from nanolib.report.section import (
    Estimate,
    Finding,
    Order,
    drop_missing,
    explain_empty,
    join_words,
    of_experiment,
    unclear,
)
from nanolib.report.tables import (
    CASE,
    ONE,
    Column,
    add_metric_columns,
    format_ms,
    gains,
    pick,
    times,
)
from nanolib.report.theme import Chart, Drawing, empty_chart

KEY = "Points: measured, with 95 % intervals. Hollow: not settled. Dashed: predicted."
COUNTED_KEY = "Points: counted exactly. Dashed: predicted."
ROOFLINE_KEY = "The prediction is the roofline of the peak rates measured in the same run."
_Maker = Callable[[pd.DataFrame], pd.DataFrame]

PLAN_KEY = "The prediction counts the bytes of tensors that have shapes but no data."


def table_of(experiment: str, factor: str) -> Callable[[_Maker], _Maker]:
    """Return a decorator for a function that makes a table of the cases that have a factor.

    The decorated function receives the rows of these cases. If no rows have the factor, the table
    is empty. nanolib keeps the last table, and gives each caller a copy. It compares `rows` by
    identity, so it does not notice changes within the same object. The attributes `experiment` and
    `factor` of the function are for `chart_of`.

    Args:
        experiment: Name of the experiment.
        factor: Name of the factor.
    """

    def decorate(make: _Maker) -> _Maker:
        last = None, None

        @functools.wraps(make)
        def table(rows: pd.DataFrame) -> pd.DataFrame:
            nonlocal last
            known, found = last  # One step, because explore draws in a thread of its own.
            if known is not rows:
                cases = drop_missing(of_experiment(rows, experiment), f"factor.{factor}")
                found = pd.DataFrame() if cases.empty else make(cases)
                last = rows, found
            return found.copy()

        table.experiment, table.factor = experiment, factor
        return table

    return decorate


def chart_of(
    table: _Maker, column: str, title: str, where: str = "", otherwise: str = ""
) -> Callable[[Callable[[pd.DataFrame, str], Drawing]], Chart]:
    """Return a decorator for a function that draws some lines of a table.

    The decorated function receives these lines and the title. If there are no lines, the chart
    shows the reason.

    Args:
        table: Function from `table_of` that makes the table from measurements.
        column: Column that must have a value in each line.
        title: Title of the chart.
        where: Condition of the lines, in the syntax of `DataFrame.query`.
        otherwise: Reason to show if no case failed.
    """

    def decorate(draw: Callable[[pd.DataFrame, str], Drawing]) -> Chart:
        @functools.wraps(draw)
        def chart(rows: pd.DataFrame) -> Drawing:
            lines = drop_missing(table(rows), column)
            if where and len(lines):
                lines = lines.query(where)
            if lines.empty:
                why = explain_empty(rows, table.experiment, otherwise, table.factor)
                return empty_chart(title, why)
            return draw(lines, title)

        return chart

    return decorate


def scaling_chart(
    experiment: str,
    metric: str,
    title: str,
    subtitle: Sequence[str],
    scopes: Mapping[str, str],
    others: Sequence[str],
) -> Chart:
    """Return a function that draws a metric and its prediction over the sequence length.

    Args:
        experiment: Name of the experiment.
        metric: Key of `METRICS`. A share gets a linear axis that includes zero.
        title: Title of the chart.
        subtitle: Lines below the title.
        scopes: Maps each scope of the metric to the title of its panel.
        others: Factors that distinguish series with the same name.
    """

    def chart(rows: pd.DataFrame) -> Drawing:
        rows = of_experiment(rows, experiment)
        found = pd.concat([pick(rows, metric, scope) for scope in scopes])
        if found.empty:
            return empty_chart(title, explain_empty(rows, experiment))
        labels, alike = series_names(found, others)
        data = pd.DataFrame(
            {
                "panel": found["scope"].map(scopes),
                "series": labels,
                "x": found["factor.seq_len"].astype(int),
                "y": found["estimate"],
                "low": found["low"],
                "high": found["high"],
                "pred": found["predicted"],
                "sure": [Flag.NO_STEADY_STATE not in flags for flags in found["flags"]],
                "note": [", ".join(flags) for flags in found["flags"]],
                **links(found),
            }
        )
        unit = METRICS[metric].unit
        is_share = unit == "1"
        return plot(
            data,
            title + alike,
            subtitle=subtitle,
            unit=METRICS[metric].title + ("" if is_share else f" ({unit})"),
            xunit="Sequence length (tokens)",
            log="x" if is_share else "xy",
            fmt=".1~%" if is_share else ",.3~r",
        )

    return chart


_LABELS = {"batch_size": "batch {:g}", "causal": "causal {}", "run_id": "run {:.8}"}


def series_names(
    rows: pd.DataFrame, others: Sequence[str], prefix: str = "factor."
) -> tuple[pd.Series, str]:
    """Name the series of a chart by their `name`, and by the other columns that vary.

    Args:
        rows: Measurements, or lines of a table.
        others: Columns that distinguish series with the same name.
        prefix: Prefix of the columns.

    Returns:
        A label for each row, and the name if it is the same for all rows and not in the labels.
    """
    names = [*others, "name"]
    varying = [name for name in names if rows[f"{prefix}{name}"].astype(str).nunique() > 1]
    parts = [
        rows[f"{prefix}{name}"].map(_LABELS.get(name, "{}").format) for name in varying or ["name"]
    ]
    shared = f": {rows[f'{prefix}name'].iloc[0]}" if varying and "name" not in varying else ""
    return parts[0].str.cat(parts[1:], sep=", "), shared


def roofline_words(rows: pd.DataFrame, experiment: str) -> list[Finding]:
    """Return a finding per scope with the limits of the cases and the best roofline share.

    The prediction of a latency is its roofline time. The MFU is the time of the FLOPs at the peak
    rate over the latency, so both agree if the case is compute-bound.

    Source: Williams, Waterman & Patterson (2009) for the roofline.
    """
    rows = of_experiment(rows, experiment)
    timed = pick(rows, "latency")
    timed = add_metric_columns(
        timed[timed["predicted"] > 0], rows, [Column("mfu", metric="mfu")], [*CASE, "scope"]
    )
    is_bound = timed["mfu"] * timed["estimate"] > 0.999 * timed["predicted"]
    timed["bound"] = is_bound.map({True: "compute", False: "memory"})
    for end, of in (("", "estimate"), ("_low", "high"), ("_high", "low")):
        timed[f"share{end}"] = timed["predicted"] / timed[of]
    findings = []
    for scope, group in timed[timed["mfu"].notna()].groupby("scope", sort=False):
        best = group.loc[group["share"].idxmax()]
        kinds = (
            f"{bound}-bound in {count} of {len(group)} cases"
            for bound, count in group["bound"].value_counts().items()
        )
        answer = f"{scope.replace('_', ' ').capitalize()} is {join_words(kinds)}"
        evidence = f"{best['factor.name']} reaches {Estimate.of(best, 'share').percent} of the "
        evidence += f"roofline at {best['factor.seq_len']:,.0f} tokens"
        findings.append(Finding(answer, evidence))
    return findings


def compare_speed(
    line: pd.Series, what: str, other: str, column: str = "speed_up"
) -> tuple[str, str]:
    """Return the text and the evidence of a finding about the speed of a line.

    Args:
        line: Line of a table from `add_speed_ups`.
        what: Name of the line, as in a sentence.
        other: Name of the baseline, as in a sentence.
        column: Name of the column with the speed-up.
    """
    ratio, order = times(line, column), Estimate.of(line, column).compare_to(ONE)
    if order is Order.NO_DIFFERENCE:
        return unclear(f"{what} and {other}", ratio)
    return f"{what} is {'faster' if order is Order.ABOVE else 'slower'} than {other}", ratio


def pick_fastest(lines: pd.DataFrame, column: str) -> pd.Series:
    """Return the line with the shortest time among the lines that no speed-up shows to be slower.

    If a speed-up shows this of every line, the result is the line with the shortest time.

    Args:
        lines: Lines of a table from `add_speed_ups`.
        column: Name of the column with the times, ms.
    """
    is_slower = [
        any(gain.compare_to(ONE) is Order.BELOW for gain in over) for over in lines["speed_up_over"]
    ]
    return lines.assign(is_slower=is_slower).sort_values(["is_slower", column]).iloc[0]


def find_fastest(
    lines: pd.DataFrame, name: str, column: str, kind: str, where: str, about: str
) -> list[Finding]:
    """Return a finding about the fastest of several cases that were timed in turns.

    Args:
        lines: Lines of a table from `add_speed_ups`.
        name: Name of the column with the names of the cases.
        column: Name of the column with the times, ms.
        kind: What the cases are, such as `dense kernel`.
        where: Sizes of the cases, such as `at 64 tokens`.
        about: Heading of the finding.
    """
    if len(lines) < 2:
        return []
    best, lines = pick_fastest(lines, column), lines.sort_values(column, kind="stable")
    if best["is_slower"]:
        return []
    ties = [
        gain.name for gain in best["speed_up_over"] if gain.compare_to(ONE) is Order.NO_DIFFERENCE
    ]
    tied = lines[lines[name].isin([best[name], *ties])]
    evidence = join_words(format_ms(line, column) for _, line in tied.iterrows())
    text, next_step, among = f"{best[name]} is the fastest {kind} {where}", "", lines
    if len(tied) > 1:
        text, evidence = unclear(f"{join_words(tied[name])} {where}", evidence)
        next_step, among = "increase budget_s", tied
    compared = gains(best, f"{best[name]} {where}", among=set(among[name]))
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
    finding = Finding(
        f"The loss of {len(short)} of {len(table)} {what} was not compared",
        f"{int(short['steps'].max())} training steps are {SMOKE_TEST}",
        f"set {parameter} to at least {LEARNING_STEPS}",
    )
    return table.drop(short.index), [finding]
