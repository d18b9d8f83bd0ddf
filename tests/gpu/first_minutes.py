"""The first minutes on an NVIDIA GPU: what nanolib does there, and what must come out. `make gpu`.

`python -m tests.gpu.first_minutes [PART ...]`. Parts run in order of worth, each in a process of
its own with a limit: one that fails, breaks or hangs is written down, and the next one begins. What
a part shows is written as it comes: `outputs/gpu/NAME.json` and the database `results.sqlite` with
every row. Exit code 0 when all holds, 1 when something does not, 2 without a GPU.
"""

import argparse
import json
import os
import re
import signal
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

from nanolib.paths import LAUNCH_VARIABLE, output_folder

SECONDS = 540.0  # of a lease of ten minutes; the rest is start and transfer
_LEAST_S = 8.0  # a part's process has hardly begun by then
_MARKS = {True: "holds", False: "DOES NOT HOLD", None: "not shown here"}


def first_minutes(found, checks_of, parts, file):
    """All parts, each going on where another broke; whether all holds.

    Args:
        found: What is known of the machine; its `parts` are replaced where they have the name of
            one that runs now: name, seconds, checks, and what broke it.
        checks_of: What a part of a name sends: its checks, and last a dict with what broke it.
        parts: Their names, in order.
        file: What was found so far is written there after each check.
    """
    for name in parts:
        start = time.monotonic()
        part = {"name": name, "checks": [], "broke": "it was cut"}
        found["parts"] = [one for one in found.get("parts", []) if one["name"] != name] + [part]
        _keep(found, start, file)
        try:
            for sent in checks_of(name):
                if isinstance(sent, dict):
                    part |= sent
                    continue
                part["checks"].append(sent._asdict())
                print(f"{name}: {_MARKS[sent.holds]} {sent.text}: {sent.found}", flush=True)
                _keep(found, start, file)
        except Exception as error:  # whatever a part meets is its result, and the next one begins
            part["broke"] = str(error)
        _keep(found, start, file)
        if part["broke"]:
            print(f"{name}: broke: {part['broke']}", flush=True)
        print(f"{name}: {part['seconds']} s", flush=True)
    return not any(
        part["broke"] or False in [check["holds"] for check in part["checks"]]
        for part in found["parts"]
    )


def _keep(found, start, file):
    """Write what was found, whole or not at all, with the seconds of the part that runs."""
    found["parts"][-1]["seconds"] = round(time.monotonic() - start, 1)
    half = file.with_suffix(".half")
    half.write_text(json.dumps(found, indent=1) + "\n")
    half.replace(file)


def main(arguments=None):
    """Run all parts and write them; see the module."""

    # so that the part that runs is stopped too
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    # so that the check for a GPU does not initialize one here, which the parts do
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    # all parts share the peak rates that the first one measures
    now = datetime.now(UTC).isoformat()
    os.environ.setdefault(LAUNCH_VARIABLE, now)
    import torch

    from nanolib.run.process import call_in_process
    from tests.gpu.alone import send_identity, send_part
    from tests.gpu.parts import PARTS

    asked = argparse.ArgumentParser(prog="python -m tests.gpu.first_minutes", description=__doc__)
    known = ", ".join(PARTS)
    asked.add_argument("parts", nargs="*", help=f"default: all of {known}")
    asked.add_argument("--to", type=Path, help="folder for the results; default: outputs/gpu")
    asked.add_argument("--seconds", type=float, default=SECONDS, help="for all parts together")
    given = asked.parse_args(arguments)
    if unknown := {*given.parts} - {*PARTS}:
        asked.error(f"PART: {unknown.pop()} is none; use {known}")
    if not torch.cuda.is_available():
        nothing = (
            "make gpu: torch sees no NVIDIA GPU here, so nothing was run. On one it would show:"
        )
        shown = [f"  {name}: {checks.__doc__}" for name, (checks, _) in PARTS.items()]
        print(nothing, *shown, sep="\n", file=sys.stderr)
        return 2
    folder = given.to or output_folder() / "gpu"
    folder.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + given.seconds

    def checks_of(name):
        left = end - time.monotonic()
        if left < _LEAST_S:
            raise TimeoutError("not run: no time was left")
        _, limit_s = PARTS[name]
        limit_s = min(limit_s * max(1.0, given.seconds / SECONDS), left)
        until = time.monotonic() + limit_s
        is_over = lambda: time.monotonic() > until  # noqa: E731
        return call_in_process(send_part, name, folder, limit_s=limit_s, stopped=is_over)

    (found,) = call_in_process(send_identity, limit_s=SECONDS)
    found["date"] = now[:10]
    file = folder / (re.sub(r"\W", "-", found["gpu"].lower()) + ".json")
    if file.exists():  # a call for some parts keeps the others
        found["parts"] = json.loads(file.read_text())["parts"]
    holds = first_minutes(found, checks_of, given.parts or PARTS, file)
    print(f"written to {file}; {'all holds' if holds else 'not all holds'}")
    return not holds


if __name__ == "__main__":
    sys.exit(main())
