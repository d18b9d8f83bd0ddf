"""Whether speed-ups within a run bear a busy machine, with processes that come and go.

Each ratio of attention is measured in a quiet run, and in one with as many busy processes as there
are cores, which stop and go on every three seconds. No order may turn round. Ratios of clean rounds
lie within 15 % of the quiet ones, and high / low is at most 1.5 in four of five pairs.
"""

import math
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from nanolib.experiments.attention import cases as experiment
from nanolib.meters.machine import usable_cores
from tests.benchmarks.parts.neighbors import busy_neighbors
from tests.measuring import rows_of

KINDS = [
    {"kind": "dense", "backend": "flash"},
    {"kind": "dense", "backend": "math"},
    {"kind": "sparse", "pattern": "window", "window": 256},
    {"kind": "sparse", "pattern": "random", "sparsity": 0.9},
]
FAR, WIDE, MOST_WIDE = 0.15, 1.5, 0.2
BUDGET_S = 24.0  # per case


def main():
    """Print a line per pair; 0 where all holds."""
    quiet = _gains()
    with busy_neighbors(usable_cores()):
        busy = _gains()
    print(f"{'pair':44} {'quiet':>22} {'with busy ones':>22}  clean rounds")
    wrong, wide, clean = [], 0, 0
    for pair, row in busy.items():
        before, rounds = quiet[pair], row["details"]
        is_clean = "busy_machine" not in row["flags"]
        count = f"{rounds['clean_rounds']} of {rounds['rounds']}{'' if is_clean else ', flagged'}"
        print(f"{pair:44} {_text(before)} {_text(row)}  {count}")
        wide += row.high / row.low > WIDE
        if is_clean:
            clean += 1
            if abs(math.log(row.estimate / before.estimate)) > math.log1p(FAR):
                wrong.append(f"more than {FAR:.0%} off: {pair}")
            if max(before.low, row.low) > 1 > min(before.high, row.high):
                wrong.append(f"turned round: {pair}")
    if wide > MOST_WIDE * len(busy):
        wrong.append(f"{wide} of {len(busy)} pairs are wide")
    print("\n".join(wrong) or f"no order turned, {clean} of {len(busy)} pairs clean, {wide} wide")
    return bool(wrong)


def _gains():
    """Pair → its speed-up row."""
    params = experiment.Params(
        attention_types=KINDS, seq_lens=[1024, 4096], num_heads=8, backward=False,
        quality_attentions=[], budget_s=BUDGET_S, isolation="process",
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        rows = rows_of(experiment, params, Path(folder))
    found = {}
    for _, row in rows[rows["metric"] == "speed_up"].iterrows():
        n, own = int(row["factor.seq_len"]), row["factor.name"]
        base = row["scope"].removeprefix("forward over ")
        if f"n={n} {base} over {own}" not in found:  # dense kernels are compared both ways
            found[f"n={n} {own} over {base}"] = row
    return found


def _text(row):
    return f"{row.estimate:.2f} [{row.low:.2f} … {row.high:.2f}]".rjust(22)


if __name__ == "__main__":
    sys.exit(main())
