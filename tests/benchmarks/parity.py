"""Does the parity test find what it must? Fresh seeds, several repetitions, on a CPU with emulated products: `make bench`.

    python tests/benchmarks/parity.py [--repetitions 10] [--steps 400] [--first-seed N]

Goals per 10 repetitions: each control is called worse in at least 9, bf16 whose weights differ in the last bit equivalent in at
least 9, and tensorwise never better than bf16.
"""

import argparse
import os
import subprocess
import sys
import time
from collections import Counter

ARMS = ("bf16_again", "tensorwise", "e5m2_everywhere", "no_scaling", "scale_off_by_1024")
SEEDS = 8
_SHAPE = {"seq_len": 64, "batch_size": 16, "d_model": 64, "num_layers": 2, "margin": 0.0025, "keep": ("head",)}


def _repetition(first_seed: int, steps: int) -> None:
    """One repetition, its verdicts printed; in a process of its own, on one thread, so that both cores have one."""
    from nanolib.experiments.fp8.cases import Params, ParityCase

    for arm in ARMS:
        case = ParityCase("cpu", arm, SEEDS, first_seed, steps, **_SHAPE)
        row = list(case.measure(Params(), {}))[-1]
        figure = "" if row.estimate is None else f"{row.estimate:+.4f} [{row.low:+.4f} … {row.high:+.4f}]"
        print(f"{arm} {row.details['verdict']} {figure} margin {row.details.get('margin_nats', 0):.4f}", flush=True)


def main() -> None:
    """Print each repetition's verdicts and how often each was given."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=10)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--first-seed", type=int, default=time.time_ns() % 1_000_000)
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one is not None:
        _repetition(args.one, args.steps)
        return
    processes = max(1, len(os.sched_getaffinity(0)))
    print(f"seeds from {args.first_seed}, {SEEDS} per arm, {args.steps} steps, {processes} processes", flush=True)
    firsts = [args.first_seed + SEEDS * at for at in range(args.repetitions)]
    verdicts = {arm: Counter() for arm in ARMS}
    for at in range(0, len(firsts), processes):
        running = []
        for first in firsts[at : at + processes]:
            command = [sys.executable, __file__, "--one", str(first), "--steps", str(args.steps)]
            environment = os.environ | {"OMP_NUM_THREADS": "1"}
            running.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment))
        for process in running:
            output, _ = process.communicate()
            if process.returncode:
                raise SystemExit(f"a repetition ended with {process.returncode}")
            for line in output.splitlines():
                arm, verdict, rest = line.split(" ", 2)
                verdicts[arm][verdict] += 1
                print(f"  {arm:18} {verdict:13} {rest}", flush=True)
    for arm, counts in verdicts.items():
        print(
            f"{arm:18} {', '.join(f'{verdict} {count}' for verdict, count in counts.most_common())} of {args.repetitions}"
        )


if __name__ == "__main__":
    main()
