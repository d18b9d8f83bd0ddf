"""Who holds the memory of a model at its peak."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import altair as alt
import pandas as pd

from nanolib.measurement import Held, format_number
from nanolib.report.claim import Claim
from nanolib.report.drawing import HEIGHT, WIDTH, coloured
from nanolib.report.frame import Drawn, framed, panels, tooltips
from nanolib.report.linking import links
from nanolib.report.overview import cached, having, pick
from nanolib.report.palette import FRAME, INK, PALETTE, QUIET

KIND_COLOURS = dict(
    zip([kind for kind in Held if kind != Held.GATHERED], [*PALETTE[:6], FRAME, PALETTE[6]], strict=True)
)
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


def held_colour(kinds: list[Held]) -> alt.Color:
    """The colour of each kind, in this order."""
    return coloured("kind", "Held as", {kind: KIND_COLOURS[kind] for kind in kinds}, sort=kinds)


@cached("model")
def peak_table(rows: pd.DataFrame) -> pd.DataFrame:
    """The largest peak of each model whose holders are known, of training where it was trained; the models with the most first.

    Returns:
        Columns: `run_id`, `id`, `name`, `attention_type`, `seq_len`, `batch_size`, `dtype`, `scope`, `mib`, `planned`, and of the
        details `parts`, `timeline`.
    """
    found = pick(having(rows, "model", "mode"), "peak_memory")
    optimisation = found.get("factor.optimisation", pd.Series("eager", index=found.index)).fillna("eager")
    found = found[optimisation == "eager"]
    found = found[[_told(details) for details in found["details"]]] if len(found) else found
    if found.empty:
        return pd.DataFrame()
    found = found.assign(trains=found["scope"] == "training_step")
    found = found.sort_values(["trains", "estimate"], ascending=False, kind="stable")
    found = found.drop_duplicates([f"factor.{name}" for name in ("name", "attention_type", "dtype")])
    named = {name: found[f"factor.{name}"] for name in ("name", "attention_type", "seq_len", "batch_size", "dtype")}
    plain = {"run_id": found["run_id"], "id": found["id"], "scope": found["scope"]}
    parts = {name: [details[name] for details in found["details"]] for name in ("parts", "timeline")}
    return pd.DataFrame(plain | named | {"mib": found["estimate"], "planned": found["predicted"]} | parts)


def _told(details: Any) -> bool:
    """Whether a row tells who holds its peak, in the form that is drawn: rows may come from elsewhere."""
    parts, timeline = details.get("parts"), details.get("timeline")
    if not (isinstance(parts, list) and parts and isinstance(timeline, dict)):
        return False
    known = all(
        isinstance(part, list)
        and len(part) == 5
        and all(isinstance(word, str) for word in part[:4])
        and _counts([part[4]])
        for part in parts
    )
    at, phases, kinds = (timeline.get(name) for name in ("at", "phases", "kinds"))
    if not (
        known and isinstance(at, list) and at and _counts(at) and isinstance(phases, list) and isinstance(kinds, dict)
    ):
        return False
    series = [one for one in kinds.values() if isinstance(one, list) and len(one) == len(at) and _counts(one)]
    return len(series) == len(kinds) > 0 and len(phases) == len(at) and set(kinds) <= set(KIND_COLOURS)


def _counts(values: list[Any]) -> bool:
    return all(isinstance(value, int) and 0 <= value < 2**53 for value in values)


@cached("model")
def holders_table(rows: pd.DataFrame) -> pd.DataFrame:
    """The parts that hold most of each model's largest peak: `run_id`, `seq_len` and columns as in `HOLDER_COLUMNS`."""
    lines = []
    for _, row in peak_table(rows).head(_MODELS).iterrows():
        whole = sum(part[4] for part in row["parts"])
        for kind, module, operation, line, size in sorted(row["parts"], key=lambda part: -part[4])[:_LARGEST]:
            of = {name: row[name] for name in ("run_id", "name", "seq_len")}
            of["scope"] = f"{_WORDS.get(row['scope'], row['scope'])}, n = {int(row['seq_len'])}"
            by = line or operation.removeprefix("aten::") or "—"
            held = {"kind": kind, "module": module or "—", "by": by, "mib": size / _MIB, "share": f"{size / whole:.0%}"}
            lines.append(of | held)
    return pd.DataFrame(lines)


@framed("Who holds the memory", "model", why="no peak was measured whose holders are known")
def memory_timeline(rows: pd.DataFrame) -> Drawn | None:
    """What is alive over one call at each model's largest peak, by kind, stacked; the peak is marked."""
    table = peak_table(rows)
    if table.empty:
        return None
    parts = [_moments(row) for _, row in table.head(_MODELS).iterrows()]
    data = pd.concat(parts, ignore_index=True)
    colour = held_colour([kind for kind in KIND_COLOURS if kind in set(data["kind"])])
    alone = len(parts) == 1
    width = 2 * WIDTH if alone else WIDTH

    def draw(part: pd.DataFrame) -> alt.TopLevelMixin:
        said, part = part["said"].iloc[0], part.drop(columns=["panel", "said"])
        top = float(part["whole"].max())
        y = {"title": "Live tensors (MiB)", "scale": alt.Scale(domain=[0, top * 1.18], nice=False)}
        x = alt.X("at:Q", title="Tensors born and died, in order", axis=alt.Axis(grid=False, format="~s"))
        area = (
            alt.Chart(part)
            .mark_area(interpolate="step-after", line=False)
            .encode(
                x=x,
                y=alt.Y("mib:Q", stack="zero", **y),
                color=colour,
                order=alt.Order("order:Q"),
                tooltip=tooltips("kind phase", "mib whole", ",.1f", mib="MiB", whole="in all, MiB"),
            )
        )
        moments = part.drop_duplicates("at")
        small = {"fontSize": 11, "color": QUIET, "baseline": "top"}
        peak = alt.Chart(moments.nlargest(1, "whole"))
        phases = moments.drop_duplicates("phase")
        shown = alt.Chart(phases.assign(phase=phases["phase"].str.replace("_", " "))).encode(x="at:Q")
        layers = [
            area,
            *(
                shown.transform_filter(f"{'' if late else '!'}(datum.at > {0.85 * float(part['at'].max())})")
                .mark_text(align="right" if late else "left", dx=-3 if late else 3, **small)
                .encode(y=alt.value(3), text="phase:N")
                for late in (False, True)
            ),
            peak.mark_point(size=70, filled=True, color=INK, opacity=1).encode(x="at:Q", y=alt.Y("whole:Q", **y)),
            peak.mark_text(dy=-10, fontSize=12, color=INK).encode(
                x="at:Q", y=alt.Y("whole:Q", **y), text=alt.value(said)
            ),
        ]
        if phases["phase"].nunique() > 1:
            layers.insert(1, shown.mark_rule(color=QUIET, strokeWidth=0.6))
        return alt.layer(*layers, width=width, height=HEIGHT)

    subtitle = "Counted, exact, in the call with each model's largest peak. The point is the peak."
    if alone:
        return draw(data), subtitle, f": {data['panel'].iloc[0]}"
    return panels(data, draw, columns=2), subtitle


def _moments(row: pd.Series) -> pd.DataFrame:
    """A peak's timeline as a chart takes it: a line per moment and kind."""
    timeline = row["timeline"]
    held = pd.DataFrame(timeline["kinds"]).div(_MIB)
    held = held.assign(at=timeline["at"], phase=[str(phase) for phase in timeline["phases"]])
    held["whole"] = held[list(timeline["kinds"])].sum(axis=1)
    data = held.melt(["at", "phase", "whole"], var_name="kind", value_name="mib").round(3)
    data["order"] = data["kind"].map([*Held].index)
    scope = _WORDS.get(row["scope"], row["scope"])
    panel = f"{row['name']}, {scope}, n = {int(row['seq_len'])}, batch {int(row['batch_size'])}, {row['dtype']}"
    peak = f"peak {format_number(row['mib'])} MiB"
    linked = {name: value.iloc[0] for name, value in links(pd.DataFrame([row]), but="link_row").items()}
    return data.assign(panel=panel, said=peak, **linked)


def memory_words(rows: pd.DataFrame) -> Iterator[Claim]:
    """Who holds each model's largest peak."""
    for _, row in peak_table(rows).iterrows():
        shape = f"batch {int(row['batch_size'])}, n = {int(row['seq_len'])}"
        about = f"{row['name']} ({row['attention_type']}, {row['dtype']}), {shape}"
        whole = sum(part[4] for part in row["parts"])
        kinds = pd.DataFrame(row["parts"]).groupby(0)[4].sum().sort_values(ascending=False)
        (first, most), *rest = kinds.items()
        others = ", ".join(f"{kind} {size / whole:.0%}" for kind, size in rest if size / whole >= 0.05)
        what = _WORDS.get(row["scope"], row["scope"])
        answer = f"at the peak of {what}, {row['mib']:,.0f} MiB, {first} hold {most / whole:.0%}"
        sure = "counted to the byte" + (f"; {others}" if others else "")
        if pd.notna(row["planned"]):
            off = row["mib"] / row["planned"] - 1
            sure += (
                "; as planned" if abs(off) < 5e-4 else f"; {abs(off):.1%} {'above' if off > 0 else 'below'} the plan"
            )
        yield Claim(answer, sure, about=about)
