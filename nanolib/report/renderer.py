"""Render charts in JupyterLab without a network, and as pictures on code hosts and in nbconvert.

JupyterLab bundles Vega 5, and cannot draw the layered charts of Altair's Vega-Lite 6. nanolib
therefore compiles charts to Vega 5, and adds a PNG for viewers that do not draw Vega.
"""

import base64
import contextlib
import io
import os
from pathlib import Path
from typing import Any

import altair as alt
import vl_convert
from altair.utils import schemapi

from nanolib.paths import put_in_place
from nanolib.report.theme import Drawing

VEGALITE_VERSION = "5.20"  # This version compiles to Vega 5, which JupyterLab bundles.
PAGE_VERSION = "6.4"  # This version compiles to Vega 6, which vl-convert bundles for pages.
_SCALE = 2  # Pixels per point of a picture in a report.
_NOTEBOOK_SCALE = 1.3  # Pictures in notebooks are smaller, because git stores the notebooks.


def javascript() -> str:
    """Return Vega's JavaScript for the report page, and store a copy in the user's cache folder."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "nanolib"
    kept = folder / f"vega-{PAGE_VERSION}-{vl_convert.__version__}.js"
    if kept.is_file():
        return kept.read_text(encoding="utf-8")
    bundle = vl_convert.javascript_bundle(vl_version=PAGE_VERSION)
    # If the folder is read-only, each report bundles Vega again.
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        with put_in_place(kept) as file:
            file.write_text(bundle, encoding="utf-8")
    return bundle


def live_chart(chart: Drawing) -> alt.JupyterChart:
    """Return a widget that shows a chart. Set the widget's `chart` to show another chart."""
    alt.JupyterChart.enable_offline()  # Without this call, the widget loads Vega from the network.
    return alt.JupyterChart(chart, embed_options={"actions": False})


def _palette(picture: bytes) -> bytes:
    """Reduce a PNG to 256 colors. A chart needs no more, and the file is eight times smaller."""
    from PIL import Image

    packed = io.BytesIO()
    Image.open(io.BytesIO(picture)).convert("RGB").quantize(
        256, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE
    ).save(packed, "PNG")
    return packed.getvalue()


def save(spec: dict[str, Any], folder: Path, name: str) -> None:
    """Save a Vega-Lite chart in a folder, as a PNG file and an SVG file with the same name."""
    drawn = vl_convert.vegalite_to_svg(spec, vl_version=PAGE_VERSION)
    (folder / f"{name}.svg").write_text(drawn, encoding="utf-8")
    (folder / f"{name}.png").write_bytes(_palette(vl_convert.svg_to_png(drawn, scale=_SCALE)))


def _mime_bundle(spec: dict[str, Any], **_: Any) -> dict[str, Any]:
    drawn = vl_convert.vegalite_to_vega(spec, vl_version=VEGALITE_VERSION)
    picture = _palette(vl_convert.vega_to_png(drawn, scale=_NOTEBOOK_SCALE))
    return {
        "application/vnd.vega.v5+json": drawn,
        "image/png": base64.b64encode(picture).decode(),
        "text/plain": "<nanolib chart>",
    }


def enable() -> None:
    """Show the charts of this notebook as Vega 5 and PNG, without Altair's schema check."""
    schemapi.DEBUG_MODE = False
    alt.renderers.register("nanolib", _mime_bundle)
    alt.renderers.enable("nanolib")
