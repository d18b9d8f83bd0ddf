"""The working tree elsewhere, for what must change it."""

import shutil

from nanolib.paths import checkout, git


def copied(folder):
    """The tracked files and those not yet added, in a folder."""
    root = checkout()
    files = git(root, "ls-files", "--cached", "--others", "--exclude-standard", "-z")
    for file in filter(None, files.split("\0")):
        if (root / file).is_file():
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(root / file, folder / file)
    return folder
