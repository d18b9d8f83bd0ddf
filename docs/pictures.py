"""Make the pictures of README.md and docs/gallery.md from a report.

`python docs/pictures.py outputs/report` needs Chromium and the extra `dev`. The gallery names the
machine and the date of the report.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

DOCS = Path(__file__).parent
# Chart → the question that it answers.
GALLERY = {
    "attention_speed_up": "When is sparse attention faster?",
    "model_performance": "How much time and memory does a model need?",
    "warmup_curve": "How much warm-up is enough?",
    "operation_breakdown": "Where does a model's time go?",
    "fp8_parity": "Does the loss of FP8 training match?",
    "decode_scaling": "How well does attention scale across ranks?",
    "sharded_memory": "How long a sequence fits?",
}


def main(report: Path) -> None:
    """Take a screenshot of the report, copy its charts, and write the gallery."""
    chromium = next(
        path
        for name in ("chromium", "chromium-browser", "google-chrome")
        if (path := shutil.which(name))
    )
    flags = [
        "--no-sandbox",
        "--disable-gpu",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
    ]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=flags)
        page = browser.new_page(viewport={"width": 1280, "height": 1000})
        page.goto((report / "index.html").absolute().as_uri())
        page.wait_for_selector("body[data-ready=yes]", timeout=60_000)
        page.screenshot(path=DOCS / "report.png")
        with Image.open(DOCS / "report.png") as shot:  # 256 colors need a third of the bytes
            few = shot.convert("RGB").quantize(256)
        few.save(DOCS / "report.png", optimize=True)
        browser.close()
    folder = DOCS / "pictures"
    folder.mkdir(exist_ok=True)
    text = (report / "profiling_report.md").read_text(encoding="utf-8")
    run, hardware = _first_line(text, "Runs"), _first_line(text, "Hardware")
    machine = "{CPU}, {Cores} cores, {RAM (GiB)} GiB, {GPU}".format_map(hardware)
    day = run["Started"].split()[0]
    lines = [
        "# Gallery",
        "",
        f"Charts from one quick run of each notebook: {machine}, torch {run['torch']}, {day}.",
    ]
    for name, question in GALLERY.items():
        if (report / f"{name}.png").is_file():
            shutil.copy(report / f"{name}.png", folder)
            lines += ["", f"## {question}", "", f"![{question}](pictures/{name}.png)"]
    (DOCS / "gallery.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _first_line(report: str, title: str) -> dict[str, str]:
    """Return the first line of a table of the report in Markdown, column → cell."""
    below = report.partition(f"### {title}\n")[2].splitlines()
    titles, _, first, *_ = (line.strip("| ").split(" | ") for line in below if line.startswith("|"))
    return dict(zip(titles, first, strict=True))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
