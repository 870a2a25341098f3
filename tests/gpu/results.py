"""The result of a run of tests/gpu as JSON, to paste into an issue.

{"passed": 31, "failed": 1, "skipped": 4,
 "environment": [findings of `megastep doctor`],
 "tests": {"test_1_attention.py::...": {"outcome", "seconds", "figures", "error"}}}
"""

import json
from pathlib import Path
from typing import Any

OUTCOMES = ("passed", "failed", "skipped")
ERROR_LINES = 25


class Results:
    def __init__(self) -> None:
        self.tests: dict[str, dict[str, Any]] = {}

    def add(self, report) -> None:
        """A report of pytest: of set-up, call or tear-down."""
        name = report.nodeid.removeprefix("tests/gpu/")
        found = self.tests.setdefault(name, {"outcome": "passed", "seconds": 0.0})
        found["seconds"] = round(found["seconds"] + report.duration, 2)
        if report.outcome != "passed":
            found["outcome"] = report.outcome
        if report.user_properties:
            found["figures"] = dict(report.user_properties)
        if report.outcome == "failed":
            found["error"] = _tail(report.longreprtext)
        elif report.outcome == "skipped":
            found["reason"] = report.longrepr[2].removeprefix("Skipped: ")

    @property
    def counts(self) -> dict[str, int]:
        outcomes = [found["outcome"] for found in self.tests.values()]
        return {outcome: outcomes.count(outcome) for outcome in OUTCOMES}

    def write(self, path: Path, environment: list[dict]) -> None:
        result = {**self.counts, "environment": environment, "tests": self.tests}
        path.write_text(json.dumps(result, indent=1) + "\n")


def _tail(text: str) -> list[str]:
    """The last lines, without the paths of this machine's users."""
    return text.replace(str(Path.home()), "~").splitlines()[-ERROR_LINES:]
