"""Rehearse the first minutes on a GPU without one, on a stand-in that computes nothing.

Every part runs to its end. It needs a CUDA build of torch, Triton and gcc; `--python` names an
interpreter that has them. Values mean nothing there, so checks on values are printed and not
judged. Judged is that no part breaks, that every case runs, and that peaks are those of the plan
(torch's own allocator counts them).
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from tests.gpu.first_minutes import SECONDS  # noqa: E402
from tests.gpu.null_cuda.build import build  # noqa: E402

SLOWER = 30  # a core that does other things too
JUDGED = (
    "every case runs",
    "the peak is the plan's",
    "peaks are planned",
    "the case is oom",
)


def main():
    """Rehearse; 0 where all is as it should be, or nothing can be rehearsed here."""
    asked = argparse.ArgumentParser(description="Rehearse the first minutes on a GPU.")
    asked.add_argument(
        "--python",
        default=sys.executable,
        help="an interpreter with a CUDA build of torch; default: this one",
    )
    asked.add_argument("parts", nargs="*", metavar="PART")
    given = asked.parse_args()
    look = "import torch; print(torch.version.cuda or 'none', torch.__version__, *torch.__path__)"
    cuda, version, place = subprocess.check_output([given.python, "-c", look], text=True).split()
    if cuda == "none":
        print(f"gpu_rehearsal: torch {version} is no CUDA build, so nothing was rehearsed")
        return 0
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | build(Path(place).parent, Path(folder) / "stand-in")
        environment |= {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/compiled"}
        options = ["--to", folder, "--seconds", str(SLOWER * SECONDS)]
        command = [given.python, "-m", "tests.gpu.first_minutes", *options, *given.parts]
        subprocess.run(command, env=environment, cwd=ROOT, check=False)
        (written,) = Path(folder).glob("*.json")
        parts = json.loads(written.read_text())["parts"]
        wrong = list(_wrong_parts(parts))
    print(f"torch {version}: {', '.join(part['name'] for part in parts)}")
    print("\n".join(wrong) or "rehearsed: all parts ran to their end")
    return bool(wrong)


def _wrong_parts(parts):
    for part in parts:
        if part["broke"] or not part["checks"]:
            yield f"{part['name']}: {part['broke'] or 'nothing was checked'}"
        for check in part["checks"]:
            if check["holds"] is False and any(text in check["text"] for text in JUDGED):
                yield f"{part['name']}: {check['text']}: {check['found']}"


if __name__ == "__main__":
    sys.exit(main())
