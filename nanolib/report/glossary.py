"""Explain the words of a report: writes docs/glossary.md (`python -m nanolib.report.glossary`)."""

from __future__ import annotations

from pathlib import Path

from nanolib.measurement import FLAG_TEXT

TERMS = {
    "block": "One uninterrupted round of calls, summarized by its median: the unit of evidence.",
    "interval": "The range [low … high] that includes the true value 95 times in 100, unless another confidence is given.",
    "ceiling": "The highest rate that this machine reached in the same run: of a matrix product per dtype, and of copying.",
    "roofline": "The least time that the ceilings allow: the longer one of FLOPs and bytes at their rates.",
    "bound": "An upper limit: skipped work bounds a speed-up. A compute-bound case spends most of its time on arithmetic.",
    "tile": "A square of the attention matrix that a kernel computes or skips as a whole.",
    "connection": "A pair of a query and a key that the mask keeps. Sparsity is the share that the mask removes.",
    "warm-up": "Calls at the start that are slower than the later ones. Change points find them, and they are cut.",
    "nats per byte": "Loss per byte of text: the mean of −ln p of the next byte. Divide by 0.693 for bits.",
    "cold cache": "The last-level cache is overwritten before each call, so that inputs come from memory.",
    "utilisation": "A power estimate from how busy the cores were, between idle and highest power. It is not a reading.",
    "parallel efficiency": "The time of one rank, over the number of ranks times their time. 100 % is perfect scaling.",
    "equivalent": "The 90 % interval of the change is within ±3 %.",
    "inconclusive": "Too little evidence. The minimum detectable change is reported.",
    "suspect": "A change that is likely beyond 3 %, but too uncertain to fail a build.",
}


def page() -> str:
    """Return the text of docs/glossary.md."""
    terms = [f"| {term} | {text} |" for term, text in TERMS.items()]
    flags = [f"| `{flag}` | {text} |" for flag, text in FLAG_TEXT.items()]
    head = ["# Glossary", "", "The words of a report.", "", "| term | meaning |", "| --- | --- |"]
    return (
        "\n".join(
            [*head, *terms, "", "## Flags", "", "| flag | meaning |", "| --- | --- |", *flags]
        )
        + "\n"
    )


if __name__ == "__main__":
    (Path(__file__).parents[2] / "docs" / "glossary.md").write_text(page(), encoding="utf-8")
