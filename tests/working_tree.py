"""The working tree elsewhere, for what must change it."""

import shutil
import subprocess

from nanolib.paths import checkout


def copied(folder, root=None):
    """The tracked files and those not yet added, in a folder."""
    root = root or checkout()
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    files = subprocess.run(listed, cwd=root, capture_output=True, text=True, check=True).stdout
    for file in filter(None, files.split("\0")):
        if (root / file).is_file():
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(root / file, folder / file)
    return folder
