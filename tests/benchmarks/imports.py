"""What `import nanolib` costs beside `import torch`, in fresh processes taken in turn: `make bench`."""

import statistics
import subprocess
import sys
import time


def _seconds(code: str) -> float:
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True)
    return time.perf_counter() - start


def main() -> None:
    """Print the medians of ten interleaved rounds."""
    codes = {"python": "pass", "torch": "import torch", "torch and nanolib": "import torch, nanolib"}
    rounds = [{name: _seconds(code) for name, code in codes.items()} for _ in range(10)]
    extra = statistics.median(r["torch and nanolib"] - r["torch"] for r in rounds)
    torch_alone = statistics.median(r["torch"] - r["python"] for r in rounds)
    print(f"import nanolib: {extra:+.3f} s on top of torch's own {torch_alone:.2f} s, {extra / torch_alone:+.1%}")


if __name__ == "__main__":
    main()
