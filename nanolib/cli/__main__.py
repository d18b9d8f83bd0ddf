"""`python -m nanolib.cli` is `nano`."""

from nanolib.cli import main

main()
