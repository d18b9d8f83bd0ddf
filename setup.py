"""Build hook: put the notebooks, params files and docs into the wheel, as `nanolib/workbook`."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithWorkbook(build_py):
    """Build the package, and copy the folders that `nano init` copies."""

    def run(self):
        """Build; an editable install finds the folders in the checkout."""
        super().run()
        if self.editable_mode:
            return
        workbook = Path(self.build_lib) / "nanolib" / "workbook"
        shutil.rmtree(workbook, ignore_errors=True)  # of an earlier build
        for name in ("notebooks", "params", "docs"):
            shutil.copytree(
                name, workbook / name, ignore=shutil.ignore_patterns(".*", "*.py", "__pycache__")
            )


setup(cmdclass={"build_py": BuildWithWorkbook})
