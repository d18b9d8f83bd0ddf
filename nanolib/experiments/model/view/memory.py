"""Who holds the memory of a model at its peak."""

from __future__ import annotations

from collections.abc import Iterator

import altair as alt
import pandas as pd

from nanolib.report.claim import Claim
from nanolib.report.linking import links
from nanolib.report.overview import cached, having, pick
from nanolib.report.plot import plot

_MODELS = 4  # as many as one sees beside each other
_MIB = 2**20
_LARGEST = 8
_WORDS = {
    "training_step": "a training step",
    "inference": "inference",
    "prefill": "reading the prompt",
    "decode": "a token",
}

HOLDER_COLUMNS = {
    "name": "Model",
    "scope": "Of",
    "kind": "Kind",
    "module": "Module",
    "by": "Saved or made by",
    "mib": "MiB",
    "share": "Share of the peak",
}


@cached
def peak_table(rows: pd.DataFrame) -> pd.DataFrame:
    """The largest peak of each model whose holders are known, of training where it was trained; the models with the most first.

    Returns:
        Columns: `run_id`, `name`, `attention_type`, `seq_len`, `batch_size`, `dtype`, `scope`, `mib`, `planned`, and of the
        details `parts`.
    """
    found = pick(having(rows, "model", "mode"), "peak_memory")
    optimisation = found.get("factor.optimisation", pd.Series("eager", index=found.index)).fillna(
        "eager"
    )
    found = found[optimisation == "eager"]
    found = found[["parts" in details for details in found["details"]]] if len(found) else found
    if found.empty:
        return pd.DataFrame()
    found = found.assign(trains=found["scope"] == "training_step")
    found = found.sort_values(["trains", "estimate"], ascending=False, kind="stable")
    found = found.drop_duplicates(
        [f"factor.{name}" for name in ("name", "attention_type", "dtype")]
    )
    named = {
        name: found[f"factor.{name}"]
        for name in ("name", "attention_type", "seq_len", "batch_size", "dtype")
    }
    plain = {"run_id": found["run_id"], "scope": found["scope"]}
    parts = {"parts": [details["parts"] for details in found["details"]]}
    return pd.DataFrame(
        plain | named | {"mib": found["estimate"], "planned": found["predicted"]} | parts
    )


@cached
def holders_table(rows: pd.DataFrame) -> pd.DataFrame:
    """The parts that hold most of each model's largest peak: `run_id`, `seq_len` and columns as in `HOLDER_COLUMNS`."""
    lines = []
    for _, row in peak_table(rows).head(_MODELS).iterrows():
        whole = sum(part[4] for part in row["parts"])
        for kind, module, operation, line, size in sorted(row["parts"], key=lambda part: -part[4])[
            :_LARGEST
        ]:
            of = {name: row[name] for name in ("run_id", "name", "seq_len")}
            of["scope"] = f"{_WORDS.get(row['scope'], row['scope'])}, n = {int(row['seq_len'])}"
            by = line or operation.removeprefix("aten::") or "—"
            held = {
                "kind": kind,
                "module": module or "—",
                "by": by,
                "mib": size / _MIB,
                "share": f"{size / whole:.0%}",
            }
            lines.append(of | held)
    return pd.DataFrame(lines)


def model_peaks(rows: pd.DataFrame) -> alt.TopLevelMixin:
    """Memory at the largest peak of each model, by kind."""
    table = peak_table(rows).head(_MODELS)
    lines = [
        {
            "series": f"{row['name']}, {_WORDS.get(row['scope'], row['scope'])}, n = {int(row['seq_len'])}",
            "part": kind,
            "x": size / _MIB,
            "text": f"{row['mib']:,.0f} MiB",
            **one,
        }
        for one, (_, row) in zip(
            pd.DataFrame(links(table)).to_dict("records"), table.iterrows(), strict=True
        )
        for kind, size in pd.DataFrame(row["parts"]).groupby(0, sort=False)[4].sum().items()
    ]
    return plot(
        pd.DataFrame(lines),
        "Memory at the peak",
        "bars",
        subtitle=["Counted, exact, at the largest peak of each model."],
        unit="Live memory (MiB)",
        empty="no peak was counted by kind",
    )


def memory_words(rows: pd.DataFrame) -> Iterator[Claim]:
    """Who holds each model's largest peak."""
    for _, row in peak_table(rows).iterrows():
        shape = f"batch {int(row['batch_size'])}, n = {int(row['seq_len'])}"
        about = f"{row['name']} ({row['attention_type']}, {row['dtype']}), {shape}"
        whole = sum(part[4] for part in row["parts"])
        kinds = pd.DataFrame(row["parts"]).groupby(0)[4].sum().sort_values(ascending=False)
        (first, most), *rest = kinds.items()
        others = ", ".join(
            f"{kind} {size / whole:.0%}" for kind, size in rest if size / whole >= 0.05
        )
        what = _WORDS.get(row["scope"], row["scope"])
        answer = f"at the peak of {what}, {row['mib']:,.0f} MiB, {first} hold {most / whole:.0%}"
        sure = "counted to the byte" + (f"; {others}" if others else "")
        if pd.notna(row["planned"]):
            off = row["mib"] / row["planned"] - 1
            sure += (
                "; as planned"
                if abs(off) < 5e-4
                else f"; {abs(off):.1%} {'above' if off > 0 else 'below'} the plan"
            )
        yield Claim(answer, sure, about=about)
