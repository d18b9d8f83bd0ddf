"""Make the sheet anew: `python -m tests.golden.write`, or `... write quick` for one suite, `... write full model` for one file."""

import sys

from tests.golden import answers, names, sheet


def main(asked):
    """Write those files whose suite and notebook are asked for; all where none is."""
    for suite in names.SUITES:
        for notebook in names.NOTEBOOKS:
            if set(asked) <= {suite, notebook}:
                with answers.everywhere_alike():
                    by_line = answers.cases(suite, notebook)
                    made = {
                        line: answers.all_of(suite, notebook, case)
                        for line, case in by_line.items()
                    }
                sheet.write(sheet.path_of(suite, notebook), made)
                print(f"{suite} {notebook}: {len(made)} cases", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
