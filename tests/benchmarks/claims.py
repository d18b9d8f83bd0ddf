"""On 1,000 databases drawn at random, how many claims of the verdicts contradict their rows.

python tests/benchmarks/claims.py --databases 1000
"""

import argparse
import sys
import tempfile
from pathlib import Path

from hypothesis import HealthCheck, Phase, given, seed, settings

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.report.generated import contradictions, databases


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--databases", type=int, default=1000, help="how many")
    parser.add_argument("--seed", type=int, default=0, help="of what is drawn")
    options = parser.parse_args()
    drawn, wrong = [], []

    with tempfile.TemporaryDirectory() as folder:

        @seed(options.seed)
        @settings(
            max_examples=options.databases,
            deadline=None,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(database=databases())
        def each(database):
            wrong.extend(contradictions(*database, Path(folder) / f"{len(drawn)}.sqlite"))
            drawn.append(database[0])

        each()
    counts = ", ".join(f"{drawn.count(name)} {name}" for name in sorted(set(drawn)))
    print(f"{len(drawn)} databases ({counts}): {len(wrong)} claims that contradict their rows")
    print("\n".join(wrong[:20]))
    raise SystemExit(bool(wrong))


if __name__ == "__main__":
    main()
