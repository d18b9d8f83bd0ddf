"""A command line that a notebook shows, with a button that copies it."""

from __future__ import annotations

import anywidget
import traitlets


class CommandLine(anywidget.AnyWidget):
    """Text of a command with a button that copies it; if the browser forbids that, the text is selected instead.

    Attributes:
        text: The command.
    """

    _esm = """
    export default { render({ model, el }) {
      const button = document.createElement("button"), code = document.createElement("code");
      button.className = "jupyter-button jupyter-widgets";
      button.style.cssText = "flex: none; width: auto; padding: 0 10px";
      code.style.cssText = "white-space: pre-wrap; overflow-wrap: anywhere";
      el.style.cssText = "display: flex; gap: 8px; align-items: center; margin: 4px 2px";
      const show = () => { code.textContent = model.get("text"); button.textContent = "Copy as nano run …"; };
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
