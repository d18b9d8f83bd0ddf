"""What the words of a report mean, as docs/glossary.md (`python -m nanolib.report.glossary`)."""

from __future__ import annotations

from pathlib import Path

from nanolib.measurement import FLAG_TEXT

TERMS = {
    "block": "One uninterrupted round of calls, summarized by its median: the unit of evidence.",
    "interval": "The range [low … high] that holds the true figure 95 times in 100, unless another confidence is said.",
    "ceiling": "The best rate that this machine reached in the same run: of a matrix product per type, and of copying.",
    "roofline": "The least time that the ceilings allow: the larger of FLOPs over the product's rate and bytes over the copy's.",
    "bound": "What cannot be passed: skipping work bounds a speed-up; a case is bound by what takes most of its time.",
    "tile": "A square of the attention matrix that a kernel computes or skips as a whole.",
    "connection": "A pair of a query and a key that the mask keeps; sparsity is the share that it removes.",
    "warm-up": "Calls at the start that are slower than what follows; found by change points, and cut.",
    "nats per byte": "Loss per byte of text: the mean of −ln p of the next byte. Divide by 0.693 for bits.",
    "cold cache": "The last-level cache is overwritten before each call, so that inputs come from memory.",
    "utilisation": "An estimate from how busy the cores were, between idle power and the highest power. It is no reading.",
    "parallel efficiency": "One rank's time, over ranks times their time; 100 % is perfect scaling.",
    "equivalent": "The 90 % interval of the change lies within ±3 %.",
    "inconclusive": "Too little evidence; the smallest change that could have been seen is given.",
    "suspect": "A change that is likely beyond 3 %, but not sure enough to fail a build.",
}


def page() -> str:
    """docs/glossary.md."""
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
