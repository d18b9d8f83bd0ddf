"""What the words of a report mean: shown on hover, and as docs/glossary.md (`python -m nanolib.report.glossary`)."""

from __future__ import annotations

import re
from pathlib import Path

from markupsafe import Markup

from nanolib.measurement import FLAG_TEXT

TERMS = {
    "block": "One uninterrupted round of calls, summarised by its median: the unit of evidence.",
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
# What is said of it in a report: plural, and longer words first.
_WORDS = re.compile(
    r"(?<![\w-])(" + "|".join(sorted((re.escape(term) + "s?" for term in TERMS), key=len, reverse=True)) + r"|"
    r"" + "|".join(map(re.escape, FLAG_TEXT)) + r")(?![\w-]| s=)",  # a pattern is called block too
    re.IGNORECASE,
)


def meaning(word: str) -> str:
    """What a term, its plural or a flag means; empty for another word."""
    word = word.lower()
    return (
        TERMS.get(word)
        or TERMS.get(word.removesuffix("s"))
        or {str(flag): text for flag, text in FLAG_TEXT.items()}.get(word, "")
    )


def explained(text: object) -> Markup:
    """Text with its terms and flags marked, so that a page shows their meaning on hover; all the rest is escaped."""
    parts = _WORDS.split(str(text))
    marked = (
        Markup('<abbr title="{}">{}</abbr>').format(meaning(part), part) if at % 2 else Markup.escape(part)
        for at, part in enumerate(parts)
    )
    return Markup("").join(marked)


def page() -> str:
    """docs/glossary.md."""
    terms = [f"| {term} | {text} |" for term, text in TERMS.items()]
    flags = [f"| `{flag}` | {text} |" for flag, text in FLAG_TEXT.items()]
    head = ["# Glossary", "", "The report shows these on hover.", "", "| term | meaning |", "| --- | --- |"]
    return "\n".join([*head, *terms, "", "## Flags", "", "| flag | meaning |", "| --- | --- |", *flags]) + "\n"


if __name__ == "__main__":
    (Path(__file__).parents[2] / "docs" / "glossary.md").write_text(page(), encoding="utf-8")
