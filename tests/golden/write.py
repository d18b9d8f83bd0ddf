"""Make the sheet anew: `python -m tests.golden.write`, or `... write quick` for one suite, `... write full model` for one file."""

import sys

from tests.golden import answers, names, sheet


def whole(suite, notebook):
    """The sheet of a suite's notebook."""
    by_line = answers.cases(suite, notebook)
    found = answers.counts(by_line)
    for line, case in by_line.items():
        found[line] = answers.all_of(suite, notebook, case)
    return found


def main(asked):
    """Write those files whose suite and notebook are asked for; all where none is."""
    for suite in names.SUITES:
        for notebook in names.NOTEBOOKS:
            if set(asked) <= {suite, notebook}:
                with answers.everywhere_alike():
                    made = whole(suite, notebook)
                sheet.write(sheet.path_of(suite, notebook), made)
                print(f"{suite} {notebook}: {len(made) - 1} cases", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
