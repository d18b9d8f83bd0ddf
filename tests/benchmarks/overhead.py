"""What each profiling mode costs in decoding and prefill, on a quiet machine.

python tests/benchmarks/overhead.py
"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from nanolib import NanoConfig, create_model, generate_random_batch
from nanolib.meters.overhead import measure_overhead
from nanolib.meters.recording import MODES
from nanolib.models.generation import generation_of

MOST = {"again": 0.01, "minimal": 0.01, "standard": 0.03, "deep": 0.08}  # METHOD's table
PROMPT, NEW_TOKENS = 64, 64


def main(budget_s=120.0):
    """Print per mode and phase: overhead in wall and CPU time, and how often a call is detailed."""
    config = NanoConfig.from_preset("small", context_length=PROMPT + NEW_TOKENS)
    model = create_model(config, seed=0).eval()  # a token takes more than 5 ms
    ids = generate_random_batch(1, PROMPT, config.vocab_size)
    generation = generation_of(model, ids, NEW_TOKENS)
    modes = {name: mode() for name, mode in MODES.items()}
    for phase in ("prefill", "decode"):
        generation.all_tokens()
        call = torch.inference_mode()(getattr(generation, phase))
        for row in measure_overhead(
            model, call, modes, scope=phase, budget_s=budget_s, rel_ci=0.001
        ):
            cpu = " … ".join(f"{end:.2%}" for end in row.details["cpu"])
            most = MOST[row.scope.split()[-1]]
            print(
                f"{row.scope}: {row.low:.2%} … {row.estimate:.2%} … {row.high:.2%}, of {most:.0%}"
            )
            print(f"    CPU {cpu}; n={row.n} {row.flags} {row.details}", flush=True)


if __name__ == "__main__":
    main(*map(float, sys.argv[1:]))
