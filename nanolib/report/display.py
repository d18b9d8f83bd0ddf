"""Show tables, findings and charts in a notebook, and save charts as pictures.

JupyterLab bundles Vega 5, and cannot draw the layered charts of Altair's Vega-Lite 6. nanolib
therefore compiles charts to Vega 5, and adds a PNG for viewers that do not draw Vega.
"""

import base64
import contextlib
import io
import os
import re
from collections import defaultdict
from collections.abc import Iterable
from html import escape
from pathlib import Path
from typing import Any

import altair as alt
import anywidget
import pandas as pd
import traitlets
import vl_convert
from altair.utils import schemapi
from IPython.display import Markdown
from IPython.display import display as put

from nanolib.paths import put_in_place
from nanolib.report.section import MOST_CHARTS, Finding, Section
from nanolib.report.tables import readable
from nanolib.report.theme import Drawing, is_empty

__all__ = ["Answer", "Lines", "Table", "Tables", "enable", "show"]


_EMPTY = "The table is empty."  # Such as the predictions of cases without a formula.


class Table:
    """Table whose cells do not wrap. Readers can scroll a table that is too wide.

    Args:
        frame: Table of text, for example from `tables.readable`.
        links: Values that the report page filters the lines by, with a column per filter.

    Example:
        >>> Table(pd.DataFrame({"case": ["dense"], "ms": ["1.5"]}))  # A notebook shows HTML.
          case  ms
         dense 1.5
    """

    def __init__(self, frame: pd.DataFrame, links: pd.DataFrame | None = None):
        self.frame = frame
        self.links = pd.DataFrame(index=frame.index) if links is None else links

    def _repr_html_(self) -> str:
        if self.frame.empty:
            return f"<p>{_EMPTY}</p>"
        sides = [_side(self.frame[name].astype(str)) for name in self.frame]
        rows = [_row("th", sides, self.frame.columns)]
        for line, links in zip(self.frame.to_numpy(), self.links.to_dict("records"), strict=True):
            about = (
                f' data-{name}="{escape(str(value).removesuffix(".0"))}"'
                for name, value in links.items()
                if pd.notna(value)
            )
            rows.append(_row("td", sides, line, "".join(about)))
        look = 'style="overflow-x: auto" tabindex="0" role="region" aria-label="Table"'
        return f"<div {look}><table>{''.join(rows)}</table></div>"

    def __repr__(self) -> str:
        return _EMPTY if self.frame.empty else self.frame.to_string(index=False)

    def foldable_html(self, title: str, is_open: bool) -> str:
        """Return the HTML of a section that readers can fold, with the title and the table."""
        mark = " open" if is_open else ""
        return f"<details{mark}><summary>{escape(title)}</summary>{self._repr_html_()}</details>"


def _row(tag: str, sides: Iterable[str], line: Iterable[object], about: str = "") -> str:
    # Without this style, JupyterLab wraps cells, and widgets show cells without space between them.
    cells = (
        f'<{tag} style="text-align: {side}; white-space: nowrap; padding: 2px 8px">'
        f"{escape(str(value))}</{tag}>"
        for side, value in zip(sides, line, strict=True)
    )
    return f"<tr{about}>{''.join(cells)}</tr>"


_NUMBER = re.compile(r"[-+−]?[\d—]")


def _side(cells: Iterable[str]) -> str:
    """Return `right` as the alignment of a column if all cells are numbers, otherwise `left`."""
    return "right" if all(_NUMBER.match(cell) for cell in cells if cell) else "left"


class Lines:
    """List of findings, with a heading for each model or shape.

    Args:
        findings: Findings to list. The HTML contains their escaped texts.

    Example:
        >>> Lines([Finding("Dense is faster"), Finding("Not clear", "batch 2")])
        • Dense is faster.
        • Not clear: batch 2.
    """

    def __init__(self, findings: Iterable[Finding]):
        self.findings = list(findings)

    def _repr_html_(self) -> str:
        items = defaultdict(str)  # heading → HTML of its findings
        for finding in self.findings:
            answer = finding.text.rstrip(".")
            rest = finding.sentence.removeprefix(answer)
            items[finding.about] += f"<li><b>{escape(answer)}</b>{escape(rest)}</li>"
        return "".join(
            (f"<p><small>{escape(heading)}</small></p>" if heading else "") + f"<ul>{lines}</ul>"
            for heading, lines in items.items()
        )

    def __repr__(self) -> str:
        return "\n".join(f"• {finding}" for finding in self.findings)


class Tables:
    """Tables of a section. Only the main table is expanded.

    Args:
        section: Section of the report.
        rows: Measurements of any experiments on one machine.

    Example:
        >>> from nanolib.experiments.attention.view import SECTION
        >>> Tables(SECTION, run.measurements())  # doctest: +SKIP
    """

    def __init__(self, section: Section, rows: pd.DataFrame):
        self.tables = {
            title: Table(readable(table.of(rows), table.columns))
            for title, table in section.tables.items()
        }

    def _repr_html_(self) -> str:
        return "".join(
            table.foldable_html(title, index == 0)
            for index, (title, table) in enumerate(self.tables.items())
        )

    def __repr__(self) -> str:
        return "\n\n".join(f"{title}\n{table!r}" for title, table in self.tables.items())


class Answer:
    """Place at the top of a notebook, which shows the findings and the main chart after the run.

    Example:
        >>> answer = Answer()  # doctest: +SKIP
        >>> answer.show(SECTION, run.measurements())  # doctest: +SKIP
    """

    def __init__(self):
        texts = "The answer appears here after the measurement.", ""
        self._places = [put(Markdown(text), display_id=True) for text in texts]

    def show(self, section: Section, rows: pd.DataFrame) -> None:
        """Show the findings of a section and its main chart at the top of the notebook."""
        findings, chart = self._places
        findings.update(Lines(section.verdict(rows)))
        chart.update(section.main_chart(rows))


def show(section: Section, rows: pd.DataFrame) -> None:
    """Show the heading, findings, charts and tables of a section in a notebook.

    Example:
        >>> from nanolib.experiments.attention.view import SECTION
        >>> show(SECTION, run.measurements())  # doctest: +SKIP
    """
    charts = (draw(rows) for draw in [*section.charts.values()][:MOST_CHARTS])
    drawn = (chart for chart in charts if not is_empty(chart))
    put(Markdown(f"## {section.question}"), Lines(section.verdict(rows)), *drawn)
    put(Tables(section, rows))


class CommandLine(anywidget.AnyWidget):
    """Command with a button that copies the command. If copying fails, the text is selected.

    Attributes:
        text: Text of the command.
    """

    _esm = """
    export default { render({ model, el }) {
      const button = document.createElement("button"), code = document.createElement("code");
      button.className = "jupyter-button jupyter-widgets";
      button.style.cssText = "flex: none; width: auto; padding: 0 10px";
      code.style.cssText = "white-space: pre-wrap; overflow-wrap: anywhere";
      el.style.cssText = "display: flex; gap: 8px; align-items: center; margin: 4px 2px";
      const show = () => {
        code.textContent = model.get("text");
        button.textContent = "Copy as nano run …";
      };
      button.addEventListener("click", async () => {
        try {
          await navigator.clipboard.writeText(model.get("text"));
          button.textContent = "Copied";
        } catch {
          getSelection().selectAllChildren(code);
          button.textContent = "Selected: press Ctrl+C";
        }
      });
      model.on("change:text", show);
      show();
      el.append(button, code);
    } };
    """
    text = traitlets.Unicode().tag(sync=True)


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


def _mime_bundle(spec: dict[str, Any], **_) -> dict[str, Any]:
    drawn = vl_convert.vegalite_to_vega(spec, vl_version=VEGALITE_VERSION)
    picture = _palette(vl_convert.vega_to_png(drawn, scale=_NOTEBOOK_SCALE))
    return {
        "application/vnd.vega.v5+json": drawn,
        "image/png": base64.b64encode(picture).decode(),
        "text/plain": "<nanolib chart>",
    }


def enable() -> None:
    """Show the charts of this notebook as Vega 5 and PNG, without Altair's schema check.

    Example:
        >>> enable()  # doctest: +SKIP
    """
    schemapi.DEBUG_MODE = False
    alt.renderers.register("nanolib", _mime_bundle)
    alt.renderers.enable("nanolib")
