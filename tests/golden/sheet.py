"""The sheet as text: a line per case, below it a line per answer; and how two sheets differ.

An answer's line is a tab, what is answered, a tab, and the value. `~` is before a number that is rounded to `DECIMALS`: one unit
of its last digit more or less is the same.
"""

from pathlib import Path

DECIMALS = 3
FOLDER = Path(__file__).parent / "sheet"


def path_of(suite, notebook):
    """The file of a suite's notebook."""
    return FOLDER / suite / f"{notebook}.txt"


def write(path, sheet):
    """Write a sheet, sorted."""
    lines = []
    for case, answers in sorted(sheet.items()):
        lines += [case, *(f"\t{answer}\t{value}" for answer, value in sorted(answers.items()))]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def read(path):
    """The inverse of `write`."""
    sheet, case = {}, ""
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("\t"):
            _, answer, value = line.split("\t")
            sheet[case][answer] = value
        else:
            case = line
            sheet[case] = {}
    return sheet


def differences(before, after):
    """A line for each answer of a case that differs: `case: answer: old → new`."""
    lines = []
    for case, old in before.items():
        new = after[case]
        for answer in sorted(old.keys() | new.keys()):
            was, now = old.get(answer, "nothing"), new.get(answer, "nothing")
            if not _alike(was, now):
                lines.append(f"{case}: {answer}: {was} → {now}")
    return lines


def _alike(was, now):
    if was == now or not (was.startswith("~") and now.startswith("~")):
        return was == now
    return abs(float(now[1:]) - float(was[1:])) < 1.5 * 10**-DECIMALS
