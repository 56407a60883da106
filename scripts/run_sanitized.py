"""Runs the CPU kernels under AddressSanitizer and UndefinedBehaviorSanitizer, in each instruction set of the processor.

python scripts/run_sanitized.py BUILD_DIR      (the target allfinite_sanitized is built and the package installed)

For each: first the planted faults (tests/sanitize), which must be reported; then the kernels' own tests and, beside
them, random cases of the contract harness. One line each, then `N passed, N failed`; logs are in BUILD_DIR/sanitize.
"""

import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from junit import Count, count

ROOT = Path(__file__).parent.parent
CAPABILITIES = ("baseline", "avx2", "avx512")
CASES = 4000
# What calls kernels with many shapes, strides and values. Not: what compiles, pickles, converts or starts processes.
KINDS = ("accuracy", "dropout", "gradients", "invariance", "masks", "nan", "range", "shapes")
KERNEL_TESTS = [f"test_*_{kind}.py" for kind in KINDS] + [
    "test_clip_grad.py", "test_grad_stats.py", "test_unscale_*.py", "test_update_scale.py", "test_norm_places.py",
]  # fmt: skip
# The runtimes write past Python's sys.stderr: what pytest caught of that would go down with the process.
PYTEST = ("-q", "--capture=sys", "-p", "no:cacheprovider", "-k", "not opcheck and not compile")


def make_package(folder: Path) -> None:
    """A copy of the package with the sanitized library in the place of the plain one."""
    package = folder / "python" / "allfinite"
    shutil.rmtree(package, ignore_errors=True)
    left_out = shutil.ignore_patterns("lib", "include", "share", "__pycache__")
    shutil.copytree(ROOT / "python" / "allfinite", package, ignore=left_out)
    (package / "lib").mkdir()
    shutil.copy(folder / "liballfinite.so", package / "lib")


def supported(folder: Path) -> tuple[str, ...]:
    """The instruction sets of this processor that were built."""
    script = "import allfinite._C as c; print(c.cpu_capability())"
    environment = _environment(folder, "")
    best = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    return CAPABILITIES[: CAPABILITIES.index(best.stdout.strip()) + 1]


def _environment(folder: Path, capability: str) -> dict[str, str]:
    # No leak check: python and torch leave to the end of the process what they own. Fresh memory is filled with ones,
    # which every floating dtype reads as NaN, so that the tests see what is read before it is written.
    return os.environ | {
        "ALLFINITE_CPU_CAPABILITY": capability,
        "ASAN_OPTIONS": "detect_leaks=0:max_malloc_fill_size=268435456:malloc_fill_byte=255",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "LD_PRELOAD": (folder / "preload").read_text(),
        "PYTHONPATH": os.pathsep.join([str(folder / "python"), str(ROOT / "tests" / "python")]),
        "OMP_NUM_THREADS": "1",  # two processes run at a time; the tests of threads set their own number
    }


def _run(folder: Path, capability: str, name: str, *arguments: str) -> bool:
    with (folder / f"{capability}-{name}.log").open("w") as log:
        command = [sys.executable, "-m", *arguments]
        environment = _environment(folder, capability)
        return subprocess.run(command, env=environment, cwd=ROOT, stdout=log, stderr=log, check=False).returncode == 0


def run_tests(folder: Path, capability: str) -> Count:
    """The planted faults, and then, if all of them were reported, the kernels' tests."""
    tests = ROOT / "tests"
    files = [str(file) for pattern in KERNEL_TESTS for file in sorted((tests / "python").glob(pattern))]
    total = Count()
    for name, chosen in (("planted", [str(tests / "sanitize")]), ("tests", files)):
        results = folder / f"{capability}-{name}.xml"
        results.unlink(missing_ok=True)
        options = [*PYTEST, f"--junitxml={results}"]
        ended_well = _run(folder, capability, name, "pytest", *options, *chosen)
        found = count(results)
        found.failed += int(not ended_well and not found.failed)
        total.add(found)
        if found.failed:
            break
    return total


def run_contract(folder: Path, capability: str) -> Count:
    """Random cases: one test, which passes if all of them hold and no process ended early."""
    summary = folder / f"{capability}-contract.md"
    options = ("--cases", str(CASES), "--processes", "1", "--summary", str(summary))
    held = _run(folder, capability, "contract", "contract", *options)
    return Count(passed=int(held), failed=int(not held))


def explain(folder: Path, capability: str) -> None:
    """Prints the end of each log, and of a sanitizer's report its beginning, where the kernel is named."""
    for log in sorted(folder.glob(f"{capability}-*.log")):
        lines = log.read_text(errors="replace").splitlines()
        reported = [i for i, line in enumerate(lines) if "ERROR: AddressSanitizer" in line or "runtime error:" in line]
        shown = lines[reported[0] :][:40] if reported else lines[-15:]
        print(f"--- {log}", *shown, sep="\n")


def run(build: Path) -> Count:
    """All instruction sets; two processes at a time, or as many as there are processors."""
    folder = build / "sanitize"
    make_package(folder)
    capabilities = supported(folder)
    for missing in CAPABILITIES[len(capabilities) :]:
        print(f"sanitize {missing}: left out, this processor does not have it")
    total = Count()
    start = time.monotonic()
    with ThreadPoolExecutor(max(2, os.cpu_count() or 1)) as pool:
        running = {c: [pool.submit(job, folder, c) for job in (run_tests, run_contract)] for c in capabilities}
        for capability, jobs in running.items():
            found = Count()
            for job in jobs:
                found.add(job.result())
            if found.failed:
                explain(folder, capability)
            print(f"sanitize {capability}: {found} ({CASES} random cases among them)", flush=True)
            total.add(found)
    print(f"sanitize: {total} in {(time.monotonic() - start) / 60:.1f} minutes", flush=True)
    return total


if __name__ == "__main__":
    sys.exit(1 if run(Path(sys.argv[1]).resolve()).failed else 0)
