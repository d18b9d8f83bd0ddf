"""CUDA that computes nothing: a process in which tensors without data can be on `cuda`; see hooks.cpp."""

import functools
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
_TORCH = Path(torch.__file__).parent

needs_compiler = pytest.mark.skipif(
    (shutil.which("g++") is None and not os.environ.get("CI")) or bool(torch.version.cuda) or sys.platform != "linux",
    reason="a compiler makes the hooks; a CUDA build of torch has its own",
)


@functools.cache
def _hooks() -> Path:
    built = Path(tempfile.mkdtemp(prefix="nanolib-hooks-")) / "hooks.so"
    command = ["g++", "-shared", "-fPIC", "-O1", "-std=c++20", str(HERE / "hooks.cpp"), "-o", str(built)]
    for folder in (_TORCH / "include", _TORCH / "include" / "torch" / "csrc" / "api" / "include"):
        command.append(f"-I{folder}")
    subprocess.run([*command, f"-L{_TORCH / 'lib'}", "-lc10", "-ltorch_cpu"], check=True, timeout=300)
    return built


def run_python(*arguments: str) -> str:
    """What Python prints, with the hooks."""
    told = os.environ | {"LD_PRELOAD": str(_hooks()), "LD_LIBRARY_PATH": str(_TORCH / "lib")}
    root = HERE.parents[1]
    ended = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=300, env=told, cwd=root, check=False
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    return ended.stdout
