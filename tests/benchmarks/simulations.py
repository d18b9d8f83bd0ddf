"""How often the rules of comparison are wrong, on 2,000 simulated comparisons of each kind; `make test` draws 200.

python tests/benchmarks/simulations.py
"""

import os
import subprocess
import sys
from pathlib import Path

if __name__ == "__main__":
    root = Path(__file__).parents[2]
    tests = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        "-rA",
        "tests/stats",
        "tests/meters/test_turns.py",
    ]
    sys.exit(
        subprocess.run(
            tests, cwd=root, env=os.environ | {"NANOLIB_SIMULATIONS": "2000"}, check=False
        ).returncode
    )
