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
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

import altair as alt
import vl_convert
from altair.utils import schemapi

from nanolib.measurement import BadInput, printable
from nanolib.report.linking import linked

VEGALITE_VERSION = "5.20"  # compiles to Vega 5, which JupyterLab bundles
PAGE_VERSION = "6.4"  # compiles to Vega 6, which vl-convert bundles for pages of our own
_SCALE = 2  # pixels per point of pictures in a report
_NOTEBOOK_SCALE = 1.3  # and in notebooks, which are committed with them
_CONTROL = re.compile(r"\\u00(?:[01][0-9a-f]|7f|[89][0-9a-f])|\\[bfr]")  # as JSON writes them


def vega_spec(chart: alt.TopLevelMixin, vl_version: str = VEGALITE_VERSION) -> dict[str, Any]:
    """The chart compiled to Vega by one version of Vega-Lite."""
    return _compiled(chart.to_dict(), vl_version)


def _compiled(spec: dict[str, Any], vl_version: str) -> dict[str, Any]:
    """Compile to Vega; over a control character in any text vl-convert would abort the whole process."""
    clean = _without_control(spec) if _CONTROL.search(json.dumps(spec)) else spec
    return vl_convert.vegalite_to_vega(clean, vl_version=vl_version)


def _without_control(value: Any) -> Any:
    if isinstance(value, str):
        return "\n".join(map(printable, value.split("\n")))
    if isinstance(value, dict):
        return {_without_control(key): _without_control(item) for key, item in value.items()}
    return [_without_control(item) for item in value] if isinstance(value, list) else value


class LinkedSpecs:
    """Charts of a page, where they follow what is picked for all of them; their pictures in a thread, while others are made.

    Args:
        pictures: Where NAME.png and NAME.svg of each go, which takes longer than all the rest; nowhere if None.
    """

    def __init__(self, pictures: Path | None) -> None:
        self._pictures = pictures
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="nanolib-charts")
        self._made: dict[str, dict[str, Any]] = {}
        self._coming: list[Future[None]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._thread.shutdown(cancel_futures=True)

    def add(self, name: str, chart: alt.TopLevelMixin) -> None:
        """One more."""
        spec = self._made[name] = linked(chart)
        if self._pictures is not None:
            self._coming.append(self._thread.submit(self._draw, name, spec, self._pictures))

    @staticmethod
    def _draw(name: str, spec: dict[str, Any], folder: Path) -> None:
        save(_compiled(spec, PAGE_VERSION), folder, name)

    def all(self) -> dict[str, dict[str, Any]]:
        """Wait for all of them; name → its Vega-Lite, which the page compiles for the width and the theme that it has."""
        for one in self._coming:
            one.result()
        return self._made


@contextlib.contextmanager
def quick_charts() -> Iterator[None]:
    """Altair checks no chart against its schema, and turns each table into values once for all layers that draw it.

    The tests let it check every chart; where many are drawn that would take as long as drawing them.
    """
    known: dict[int, tuple[Any, Any]] = {}

    def once(data: Any) -> Any:
        table = (
            data.to_native() if hasattr(data, "to_native") else data
        )  # Altair wraps it anew each time
        if id(table) not in known:
            known[id(table)] = table, alt.default_data_transformer(data)
        return known[id(table)][1]

    alt.data_transformers.register("nanolib", once)
    with schemapi.debug_mode(False), alt.data_transformers.enable("nanolib"):
        yield


@functools.cache
def javascript() -> str:
    """Vega for a page of our own. Bundling takes seconds, so that what came out is kept in the user's cache folder."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "nanolib"
    kept = folder / f"vega-{PAGE_VERSION}-{vl_convert.__version__}.js"
    if kept.is_file():
        return kept.read_text(encoding="utf-8")
    bundle = vl_convert.javascript_bundle(vl_version=PAGE_VERSION)
    with contextlib.suppress(
        OSError
    ):  # a home that cannot be written: the next report bundles again
        folder.mkdir(parents=True, exist_ok=True)
        half = kept.with_suffix(f".{os.getpid()}")
        half.write_text(bundle, encoding="utf-8")
        half.replace(kept)
    return bundle


class LiveChart(alt.JupyterChart):
    """A chart whose parameters are the kernel's: a browser that draws late sends back what they were, and is told again."""

    def set_state(self, sync_data: dict[str, Any]) -> None:
        """Take what a browser sends but the parameters."""
        theirs = sync_data.pop("_params", self._params)
        super().set_state(sync_data)
        if theirs != self._params:
            self.send_state("_params")


def live_chart(chart: alt.TopLevelMixin) -> LiveChart:
    """A chart whose `chart` can be set anew; offline, or it would ask the network for Vega."""
    LiveChart.enable_offline()
    return LiveChart(chart, embed_options={"actions": False})


def linked_chart(chart: alt.TopLevelMixin) -> LiveChart:
    """A live chart with parameters `pick_run`, `pick_model` and `pick_n`, as far as its data know of them; see `linking.linked`."""
    spec = linked(chart)
    kinds = {"hconcat": alt.HConcatChart, "vconcat": alt.VConcatChart, "layer": alt.LayerChart}
    kind = next((kind for key, kind in kinds.items() if key in spec), alt.Chart)
    return live_chart(kind.from_dict(spec, validate=False))


def _palette(picture: bytes, small: bool = False) -> bytes:
    """A PNG in 256 colours, which a chart has; an eighth of the bytes that vl-convert's four channels take.

    Args:
        picture: A PNG.
        small: Take the time that a tenth less takes.
    """
    from PIL import Image

    packed = io.BytesIO()
    Image.open(io.BytesIO(picture)).convert("RGB").quantize(
        256, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE
    ).save(packed, "PNG", optimize=small)
    return packed.getvalue()


def save(spec: dict[str, Any], folder: Path, name: str) -> None:
    """Write NAME.png and NAME.svg of a chart compiled by `vega_spec`."""
    drawn = vl_convert.vega_to_svg(spec)  # once for both
    (folder / f"{name}.png").write_bytes(_palette(vl_convert.svg_to_png(drawn, scale=_SCALE)))
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
        ".png": lambda: _palette(vl_convert.vega_to_png(spec, scale=_SCALE)),
        ".svg": lambda: vl_convert.vega_to_svg(spec).encode(),
    }
    if path.suffix not in writers:
        raise BadInput(f"--chart: {path} ends with none of {', '.join(writers)}; name it so")
    path.write_bytes(writers[path.suffix]())


def _mime_bundle(spec: dict[str, Any], **_: Any) -> dict[str, Any]:
    return dict(_shown(json.dumps(spec)))


@functools.lru_cache(maxsize=2)  # a notebook's main chart is drawn at its top too
def _shown(spec: str) -> dict[str, Any]:
    compiled = _compiled(json.loads(spec), VEGALITE_VERSION)
    picture = _palette(vl_convert.vega_to_png(compiled, scale=_NOTEBOOK_SCALE), small=True)
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
