"""Build a stand-in for CUDA that computes nothing, for a CUDA build of torch without a GPU.

With its driver, runtime and libraries, dispatch, autograd, dynamo, Triton and ptxas run for an
H100. Memory and times are the host's, and results are garbage.
"""

import re
import subprocess
from pathlib import Path

HERE = Path(__file__).parent
REHEARSAL = "NANOLIB_REHEARSAL"  # set where the stand-in is the GPU
_LIBRARIES = re.compile(r"__cuda|cuda|cublas|cudnn|cusparse|cusolver|curand|nccl")
# what the real runtime and libraries answer without a driver
_REAL = re.compile(
    r"__cuda(Register|Unregister|PopCall|PushCall)|cudnnGet(Version|Property|Cudart|ErrorString|LastError)|cudaGetError(Name|String)|nccl\w*Error"
)
_NOT_SUPPORTED = re.compile(r"cudnn(Backend|Conv)")  # torch then takes another kernel


def build(packages, folder):
    """Compile the stand-in for one torch.

    Args:
        packages: The `site-packages` with a CUDA build of torch, its `nvidia-*` wheels and Triton.
        folder: Where the libraries go.

    Returns:
        The environment variables with which that torch finds the stand-in.
    """
    folder.mkdir(parents=True, exist_ok=True)
    stubs = folder / "stubs.c"
    stubs.write_text("\n".join(_stubs(packages / "torch" / "lib")) + "\n")
    headers = [
        *packages.glob("nvidia/*/include"),
        packages / "triton" / "backends" / "nvidia" / "include",
    ]
    options = ["-O1", "-w", "-shared", "-fPIC", *(f"-I{each}" for each in headers)]
    for name, sources in {
        "runtime.so": [HERE / "runtime.c", stubs],
        "libcuda.so.1": [HERE / "driver.c"],
        "libnvidia-ml.so.1": [HERE / "nvml.c"],
    }.items():
        command = ["gcc", *options, "-o", folder / name, *sources, "-ldl"]
        subprocess.run(command, check=True, timeout=300)
    return {
        "LD_LIBRARY_PATH": str(folder),
        "LD_PRELOAD": str(folder / "runtime.so"),
        "TRITON_LIBCUDA_PATH": str(folder),
        REHEARSAL: "1",
    }


def _stubs(libraries):
    """A function that succeeds for each that torch needs and nothing else has."""
    asked = ["nm", "-D", "--undefined-only", *map(str, sorted(libraries.glob("lib*.so")))]
    listed = subprocess.run(asked, check=True, capture_output=True, text=True, timeout=300).stdout
    needed = {line.split()[-1].split("@")[0] for line in listed.splitlines() if " U " in line}
    defined = re.compile(r"^(?:(?:int|size_t) (?=\w+\()|HANDLE\()(\w+)", re.MULTILINE)
    own = {*defined.findall((HERE / "runtime.c").read_text())}
    stubbed = sorted(filter(_LIBRARIES.match, needed - own))
    return [
        f"int {name}() {{ return {3000 if _NOT_SUPPORTED.match(name) else 0}; }}"
        for name in stubbed
        if not _REAL.match(name)
    ]
