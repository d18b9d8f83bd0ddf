"""Charts that show everywhere: interactive in JupyterLab (offline, untrusted), a picture on a code host and in nbconvert.

JupyterLab bundles Vega 5; Altair writes Vega-Lite 6, whose layered and selectable charts that bundle cannot draw. Compiled to
Vega 5 beforehand they work, with a PNG beside them for everything that draws no Vega.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import io
import json
import os
import re
from pathlib import Path
from typing import Any

import altair as alt
import vl_convert
from altair.utils import schemapi

from nanolib.measurement import BadInput, printable

VEGALITE_VERSION = "5.20"  # compiles to Vega 5, which JupyterLab bundles
PAGE_VERSION = "6.4"  # compiles to Vega 6, which vl-convert bundles for pages of our own
_SCALE = 2  # pixels per point of pictures in a report
_NOTEBOOK_SCALE = 1.3  # and in notebooks, which are committed with them
_CONTROL = re.compile(r"\\u00(?:[01][0-9a-f]|7f|[89][0-9a-f])|\\[bfr]")  # as JSON writes them


def compiled(spec: dict[str, Any], vl_version: str = PAGE_VERSION) -> dict[str, Any]:
    """Compile Vega-Lite to Vega; over a control character in any text vl-convert would abort the whole process."""
    clean = _without_control(spec) if _CONTROL.search(json.dumps(spec)) else spec
    return vl_convert.vegalite_to_vega(clean, vl_version=vl_version)


def _without_control(value: Any) -> Any:
    if isinstance(value, str):
        return "\n".join(map(printable, value.split("\n")))
    if isinstance(value, dict):
        return {_without_control(key): _without_control(item) for key, item in value.items()}
    return [_without_control(item) for item in value] if isinstance(value, list) else value


def unchecked() -> contextlib.AbstractContextManager[Any]:
    """Altair checks no chart against its schema: the tests let it check every one, and it takes as long as drawing them."""
    return schemapi.debug_mode(False)


@functools.cache
def javascript() -> str:
    """Vega for a page of our own. Bundling takes seconds, so that what came out is kept in the user's cache folder."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "nanolib"
    kept = folder / f"vega-{PAGE_VERSION}-{vl_convert.__version__}.js"
    if kept.is_file():
        return kept.read_text(encoding="utf-8")
    bundle = vl_convert.javascript_bundle(vl_version=PAGE_VERSION)
    with contextlib.suppress(OSError):  # a home that cannot be written: the next report bundles it
        folder.mkdir(parents=True, exist_ok=True)
        half = kept.with_suffix(f".{os.getpid()}")
        half.write_text(bundle, encoding="utf-8")
        half.replace(kept)
    return bundle


def live_chart(chart: alt.TopLevelMixin) -> alt.JupyterChart:
    """A chart whose `chart` can be set anew; offline, or it would ask the network for Vega."""
    alt.JupyterChart.enable_offline()
    return alt.JupyterChart(chart, embed_options={"actions": False})


def _palette(picture: bytes) -> bytes:
    """A PNG in 256 colors, which a chart has; an eighth of the bytes that vl-convert's four channels take."""
    from PIL import Image

    packed = io.BytesIO()
    Image.open(io.BytesIO(picture)).convert("RGB").quantize(
        256, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE
    ).save(packed, "PNG")
    return packed.getvalue()


def _pictures(spec: dict[str, Any]) -> dict[str, bytes]:
    """Draw a chart's Vega-Lite: ending of the file → its content."""
    drawn = vl_convert.vega_to_svg(compiled(spec))  # once for both
    png = _palette(vl_convert.svg_to_png(drawn, scale=_SCALE))
    return {".png": png, ".svg": drawn.encode()}


def save(spec: dict[str, Any], folder: Path, name: str) -> None:
    """Write NAME.png and NAME.svg of a chart's Vega-Lite."""
    for ending, content in _pictures(spec).items():
        (folder / f"{name}{ending}").write_bytes(content)


def save_as(chart: alt.TopLevelMixin, path: Path) -> None:
    """Write one chart to a file.

    Args:
        chart: The chart.
        path: Ends with .html (interactive, self-contained), .png or .svg.

    Raises:
        BadInput: Another ending.
    """
    spec = chart.to_dict()
    found = _pictures(spec)
    if path.suffix == ".html":
        found[".html"] = vl_convert.vega_to_html(compiled(spec), bundle=True).encode()
    if path.suffix not in found:
        raise BadInput(f"--chart: {path} must end with .html, .png or .svg")
    path.write_bytes(found[path.suffix])


def _mime_bundle(spec: dict[str, Any], **_: Any) -> dict[str, Any]:
    drawn = compiled(spec, VEGALITE_VERSION)
    picture = _palette(vl_convert.vega_to_png(drawn, scale=_NOTEBOOK_SCALE))
    return {
        "application/vnd.vega.v5+json": drawn,
        "image/png": base64.b64encode(picture).decode(),
        "text/plain": "<nanolib chart>",
    }


def enable() -> None:
    """Show Altair charts in this notebook through the renderer above, unchecked."""
    schemapi.DEBUG_MODE = False
    alt.renderers.register("nanolib", _mime_bundle)
    alt.renderers.enable("nanolib")
