"""A line of the report."""

from dataclasses import dataclass
from enum import StrEnum


class Verdict(StrEnum):
    OK = "ok"
    WARNING = "warning"  # works, but slower, or not in every setting
    PROBLEM = "problem"  # does not work; exit code 1


@dataclass(frozen=True)
class Finding:
    name: str
    verdict: Verdict
    found: str
    advice: str = ""  # what to do; empty if the verdict is ok


def ok(name: str, found: str) -> Finding:
    return Finding(name, Verdict.OK, found)


def warning(name: str, found: str, advice: str) -> Finding:
    return Finding(name, Verdict.WARNING, found, advice)


def problem(name: str, found: str, advice: str) -> Finding:
    return Finding(name, Verdict.PROBLEM, found, advice)


def table_line(finding: Finding) -> str:
    line = f"{finding.verdict:<8} {finding.name:<20} {finding.found}"
    if finding.advice:
        line += f"\n{'':<29} → {finding.advice}"
    return line


def summary(findings: list[Finding]) -> str:
    """
    >>> summary([problem("torch", "not installed", "install it")])
    '1 problem, 0 warnings'
    """
    counts = []
    for verdict in (Verdict.PROBLEM, Verdict.WARNING):
        count = sum(finding.verdict == verdict for finding in findings)
        counts.append(f"{count} {verdict}{'' if count == 1 else 's'}")
    return ", ".join(counts)
