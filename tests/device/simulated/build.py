"""Builds the simulated CUDA, once for each version of its sources, with the CUDA headers of torch's wheels."""

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
# torch must be built for this major version of CUDA, because the declarations of CUDA's functions change between major
# versions.
MAJOR = "13"


class Unavailable(Exception):
    """Raised if the simulated CUDA cannot be built here; the message gives the reason."""


def headers() -> Path:
    """Returns the folder of the CUDA headers that match this torch."""
    if torch.version.cuda is None:
        raise Unavailable(f"torch {torch.__version__} is not a build for CUDA")
    if torch.version.cuda.split(".")[0] != MAJOR:
        raise Unavailable(f"torch is built for CUDA {torch.version.cuda}: the simulated CUDA needs a build for {MAJOR}")
    wheels = Path(torch.__file__).parents[1] / "nvidia"
    found = sorted(wheels.glob(f"cu{MAJOR}/include/cuda_runtime_api.h"))
    if not found:
        raise Unavailable(f"there are no CUDA headers in {wheels}")
    return found[0].parent


@functools.cache
def folder() -> Path:
    """Builds the library libcuda.so.1 unless the library exists; returns the folder of the library."""
    include = headers()
    if shutil.which("g++") is None:
        raise Unavailable("g++ is missing: apt-get install g++")
    sources = sorted(FOLDER.glob("*.cpp"))
    read = [path.read_bytes() for path in (*sources, *sorted(FOLDER.glob("*.hpp")))]
    key = hashlib.sha256(b"".join(read) + torch.__version__.encode()).hexdigest()[:16]
    library = ROOT / "target" / f"simulated-{key}" / "libcuda.so.1"
    includes = [f"-I{FOLDER / 'include'}", f"-isystem{include}"]
    linked = ["-Wl,-soname,libcuda.so.1", "-lpthread", "-ldl"]
    return compiled(library, "-O2", "-Wall", "-Werror", *includes, *map(str, sources), *linked).parent


def compiled(library: Path, *options: str) -> Path:
    """Compiles a library with g++ unless it exists; returns its path."""
    if not library.exists():
        library.parent.mkdir(parents=True, exist_ok=True)
        partial = library.with_suffix(f".{os.getpid()}")
        subprocess.run(["g++", "-std=c++20", "-fPIC", "-shared", *options, "-o", str(partial)], check=True)
        partial.rename(library)
    return library


def environment() -> dict[str, str]:
    """Returns the environment of a process that uses the simulated CUDA."""
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
