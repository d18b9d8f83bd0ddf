"""The verdict on whole models, computed from the rows; it ends with one next question."""

from __future__ import annotations

from collections.abc import Iterator

import pandas as pd

from nanolib.experiments.model.view.batches import batch_words
from nanolib.experiments.model.view.memory import memory_words
from nanolib.experiments.model.view.tables import SCOPES, model_table, scaling_table
from nanolib.measurement import format_number
from nanolib.report import overview
from nanolib.report.claim import Claim, Figure, Order, comparing
from nanolib.report.in_turns import gains
from nanolib.report.overview import cached
from nanolib.report.roofline import roofline_words
from nanolib.report.tables import in_ms, known

_PHASES = ("forward", "backward", "optimizer_step")
_SPEED = {Order.ABOVE: "faster", Order.BELOW: "slower", Order.ALIKE: "not told apart"}
_WORDS = dict(zip(SCOPES, ("inference", "a training step", "a token"), strict=True))


@cached
def verdict(rows: pd.DataFrame) -> list[Claim]:
    """What inference and training cost, where the time goes, how they scale."""
    table = model_table(rows)
    timed = known(table, "inference")
    if timed.empty:
        return [
            Claim(
                "No model case gave a time, so there is no verdict", advice="nano run quick model"
            )
        ]
    eager = (
        timed[timed["optimisation"] == "eager"]
        if (timed["optimisation"] == "eager").any()
        else timed
    )
    claims = [
        _of_model(group.sort_values("seq_len").iloc[-1])
        for _, group in eager.groupby(["name", "attention_type", "dtype"], sort=False)
    ]
    for _, row in table[table["status"] == "oom_predicted"].iterrows():
        claims.append(
            Claim(f"{row['name']}, n = {int(row['seq_len'])}, was not started", row["message"])
        )
    claims += [*_optimised(table), *memory_words(rows), *batch_words(rows)]
    laws = list(_laws(rows, eager))
    if not laws:
        question = "how does it grow with the length? From four seq_lens on an exponent is fitted"
        laws = [Claim("Fewer than four lengths gave a time", advice=question)]
    return [*claims, *laws, *roofline_words(rows, "model")]


def _of_model(row: pd.Series) -> Claim:
    """What a model costs at its longest length."""
    about = f"{row['name']} ({row['attention_type']}, {row['dtype']}), batch {int(row['batch_size'])}, n = {int(row['seq_len'])}"
    times, sure = [f"Inference takes {in_ms(row, 'inference')}"], []
    scopes, compared = ["inference"], ()
    if pd.notna(row["decode"]):
        times.append(f"a generated token {in_ms(row, 'decode')}")
        sure.append(
            f"the first token takes {in_ms(row, 'prefill')}, p99 of the next ones is {format_number(row['decode_p99'])} ms"
        )
        scopes += ["prefill", "decode"]
    if pd.notna(row["training_step"]):
        times.append(f"a training step {in_ms(row, 'training_step')}")
        largest, compared = _largest_phase(row)
        sure.append(
            f"training peaks at {row['training_memory']:,.0f} MiB, {row['training_memory'] / row['footprint']:.1f}× the weights"
        )
        sure.append(largest)
        scopes.append("training_step")
    else:
        sure.append(f"{row['inference_tokens_per_second']:,.0f} tokens/s")
    figures = tuple(Figure.of(row, scope, "latency", scope, row["name"]) for scope in scopes)
    return Claim(
        overview.listed(times), "; ".join(sure), about=about, compared=compared, figures=figures
    )


def _laws(rows: pd.DataFrame, eager: pd.DataFrame) -> Iterator[Claim]:
    """How each quantity grows with the length; what an optimisation changes is said elsewhere."""
    scaling = known(scaling_table(rows), "exponent")
    for _, line in scaling[scaling["name"].isin(eager["name"])].iterrows() if len(scaling) else ():
        grows = f"{line['quantity']} grows as n^{line['exponent']:.2f} [{line['exponent_low']:.2f} … {line['exponent_high']:.2f}]"
        sure = f"{line['meaning']}, over {int(line['lengths'])} lengths"
        about, exponent = (
            f"{line['name']} ({line['attention_type']}, {line['dtype']})",
            Figure.of(line, "exponent"),
        )
        yield Claim(grows, sure, about=about, figures=(exponent,), lengths=int(line["lengths"]))


def _optimised(table: pd.DataFrame) -> Iterator[Claim]:
    """Each optimisation against the eager model of its type, and each type against the first, at the longest length."""
    first, shape = table["dtype"].iloc[0], ["run_id", "attention_type", "seq_len", "batch_size"]
    plain = table[table["optimisation"] == "eager"]
    eager = {(row["name"], row["dtype"], *row[shape]): row for _, row in plain.iterrows()}
    longest = table.sort_values("seq_len", kind="stable")
    for _, row in longest.drop_duplicates(
        ["run_id", "name", "attention_type", "dtype"], keep="last"
    ).iterrows():
        is_eager, suffix = (
            row["optimisation"] == "eager",
            f" ({row['optimisation'].replace('_', ' ')})",
        )
        other = first if is_eager else row["dtype"]
        base = eager.get((row["name"].removesuffix(suffix), other, *row[shape]))
        if base is None or (is_eager and row["dtype"] == first):
            continue
        pairs = {
            scope: gains(row, row["name"], f"{scope}_speed_up", {f"eager {other}"})
            for scope in SCOPES
        }
        parts = [
            f"{_WORDS[scope]} {gain.estimate:.2f}× [{gain.low:.2f} … {gain.high:.2f}] as fast ({_SPEED[order]})"
            for scope, found in pairs.items()
            for gain, order, _ in found
        ]
        for column, words in (("inference_memory", "inference"), ("training_memory", "training")):
            share = row[column] / base[column]
            if pd.notna(share) and abs(share - 1) > 0.005:
                parts.append(f"{words} peak {share:.2f}×")
        if pd.notna(row["difference"]):
            parts.append(f"logits {row['difference']:.1e} away")
        if parts:
            which, against = (f" in {row['dtype']}", other) if is_eager else ("", "eager")
            answer = f"{row['name']}{which}, n = {int(row['seq_len'])}, against {against}"
            yield Claim(
                answer,
                ", ".join(parts),
                compared=tuple(pair for found in pairs.values() for pair in found),
            )


def _largest_phase(row: pd.Series) -> tuple[str, tuple[tuple[Figure, Order, Figure], ...]]:
    """Which part of a training step takes most, in words and as figures."""
    if any(row[f"{name}_busy"] == 1 for name in _PHASES):
        return "the machine was busy: no order drawn between its parts", ()
    phases = pd.DataFrame(
        [
            {"name": name} | {f"ms{end}": row[f"{name}{end}"] for end in ("", "_low", "_high")}
            for name in _PHASES
        ]
    )
    found, others = overview.ranked(phases, "ms", ascending=False)
    figures = {name: Figure.of(row, name, "latency", name, row["name"]) for name in _PHASES}
    words = [
        f"the {name.replace('_', ' ')} ({format_number(ms)} ms)"
        for name, ms in zip(found["name"], found["ms"], strict=True)
    ]
    which = (
        "are the largest parts, with no clear difference"
        if len(found) > 1
        else "is the largest part"
    )
    compared = comparing(*(figures[name] for name in (found["name"].iloc[0], *others["name"])))
    return f"{overview.listed(words)} {which}", compared
