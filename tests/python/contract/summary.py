"""The table at the end of ``make fuzz``: what ran, which kinds, and how near to its bound each result came."""

from collections import defaultdict

from contract.engine import Tally


def summary(tallies: list[Tally], seed: int, seconds: float) -> str:
    """Markdown: one row an op, then worst errors and kinds, then failures."""
    total, failures = sum(t.cases for t in tallies), [f for t in tallies for f in t.failures]
    lines = [
        "# Contract harness",
        "",
        f"{total} cases, {len(failures)} failures, seed {seed}, {seconds / 60:.1f} minutes.",
        "",
        "Errors are in units of the bound (1 = at the bound).",
        "",
        "| op | cases | kinds | failures | worst error |",
        "| --- | --- | --- | --- | --- |",
    ]
    for t in tallies:
        lines.append(f"| {t.op} | {t.cases} | {len(t.combinations)} | {len(t.failures)} | {_worst_of_all(t)} |")
    for t in tallies:
        lines += ["", f"## {t.op}", ""]
        lines += [f"- {dimension}: {counts}" for dimension, counts in _kinds(t).items()]
        if t.worst:
            lines += ["", "| result | dtype | worst error | its case |", "| --- | --- | --- | --- |"]
            for (name, dtype), (share, params) in sorted(t.worst.items()):
                lines.append(f"| {name} | {dtype} | {share:.3f} | `{params.replace('|', '/')}` |")
    for failure in failures:
        lines += ["", "## Failure", "", "```python", failure, "```"]
    return "\n".join(lines) + "\n"


def _worst_of_all(tally: Tally) -> str:
    if not tally.worst:
        return "exact"
    (name, dtype), (share, _) = max(tally.worst.items(), key=lambda item: item[1][0])
    return f"{share:.3f} ({name}, {dtype})"


def _kinds(tally: Tally) -> dict[str, str]:
    found: dict[str, list[str]] = defaultdict(list)
    for (dimension, kind), count in tally.kinds.most_common():
        found[dimension].append(f"{kind} {count}")
    return {dimension: ", ".join(counts) for dimension, counts in found.items()}
