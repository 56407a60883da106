"""Runs the C++ tests (CTest) and the Python tests (pytest) of a build and closes with `N passed, N failed`.

python scripts/run_tests.py BUILD_DIR [arguments for pytest]
"""

import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent


@dataclass
class Count:
    passed: int = 0
    failed: int = 0
    skipped: int = 0

    def add(self, other: "Count") -> None:
        self.passed += other.passed
        self.failed += other.failed
        self.skipped += other.skipped


def count(results: Path) -> Count:
    """The cases of one JUnit file; a file that is missing or torn (a crash) is one failure."""
    total = Count()
    try:
        cases = list(ElementTree.parse(results).iter("testcase"))
    except (OSError, ElementTree.ParseError):
        return Count(failed=1)
    for case in cases:
        if case.find("failure") is not None or case.find("error") is not None:
            total.failed += 1
        elif case.find("skipped") is not None or case.get("status") in ("disabled", "notrun"):
            total.skipped += 1
        else:
            total.passed += 1
    return total


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
    build = Path(sys.argv[1]).resolve()
    total = run_ctest(build)
    total.add(run_pytest(build, sys.argv[2:]))
    skipped = f", {total.skipped} skipped" if total.skipped else ""
    print(f"{total.passed} passed, {total.failed} failed{skipped}", flush=True)
    return 1 if total.failed or not total.passed else 0


if __name__ == "__main__":
    sys.exit(main())
