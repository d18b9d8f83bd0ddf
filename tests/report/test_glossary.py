"""The words of a report are explained, each once and in one place."""

import pytest

from nanolib.measurement import FLAG_TEXT, Flag
from nanolib.paths import checkout
from nanolib.report import glossary


def test_the_page_is_made_from_the_words_and_every_flag_is_on_it():
    written = (checkout() / "docs" / "glossary.md").read_text(encoding="utf-8")
    assert written == glossary.page()  # python -m nanolib.report.glossary
    assert all(f"| `{flag}` |" in written for flag in Flag)


@pytest.mark.parametrize(
    ("text", "marked"),
    [
        ("fewer blocks than that", ["blocks"]),
        ("Roofline and ceilings", ["Roofline", "ceilings"]),
        ("few_blocks, outliers_mild", ["few_blocks", "outliers_mild"]),
        ("blockchain, unbound, rebound, tile_size", []),
        ("no steady state", []),
        ("at 8,192 tokens block s=0.9 is the fastest", []),
    ],
)
def test_terms_are_marked_as_whole_words(text, marked):
    shown = glossary.explained(text)
    assert [part.split(">")[1].split("<")[0] for part in shown.split("<abbr")[1:]] == marked
    assert all(glossary.meaning(word) for word in marked)
    assert shown.striptags() == text


def test_what_is_no_term_is_escaped():
    shown = glossary.explained('<script>"block"</script>')
    assert "<script" not in shown and 'title="One uninterrupted' in shown
    assert glossary.meaning("script") == "" and glossary.meaning("slowdown") == FLAG_TEXT[Flag.SLOWDOWN]
