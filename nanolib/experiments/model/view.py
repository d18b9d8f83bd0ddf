"""Draw the charts and build the findings of whole models: time, memory and generation."""

from collections.abc import Iterator

import pandas as pd

from nanolib.experiments.model.tables import (
    CALLS,
    DETERMINISM_COLUMNS,
    MIB,
    MODEL,
    MODEL_COLUMNS,
    PART_COLUMNS,
    SCOPES,
    SERIES,
    SEVERAL_BATCHES,
    bytes_by_kind,
    call_of,
    determinism_table,
    model_table,
    part_table,
    peak_table,
)
from nanolib.numbers import format_number
from nanolib.report.plot import links, plot, point_columns
from nanolib.report.section import (
    CaseTable,
    Estimate,
    Finding,
    Order,
    Section,
    comparing,
    drop_missing,
    explain_missing,
    join_words,
)
from nanolib.report.shared import (
    KEY,
    ROOFLINE_KEY,
    chart_of,
    roofline_words,
    scaling_chart,
)
from nanolib.report.tables import format_ms, gains
from nanolib.report.theme import Drawing

# Scope of a call → words before its time in a finding.
_TIMES = {
    "inference": "Inference takes",
    "decode": "a generated token",
    "training_step": "a training step",
}


@chart_of(
    peak_table,
    "parts",
    "Peak memory by kind of memory",
    otherwise="peak memory was not measured by kind of memory",
)
def model_peaks(table: pd.DataFrame, title: str) -> Drawing:
    """Draw the memory use at the largest peak of each model, by `MemoryKind`."""
    bars = []
    for _, row in table.iterrows():
        sizes = bytes_by_kind(row)
        bar = {
            "series": f"{row['label']}, {call_of(row)}",
            "text": f"{format_number(row['estimate'])} MiB",
            "part": sizes.index,
            "x": sizes.to_numpy() / MIB,
        }
        bars.append(pd.DataFrame(bar | links(row)))
    return plot(
        pd.concat(bars),
        title,
        "bars",
        subtitle=["Counted exactly, at the largest peak of each model."],
        unit="Live memory (MiB)",
    )


@chart_of(
    model_table,
    "total",
    "Throughput by batch size",
    SEVERAL_BATCHES,
    "generation was not measured at several batch sizes; set generation_batch_sizes",
)
def generation_batches(table: pd.DataFrame, title: str) -> Drawing:
    """Draw tokens per second of all users, and of each user, over the batch size."""
    series = [
        f"{line.name}, {line.attention_type}, {line.dtype}, seq len {line.seq_len:.0f}"
        for line in table.itertuples()
    ]
    parts = []
    for name, panel in (("total", "all users"), ("user", "each user")):
        points = {"panel": panel, "series": series, "x": table["batch_size"].astype(int)}
        parts.append(pd.DataFrame(points | point_columns(table, name, "y")))
    return plot(
        pd.concat(parts),
        title,
        subtitle=["Generated tokens, without the time to read the prompt."],
        unit="Throughput (tokens/s)",
        xunit="Batch size (sequences)",
        log="xy",
    )


model_performance = scaling_chart(
    "model",
    "latency",
    "Time per call",
    [KEY, ROOFLINE_KEY],
    {scope: CALLS[scope] for scope in SCOPES},
    ["attention_type", "batch_size", "dtype"],
)


def verdict(rows: pd.DataFrame) -> list[Finding]:
    """Return findings about the time, memory, optimizations and batch sizes of each model."""
    table = model_table(rows)
    timed = drop_missing(table, "inference")
    if timed.empty:
        return explain_missing(rows, "model", "Model latency")
    eager = timed[timed["optimization"] == "eager"]
    longest = (eager if len(eager) else timed).sort_values("seq_len", kind="stable")
    findings = [_cost(row) for _, row in longest.drop_duplicates(MODEL, keep="last").iterrows()]
    findings += [*_changes(table), *_determinism(rows), *_memory(rows), *_batches(table)]
    return [*findings, *roofline_words(rows, "model")]


def _about(row: pd.Series) -> str:
    shape = f"batch {int(row['batch_size'])}, {int(row['seq_len'])} tokens"
    return f"{row['name']} ({row['attention_type']}, {row['dtype']}), {shape}"


def _cost(row: pd.Series) -> Finding:
    """Return a finding about the time of a model's calls at the longest sequence length."""
    figures = {
        words: Estimate.of(row, scope, "latency", row["name"])
        for scope, words in _TIMES.items()
        if pd.notna(row[scope])
    }
    text = join_words(f"{words} {figure.text(' ms')}" for words, figure in figures.items())
    evidence = []
    if pd.notna(row["prefill"]):
        evidence.append(f"the first token takes {format_ms(row, 'prefill')}")
    if pd.notna(row["training_memory"]):
        weights = row["training_memory"] / row["weight_memory"]
        peak = format_number(row["training_memory"])
        evidence.append(f"training peaks at {peak} MiB, {weights:.1f}× the weights")
    if pd.isna(row["training_step"]):
        rate = Estimate.of(row, "inference_tokens_per_second").text(" tokens/s")
        evidence.append(f"inference reads {rate}")
    figures = tuple(figures.values())
    return Finding(text, "; ".join(evidence), about=_about(row), figures=figures)


def _changes(table: pd.DataFrame) -> Iterator[Finding]:
    """Compare each optimization and dtype with the eager model, timed in the same rounds."""
    words = {
        Order.ABOVE: "faster",
        Order.BELOW: "slower",
        Order.NO_DIFFERENCE: "no clear difference",
    }
    known = table[[f"{scope}_speed_up" for scope in SCOPES]].notna().any(axis=1)
    longest = table[known].sort_values("seq_len", ascending=False, kind="stable")
    # Further batch sizes, which only generate tokens, follow the batch sizes of all calls.
    for _, row in longest.drop_duplicates(MODEL).iterrows():
        of_run = table[table["run_id"] == row["run_id"]]
        dtype = of_run["dtype"].iloc[0] if row["optimization"] == "eager" else row["dtype"]
        base, parts, compared = f"eager {dtype}", [], ()
        for scope in SCOPES:
            for pair in gains(row, f"{row['name']} ({CALLS[scope]})", f"{scope}_speed_up", {base}):
                gain, order, _ = pair
                ratio = f"{gain.estimate:.2f}× [{gain.low:.2f} … {gain.high:.2f}]"
                parts.append(f"{ratio} ({CALLS[scope]}, {words[order]})")
                compared += (pair,)
        if parts:
            text, evidence = f"The speed relative to {base} is {join_words(parts)}", ""
            if pd.notna(row["difference"]):
                evidence = f"the relative error of the logits is {row['difference']:.1e}"
            yield Finding(text, evidence, about=_about(row), compared=compared)


_WAYS = {
    "runs": "from run to run",
    "batch": "between a batch of one sequence and a larger batch",
    "decode": "between prefill and decode",
}


def _determinism(rows: pd.DataFrame) -> Iterator[Finding]:
    """Yield a finding for each model and each computation that changes greedy tokens."""
    for _, row in determinism_table(rows).iterrows():
        for way, words in _WAYS.items():
            if row[f"{way}_agreement"] < 1:
                differ = f"{1 - row[f'{way}_agreement']:.0%} of greedy tokens differ {words}"
                ulps = f"logits differ by at most {format_number(row[f'{way}_ulp'])} ULP"
                yield Finding(differ, ulps, about=_about(row))


def _memory(rows: pd.DataFrame) -> Iterator[Finding]:
    """Yield a finding about the largest memory peak of each model, by `MemoryKind`."""
    for _, row in peak_table(rows).iterrows():
        sizes = bytes_by_kind(row)
        (kind, most), *rest = (sizes / sizes.sum()).items()
        evidence = [", ".join(f"{other} {share:.0%}" for other, share in rest if share >= 0.05)]
        if pd.notna(row["predicted"]):
            evidence.append(f"the plan is {format_number(row['predicted'])} MiB")
        call = f"Peak memory ({CALLS[row['scope']]}) is {format_number(row['estimate'])} MiB"
        text = f"{call}, of which {kind} are {most:.0%}"
        yield Finding(text, "; ".join(filter(None, evidence)), about=_about(row))


def _batches(table: pd.DataFrame) -> Iterator[Finding]:
    """Compare the tokens per second of the largest and the smallest batch of a generation."""
    several = table.query(SEVERAL_BATCHES).sort_values("batch_size", kind="stable")
    for _, group in several.groupby(SERIES, sort=False):
        first, last = group.iloc[0], group.iloc[-1]
        less, more = (
            Estimate.of(line, "total", name=f"tokens/s at batch {line['batch_size']:.0f}")
            for line in (first, last)
        )
        rates = [f"{rate.text()} {rate.name}" for rate in (more, less)]
        text = f"Decoding generates {join_words(rates)}, without the time to read the prompt"
        users = [Estimate.of(line, "user").text() for line in (last, first)]
        each = f"each user gets {users[0]} instead of {users[1]} tokens/s"
        yield Finding(text, each, about=_about(first), compared=comparing(more, less))


SECTION = Section(
    "model",
    "How much time and memory does a model need?",
    {
        "model_performance": model_performance,
        "model_peaks": model_peaks,
        "generation_batches": generation_batches,
    },
    {
        "Inference, generation and training": CaseTable(model_table, MODEL_COLUMNS),
        "Memory use": CaseTable(part_table, PART_COLUMNS),
        "Determinism": CaseTable(determinism_table, DETERMINISM_COLUMNS),
    },
    verdict,
)
