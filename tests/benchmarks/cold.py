"""What a cold cache costs: a copy that fits it comes down to about memory's bandwidth.

python tests/benchmarks/cold.py
"""

import torch

from nanolib.meters import measure
from nanolib.meters.clock import last_level_bytes


def main():
    """Print GB/s, read and written, of a small copy hot and cold and of a large one, in turns."""
    cache = last_level_bytes("cpu")
    for _ in range(3):
        hot, cold, memory = _rate(cache // 8), _rate(cache // 8, cold=True), _rate(8 * cache)
        print(
            f"copy of {cache / 2**23:.0f} MiB hot {hot:.1f} GB/s, cold {cold:.1f};"
            f" of {cache / 2**17:.0f} MiB {memory:.1f}; hot over cold {hot / cold:.2f},"
            f" cold over memory {cold / memory:.2f}",
            flush=True,
        )
        # what a small copy writes stays in the cache: a third of its traffic does not reach memory
        assert cold < 1.6 * memory and cold < hot


def _rate(size, cold=False):
    source, target = (torch.ones(size, dtype=torch.uint8) for _ in range(2))
    return 2 * size / measure(lambda: target.copy_(source), 0.02, 2.0, cold=cold).estimate / 1e6


if __name__ == "__main__":
    main()
