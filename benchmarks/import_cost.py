"""Measures the seconds and the memory that `import memascend` and `import torch` take, each in a new interpreter."""

from __future__ import annotations

import statistics
import subprocess
import sys

_ROUNDS = 7
_PROGRAM = """
import time
began = time.perf_counter()
{imports}
took = time.perf_counter() - began
with open("/proc/self/status") as status:
    resident = next(line.split()[1] for line in status if line.startswith("VmRSS"))
print(took, resident)
"""
_CASES = {
    "nothing": "pass",
    "memascend": "import memascend",
    "memascend.memory": "import memascend.memory",
    "torch": "import torch",
    "torch and memascend.memory": "import torch, memascend.memory",
}


def main() -> None:
    """Measures each case once in every round, and prints the medians."""
    samples: dict[str, list[tuple[float, float]]] = {name: [] for name in _CASES}
    for _ in range(_ROUNDS):
        for name, imports in _CASES.items():
            program = _PROGRAM.format(imports=imports)
            out = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True, text=True).stdout
            seconds, kib = out.split()
            samples[name].append((float(seconds), float(kib) / 1024))
    medians = {
        name: (statistics.median(seconds for seconds, _ in both), statistics.median(mib for _, mib in both))
        for name, both in samples.items()
    }
    torch_seconds = medians["torch"][0]
    print(f"{'imported':<28}  {'ms':>8}  {'of torch':>8}  {'MiB':>7}")
    for name, (seconds, mib) in medians.items():
        print(f"{name:<28}  {seconds * 1e3:>8.1f}  {seconds / torch_seconds:>7.1%}  {mib:>7.1f}")


if __name__ == "__main__":
    main()
