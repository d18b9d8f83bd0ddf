"""How often comparisons are wrong, of 2,000 simulated ones of each kind; `make test` draws 200.

python tests/benchmarks/simulations.py
"""

import os
import sys
from pathlib import Path

import pytest

if __name__ == "__main__":
    os.environ["NANOLIB_SIMULATIONS"] = "2000"
    os.chdir(Path(__file__).parents[2])
    tests = ["tests/stats", "tests/meters/test_turns.py"]
    sys.exit(pytest.main(["-p", "no:cacheprovider", "-rA", *tests]))
