"""What casts to 8 bits do to the products of a model; emulated, so marks are hollow and lines dashed."""

from __future__ import annotations

import altair as alt
import pandas as pd

from nanolib.report.claim import Claim
from nanolib.report.linking import link_columns, links
from nanolib.report.overview import cached, having, pick, why_empty
from nanolib.report.plot import plot
from nanolib.report.theme import empty_chart


@cached
def numerics_table(rows: pd.DataFrame) -> pd.DataFrame:
    """Errors of emulated products, one line per way to cast, layer and product.

    Returns:
        Columns: `variant`, `layer`, `product`, `relative_error`, `sqnr` (dB), and those by which a page's choice is followed.
    """
    rows = having(rows, "fp8", "variant")
    errors, noise = pick(rows, "relative_error"), pick(rows, "sqnr")
    if errors.empty:
        return pd.DataFrame()
    table = errors.assign(sqnr=noise["estimate"].to_numpy())
    parts = table["scope"].str.rsplit(" ", n=1)
    return pd.DataFrame(
        {
            "variant": table["factor.variant"],
            "layer": parts.str[0],
            "product": parts.str[1],
            "relative_error": table["estimate"],
            "sqnr": table["sqnr"],
            **links(table),
        }
    ).reset_index(drop=True)


def fp8_numerics(rows: pd.DataFrame) -> alt.TopLevelMixin:
    """Signal to noise of every layer's products by way to cast, with the median of each."""
    title = "Signal to noise of products in 8 bits"
    table = numerics_table(rows)
    if table.empty:
        return empty_chart(title, why_empty(rows, "fp8"))
    medians = table.groupby("variant", sort=False)["sqnr"].median()
    first = ~table["variant"].duplicated()
    data = pd.DataFrame(
        {
            "series": table["variant"],
            "x": table["sqnr"],
            "pred": table["variant"].map(medians).where(first),
            "sure": False,
            "hue": "c1",
            "text": (table["variant"].map(medians).map("{:.1f} dB".format)).where(first, ""),
            "note": table["layer"] + ", " + table["product"].str.replace("_", " "),
            **table[link_columns(table)],
        }
    )
    return plot(
        data,
        title,
        "rows",
        subtitle=[
            "Emulated, in a small decoder: a mark per product of a layer. Tick and number: the median."
        ],
        unit="Signal to noise (dB)",
        ref=float(medians.max()),
    )


def numerics_words(table: pd.DataFrame) -> list[Claim]:
    """What the numerics table says: signal to noise by cast, without an order."""
    if table.empty:
        return []
    medians = table.groupby("variant", sort=False)["sqnr"].median().sort_values(ascending=False)
    text = ", ".join(f"{name} {value:.1f} dB" for name, value in medians.items())
    return [Claim("Median signal to noise of the products, emulated", text)]
