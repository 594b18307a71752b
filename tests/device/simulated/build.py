"""Builds the simulated CUDA from its sources, once for each of them, with the headers of torch's own wheels."""

from __future__ import annotations

import functools
import hashlib
import os
import shutil
import subprocess
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[3]
FOLDER = Path(__file__).parent
# What its functions are declared as has changed from one major version to the next.
MAJOR = "13"


class Unavailable(Exception):
    """It cannot be built here; the message says why."""


def headers() -> Path:
    """The folder of CUDA's headers that belong to this torch."""
    if torch.version.cuda is None:
        raise Unavailable(f"torch {torch.__version__} is not a build for CUDA")
    if torch.version.cuda.split(".")[0] != MAJOR:
        raise Unavailable(f"torch is built for CUDA {torch.version.cuda}: the simulated one is of CUDA {MAJOR}")
    wheels = Path(torch.__file__).parents[1] / "nvidia"
    found = sorted(wheels.glob(f"cu{MAJOR}/include/cuda_runtime_api.h"))
    if not found:
        raise Unavailable(f"there are no CUDA headers in {wheels}")
    return found[0].parent


@functools.cache
def folder() -> Path:
    """The folder that the library is in, under the name of the driver's."""
    include = headers()
    if shutil.which("g++") is None:
        raise Unavailable("g++ is missing: apt-get install g++")
    sources = sorted(FOLDER.glob("*.cpp"))
    read = [path.read_bytes() for path in (*sources, *sorted(FOLDER.glob("*.hpp")))]
    key = hashlib.sha256(b"".join(read) + torch.__version__.encode()).hexdigest()[:16]
    made = ROOT / "target" / f"simulated-{key}"
    library = made / "libcuda.so.1"
    if not library.exists():
        made.mkdir(parents=True, exist_ok=True)
        partial = library.with_suffix(f".{os.getpid()}")
        includes = [f"-I{FOLDER / 'include'}", f"-isystem{include}"]
        command = ["g++", "-std=c++20", "-O2", "-fPIC", "-shared", "-Wall", "-Werror", *includes, *map(str, sources)]
        subprocess.run([*command, "-o", str(partial), "-Wl,-soname,libcuda.so.1", "-lpthread", "-ldl"], check=True)
        partial.rename(library)
    return made


def environment() -> dict[str, str]:
    """What a process that computes on it begins with."""
    there = str(folder())
    return {
        **os.environ,
        "LD_PRELOAD": f"{there}/libcuda.so.1",
        "LD_LIBRARY_PATH": os.pathsep.join(filter(None, [there, os.environ.get("LD_LIBRARY_PATH")])),
        "TRITON_LIBCUDA_PATH": there,
        "TRITON_CACHE_DIR": f"{there}/triton",
        "CUDA_VISIBLE_DEVICES": "0,1",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT / "tests"), os.environ.get("PYTHONPATH")])),
        "OMP_NUM_THREADS": "1",
    }
