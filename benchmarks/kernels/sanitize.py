"""Every kernel once at small shapes under NVIDIA's compute-sanitizer: out-of-bounds accesses, and races if asked.

    python benchmarks/kernels/sanitize.py [--tool memcheck] [--tool racecheck] [--limit SECONDS]

The kernels' own tests run twice: several at once first, which compiles everything, then one by one under the tool.
PyTorch's allocator is told not to cache, so that a tensor's end is the end of an allocation. What was never written is
not looked for (initcheck): the tests poison every new tensor, and so find it themselves.

Exit status: 0 nothing found, 1 the tool or a test found something, 2 the sanitizer is absent, refuses the device (some
container runtimes give no debugger's access to it) or ran past the limit: nothing is known then.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = Path("tests/neuronspark/kernels")
TESTS = {
    "test_addresses_triton.py": ("test_addresses",),
    "test_arbitration_triton.py": ("test_arbitrate",),
    "test_cross_entropy_triton.py": ("test_bf16_against_float64",),
    "test_dendritic_scan_triton.py": ("test_scan", "test_segments"),
    "test_embedding_triton.py": ("test_adds_to_main_grad",),
    "test_pool_read_triton.py": ("test_bf16",),
    "test_product_key_triton.py": ("test_operator",),
    "test_release_triton.py": ("test_gradients",),
    "test_row_norm_triton.py": ("test_rms_norm", "test_norm_release", "test_gated_release"),
    "test_trace_scan_triton.py": ("test_trace_of_logits",),
}
"""The tests that between them launch every kernel, by file."""
FOUND, UNKNOWN = 1, 2
ERROR_STATUS = 86
"""What the sanitizer exits with for an error of its own finding."""


def sanitizer() -> str | None:
    """The program's path: on PATH, or in the CUDA toolkit's usual place."""
    return shutil.which("compute-sanitizer") or shutil.which("/usr/local/cuda/bin/compute-sanitizer")


def tests_command() -> list[str]:
    """pytest on `TESTS`, in one process; without the large shapes, for which the tool's own memory does not suffice."""
    names = [f"{FOLDER / file}::{test}" for file, tests in sorted(TESTS.items()) for test in tests]
    return [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not gpu", *names]


def verdict(status: int, output: str) -> tuple[int, str]:
    """(exit status, what to say) of a run under the sanitizer that ended by itself."""
    if status == 0 and re.search(r"ERROR SUMMARY: 0 errors|RACECHECK SUMMARY: 0 hazards", output):
        return 0, "nothing found"
    if "[100%]" not in output and " passed" not in output and " failed" not in output:
        return UNKNOWN, "the sanitizer refuses the device, or did not start: nothing is known"
    return FOUND, f"something was found (exit status {status})"


def main() -> None:
    """Warm up, then each tool."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tool", action="append", choices=("memcheck", "racecheck"), help="default: memcheck")
    parser.add_argument("--limit", type=float, default=90.0, help="seconds for each tool (default: 90)")
    arguments = parser.parse_args()
    program = sanitizer()
    if program is None:
        print("compute-sanitizer is neither on PATH nor in /usr/local/cuda/bin: install the CUDA toolkit's")
        sys.exit(UNKNOWN)
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    at_once = ["-n", str(min(8, os.cpu_count() or 1))]
    if subprocess.run([*tests_command(), *at_once], cwd=ROOT, env=environment).returncode:
        print("the tests fail without the sanitizer")
        sys.exit(FOUND)
    worst = 0
    for tool in arguments.tool or ["memcheck"]:
        command = [program, "--tool", tool, "--error-exitcode", str(ERROR_STATUS), *tests_command()]
        try:
            ran = subprocess.run(
                command,
                cwd=ROOT,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=arguments.limit,
            )
            status, text = verdict(ran.returncode, ran.stdout)
            print(*(line for line in ran.stdout.splitlines() if line.startswith("=========")), sep="\n")
            print(ran.stdout[-4000:] if status else ran.stdout[-400:])
        except subprocess.TimeoutExpired:
            status, text = UNKNOWN, f"not ended within {arguments.limit:g} s: nothing is known"
        print(f"{tool}: {text}", flush=True)
        worst = max(worst, status)
    sys.exit(worst)


if __name__ == "__main__":
    main()
