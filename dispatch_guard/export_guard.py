"""What ``pytest --to-mutation-guard`` does: guards every export of a test run and lists the violations at its end.

``pytest_plugin`` is what pytest loads; it loads this, and torch, only when asked for.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from typing import Any

import pytest

from .exports import guarding_exports
from .guard import OnViolation, ToMutationGuard
from .report import render

_COLLECTING = "(while tests were collected)"


class ExportGuard:
    """The plugin of one process: a worker of pytest-xdist hands what it has seen to the others with its reports.

    Args:
        on_violation: ``"record"`` or ``"raise"``.
    """

    def __init__(self, on_violation: OnViolation) -> None:
        self._nodeid = _COLLECTING
        self._unsent = _nothing()  # of this process, since the last report
        self._seen = _nothing()  # of all processes
        self._guarding = contextlib.ExitStack()
        self._guarding.enter_context(guarding_exports(self._count, on_violation=on_violation))

    def _count(self, guard: ToMutationGuard) -> None:
        self._unsent["exports"] += 1
        self._unsent["conversions"] += guard.conversions
        self._unsent["violations"] += [
            (self._nodeid, repr((violation.site, violation.conversion.site, violation.call)), render(violation))
            for violation in guard.violations
            if violation.allowed is None
        ]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        self._nodeid = item.nodeid
        try:
            return (yield)
        finally:
            self._nodeid = _COLLECTING

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        vars(report)["to_mutations"] = self._unsent
        self._unsent = _nothing()
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        _add(self._seen, getattr(report, "to_mutations", _nothing()))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        _add(self._seen, self._unsent)
        violations = self._seen["violations"]
        counts = (
            f"{self._seen['exports']} exports, {self._seen['conversions']} conversions, {len(violations)} violations"
        )
        terminalreporter.write_sep("=", "to_mutation_guard")
        tests: dict[str, dict[str, int]] = {}  # how often each test met each place
        texts: dict[str, str] = {}
        for nodeid, place, text in violations:
            texts.setdefault(place, text)
            met = tests.setdefault(place, {})
            met[nodeid] = met.get(nodeid, 0) + 1
        for place, text in texts.items():
            terminalreporter.write_line(text + "\n")
            for nodeid, times in tests[place].items():
                terminalreporter.write_line(f"  in {nodeid}" + (f" ({times} times)" if times > 1 else ""))
            terminalreporter.write_line("")
        terminalreporter.write_line(counts, red=bool(violations))

    def pytest_unconfigure(self) -> None:
        self._guarding.close()


def _nothing() -> dict[str, Any]:
    """Plain values only: pytest-xdist sends them to another process, and other plugins write them as JSON."""
    return {"exports": 0, "conversions": 0, "violations": []}


def _add(total: dict[str, Any], more: dict[str, Any]) -> None:
    for name, value in more.items():
        total[name] += value
