"""Runs the C++ tests (CTest) and the Python tests (pytest) of a build and closes with `N passed, N failed`.

python scripts/run_tests.py BUILD_DIR [--sanitize] [arguments for pytest]

--sanitize: and the kernels under sanitizers (run_sanitized.py), into the same count.
"""

import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import run_sanitized
from junit import Count, count

ROOT = Path(__file__).parent.parent


def run_ctest(build: Path) -> Count:
    results = build / "results"
    results.mkdir(exist_ok=True)
    for old in results.glob("*.xml"):
        old.unlink()
    overview = results / "ctest.xml"
    ctest = Path(sys.executable).with_name("ctest")
    subprocess.run([ctest, "--test-dir", build, "--output-on-failure", "--output-junit", overview], check=False)
    total = Count()
    if not overview.exists():
        return Count(failed=1)
    for case in ElementTree.parse(overview).iter("testcase"):
        # A Catch2 program counts by its single cases, unless it failed without writing them down (a crash).
        single = results / f"{case.get('name')}.xml"
        failed = case.find("failure") is not None
        if single.exists():
            detail = count(single)
            total.add(detail)
            total.failed += int(failed and detail.failed == 0)
        else:
            total.add(Count(passed=int(not failed), failed=int(failed)))
    return total


def run_pytest(build: Path, arguments: list[str]) -> Count:
    results = build / "results" / "pytest.xml"
    code = subprocess.run(
        [sys.executable, "-m", "pytest", f"--junitxml={results}", *arguments], cwd=ROOT, check=False
    ).returncode
    total = count(results)
    total.failed += int(code != 0 and total.failed == 0)
    return total


def main() -> int:
    build, arguments = Path(sys.argv[1]).resolve(), sys.argv[2:]
    sanitize = "--sanitize" in arguments
    if sanitize:
        arguments.remove("--sanitize")
    total = run_ctest(build)
    total.add(run_pytest(build, arguments))
    if sanitize:
        total.add(run_sanitized.run(build))
    print(total, flush=True)
    return 1 if total.failed or not total.passed else 0


if __name__ == "__main__":
    sys.exit(main())
