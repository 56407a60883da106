"""Counts of passed and failed tests, and how to read them from a JUnit file."""

import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from pathlib import Path


@dataclass
class Count:
    passed: int = 0
    failed: int = 0
    skipped: int = 0

    def add(self, other: "Count") -> None:
        self.passed += other.passed
        self.failed += other.failed
        self.skipped += other.skipped

    def __str__(self) -> str:
        return f"{self.passed} passed, {self.failed} failed" + (f", {self.skipped} skipped" if self.skipped else "")


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
