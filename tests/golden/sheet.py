"""The sheet as text: a line per case, below it a line per answer; and how two sheets differ.

An answer's line is a tab, what is answered, a tab, and the value. `~` is before a number that is rounded: one unit of its last
digit more or less is the same.
"""

from collections.abc import Mapping
from decimal import Decimal
from pathlib import Path

Sheet = dict[str, dict[str, str]]  # case → answer → value
FOLDER = Path(__file__).parent / "sheet"


def path_of(suite: str, notebook: str) -> Path:
    """The file of a suite's notebook."""
    return FOLDER / suite / f"{notebook}.txt"


def write(path: Path, sheet: Sheet) -> None:
    """Write a sheet, sorted."""
    lines = []
    for case, answers in sorted(sheet.items()):
        lines += [case, *(f"\t{answer}\t{value}" for answer, value in sorted(answers.items()))]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def read(path: Path) -> Sheet:
    """The inverse of `write`."""
    sheet: Sheet = {}
    case = ""
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("\t"):
            _, answer, value = line.split("\t")
            sheet[case][answer] = value
        else:
            case = line
            sheet[case] = {}
    return sheet


def differences(
    before: Mapping[str, Mapping[str, str]], after: Mapping[str, Mapping[str, str]]
) -> list[str]:
    """A line for each case that is there once, and for each answer that differs: `case: answer: old → new`."""
    lines = [f"{case}: no such case any more" for case in sorted(before.keys() - after.keys())]
    lines += [f"{case}: a new case" for case in sorted(after.keys() - before.keys())]
    for case in sorted(before.keys() & after.keys()):
        old, new = before[case], after[case]
        for answer in sorted(old.keys() | new.keys()):
            was, now = old.get(answer, "nothing"), new.get(answer, "nothing")
            if not _alike(was, now):
                lines.append(f"{case}: {answer}: {was} → {now}")
    return lines


def _alike(was: str, now: str) -> bool:
    if was == now or not (was.startswith("~") and now.startswith("~")):
        return was == now
    old, new = Decimal(was[1:]), Decimal(now[1:])
    unit = Decimal(1).scaleb(max(old.as_tuple().exponent, new.as_tuple().exponent))  # type: ignore[type-var]
    return abs(new - old) <= unit


def summary(lines: list[str], most: int = 20) -> str:
    """The first differences, how many there are, and what to do."""
    shown = "\n".join(lines[:most])
    return f"{len(lines)} answer(s) differ from the sheet:\n{shown}\nif that is meant: python -m tests.golden.write"
