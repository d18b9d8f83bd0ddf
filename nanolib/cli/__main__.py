"""Run the `nano` command, for `python -m nanolib.cli`."""

from nanolib.cli import main

main()
