"""The words of a report are explained, each once and in one place."""

from nanolib.measurement import Flag
from nanolib.paths import checkout
from nanolib.report import glossary


def test_the_page_is_made_from_the_words_and_every_flag_is_on_it():
    written = (checkout() / "docs" / "glossary.md").read_text(encoding="utf-8")
    assert written == glossary.page()  # python -m nanolib.report.glossary
    assert all(f"| `{flag}` |" in written for flag in Flag)
