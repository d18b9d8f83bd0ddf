"""Render charts everywhere: interactive in JupyterLab (offline, untrusted), a picture on a code host and in nbconvert.

JupyterLab bundles Vega 5. Altair writes Vega-Lite 6, whose layered charts that bundle does not draw. So charts are compiled to
Vega 5, with a PNG for everything that does not draw Vega.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import io
import os
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


def compiled(spec: dict[str, Any], vl_version: str = PAGE_VERSION) -> dict[str, Any]:
    """Compile Vega-Lite to Vega. A control character in any text would make vl-convert abort the whole process."""
    return vl_convert.vegalite_to_vega(_without_control(spec), vl_version=vl_version)


def _without_control(value: Any) -> Any:
    if isinstance(value, str):
        return value if value.isprintable() else "\n".join(map(printable, value.split("\n")))
    if isinstance(value, dict):
        return {_without_control(key): _without_control(item) for key, item in value.items()}
    return [_without_control(item) for item in value] if isinstance(value, list) else value


def unchecked() -> contextlib.AbstractContextManager[Any]:
    """Stop Altair from checking charts against its schema, which takes as long as drawing them; the tests check every chart."""
    return schemapi.debug_mode(False)


@functools.cache
def javascript() -> str:
    """Return Vega for a page of our own. Bundling takes seconds, so the result is kept in the user's cache folder."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "nanolib"
    kept = folder / f"vega-{PAGE_VERSION}-{vl_convert.__version__}.js"
    if kept.is_file():
        return kept.read_text(encoding="utf-8")
    bundle = vl_convert.javascript_bundle(vl_version=PAGE_VERSION)
    with contextlib.suppress(OSError):  # if the home is read-only, the next report bundles it again
        folder.mkdir(parents=True, exist_ok=True)
        half = kept.with_suffix(f".{os.getpid()}")
        half.write_text(bundle, encoding="utf-8")
        half.replace(kept)
    return bundle


def live_chart(chart: alt.TopLevelMixin) -> alt.JupyterChart:
    """Return a chart whose `chart` can be replaced; offline, or it would request Vega from the network."""
    alt.JupyterChart.enable_offline()
    return alt.JupyterChart(chart, embed_options={"actions": False})


def _palette(picture: bytes) -> bytes:
    """Reduce a PNG to 256 colors, which are enough for a chart and take an eighth of the bytes."""
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
    """Show Altair charts in this notebook by the renderer above, unchecked."""
    schemapi.DEBUG_MODE = False
    alt.renderers.register("nanolib", _mime_bundle)
    alt.renderers.enable("nanolib")
