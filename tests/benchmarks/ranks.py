"""Decoding on two ranks: is meeting less often faster? All algorithms in one launch, interleaved; each over three all-reduces.

Also what a rank sends by formula and as the interface counts it, and what the cost model says beside what was measured.
"""

from __future__ import annotations

import argparse

from nanolib.experiments.distributed import cases as distributed
from nanolib.measurement import format_number, format_with_interval


def main() -> None:
    """Print a line per form and length."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=10.0, help="of timing per length")
    parser.add_argument("--lengths", type=int, nargs="*", default=[2048, 16_384])
    options = parser.parse_args()
    params = distributed.Params(
        world_sizes=[2],
        seq_lens=options.lengths,
        algorithms=["three_allreduce", "fused", "gather", "pass_q", "ring"],
        prefill_seq_lens=[],
        budget_s=options.seconds,
    )
    for case in distributed.cases(params):
        rows = list(case.measure(params, {}))
        print(f"\n{case}, {case.num_heads} heads of {case.head_dim}, one thread per rank")
        for form in case.forms:
            found = {(row.metric, row.method): row for row in rows if row.scope == form}
            timed = found["latency", "perf_counter, slowest rank"]
            line = f"  {form:16} {format_with_interval(timed.estimate, timed.low, timed.high):>28} ms"
            for row in rows:
                if row.metric == "ratio" and row.scope == f"{form} over three_allreduce":
                    ratio = format_with_interval(row.estimate, row.low, row.high)
                    line += f"   {ratio} of three_allreduce ({row.details['verdict']})"
            print(line)
            sent, counted = found["wire_bytes", "formula"], found.get(("wire_bytes", "interface"))
            told = f"counted {counted.estimate:,.0f}" if counted else "not counted here"
            print(f"  {'':16} sends {sent.estimate:,.0f} B, {told}; {found['rounds', 'formula'].estimate:.0f} round(s)")
            for row in rows:
                if row.metric == "part_time" and row.scope == f"{form}: communication" and row.predicted:
                    print(
                        f"  {'':16} communication {format_number(row.estimate)} ms, by the model {format_number(row.predicted)}"
                    )


if __name__ == "__main__":
    main()
