"""Charts that show everywhere: interactive in JupyterLab (offline, untrusted), a picture on a code host and in nbconvert.

JupyterLab bundles Vega 5; Altair writes Vega-Lite 6, whose layered and selectable charts that bundle cannot draw. Compiled to
Vega 5 beforehand they work, with a PNG beside them for everything that draws no Vega.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import os
from pathlib import Path
from typing import Any

import altair as alt
import vl_convert
from altair.utils import schemapi

from nanolib.measurement import BadInput
from nanolib.report.linking import linked

VEGALITE_VERSION = "5.20"  # compiles to Vega 5, which JupyterLab bundles
PAGE_VERSION = "6.4"  # compiles to Vega 6, which vl-convert bundles for pages of our own
_SCALE = 2  # pixels per point of pictures in a report
_NOTEBOOK_SCALE = 1.4  # and in notebooks, which are committed with them


def vega_spec(chart: alt.TopLevelMixin, vl_version: str = VEGALITE_VERSION) -> dict[str, Any]:
    """The chart compiled to Vega by one version of Vega-Lite."""
    return vl_convert.vegalite_to_vega(chart.to_dict(), vl_version=vl_version)


def linked_spec(chart: alt.TopLevelMixin) -> dict[str, Any]:
    """The chart compiled for a page, where it follows what is picked for all of them."""
    return vl_convert.vegalite_to_vega(linked(chart), vl_version=PAGE_VERSION)


@functools.cache
def javascript() -> str:
    """Vega for a page of our own. Bundling takes seconds, so that what came out is kept in the user's cache folder."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "nanolib"
    kept = folder / f"vega-{PAGE_VERSION}-{vl_convert.__version__}.js"
    if kept.is_file():
        return kept.read_text(encoding="utf-8")
    bundle = vl_convert.javascript_bundle(vl_version=PAGE_VERSION)
    with contextlib.suppress(OSError):  # a home that cannot be written: the next report bundles again
        folder.mkdir(parents=True, exist_ok=True)
        half = kept.with_suffix(f".{os.getpid()}")
        half.write_text(bundle, encoding="utf-8")
        half.replace(kept)
    return bundle


def live_chart(chart: alt.TopLevelMixin) -> alt.JupyterChart:
    """A chart whose `chart` can be set anew; offline, or it would ask the network for Vega."""
    alt.JupyterChart.enable_offline()
    return alt.JupyterChart(chart, embed_options={"actions": False})


def linked_chart(chart: alt.TopLevelMixin) -> alt.JupyterChart:
    """A live chart with parameters `pick_run`, `pick_model` and `pick_n`, as far as its data know of them; see `linking.linked`."""
    spec = linked(chart)
    kinds = {"hconcat": alt.HConcatChart, "vconcat": alt.VConcatChart, "layer": alt.LayerChart}
    kind = next((kind for key, kind in kinds.items() if key in spec), alt.Chart)
    return live_chart(kind.from_dict(spec, validate=False))


def save(spec: dict[str, Any], folder: Path, name: str) -> None:
    """Write NAME.png and NAME.svg of a chart compiled by `vega_spec`."""
    drawn = vl_convert.vega_to_svg(spec)  # once for both
    (folder / f"{name}.png").write_bytes(vl_convert.svg_to_png(drawn, scale=_SCALE))
    (folder / f"{name}.svg").write_text(drawn, encoding="utf-8")


def save_as(chart: alt.TopLevelMixin, path: Path) -> None:
    """Write one chart to a file.

    Args:
        chart: The chart.
        path: Ends with .html (interactive, self-contained), .png or .svg.

    Raises:
        BadInput: Another ending.
    """
    spec = vega_spec(chart, PAGE_VERSION)
    writers = {
        ".html": lambda: vl_convert.vega_to_html(spec, bundle=True).encode(),
        ".png": lambda: vl_convert.vega_to_png(spec, scale=_SCALE),
        ".svg": lambda: vl_convert.vega_to_svg(spec).encode(),
    }
    if path.suffix not in writers:
        raise BadInput(f"--chart: {path} ends with none of {', '.join(writers)}; name it so")
    path.write_bytes(writers[path.suffix]())


def _mime_bundle(spec: dict[str, Any], **_: Any) -> dict[str, Any]:
    compiled = vl_convert.vegalite_to_vega(spec, vl_version=VEGALITE_VERSION)
    picture = vl_convert.vega_to_png(compiled, scale=_NOTEBOOK_SCALE)
    return {
        "application/vnd.vega.v5+json": compiled,
        "image/png": base64.b64encode(picture).decode(),
        "text/plain": "<nanolib chart>",
    }


def enable() -> None:
    """Show Altair charts in this notebook through the renderer above.

    Altair does not check them against its schema here: the tests do, and it takes as long as drawing them.
    """
    schemapi.DEBUG_MODE = False
    alt.renderers.register("nanolib", _mime_bundle)
    alt.renderers.enable("nanolib")
