"""The pytest plugin, as pytest loads it in every run: off, and without torch, until asked for."""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from .guard import ToMutationGuard

_MARKER = """\
to_mutation_guard(policy="any", on_violation="raise"): guard the whole test with a dispatch_guard.ToMutationGuard \
that is made with these arguments."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("dispatch_guard").addoption(
        "--to-mutation-guard",
        nargs="?",
        const="record",
        choices=("record", "raise"),
        help="guard every torch.export.export of the run and list the violations at its end; with =raise the export "
        "raises at the first one",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", _MARKER)
    on_violation = config.getoption("--to-mutation-guard")
    if on_violation is not None:
        from .export_guard import ExportGuard

        config.pluginmanager.register(ExportGuard(on_violation), "dispatch_guard_exports")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    guard: ToMutationGuard | None = getattr(item, "funcargs", {}).get("to_mutation_guard")
    if guard is None and item.get_closest_marker("to_mutation_guard") is not None:
        guard = _guard_for(item)
    if guard is None:
        return (yield)
    try:
        with guard:
            return (yield)
    finally:
        if guard.on_violation == "record":
            item.add_report_section("call", "to_mutation_guard", guard.report())


@pytest.fixture
def to_mutation_guard(request: pytest.FixtureRequest) -> ToMutationGuard:
    """A ``dispatch_guard.ToMutationGuard`` that is active while the test runs, made as its marker of this name says."""
    return _guard_for(request.node)


def _guard_for(item: pytest.Item) -> ToMutationGuard:
    from .guard import ToMutationGuard

    marker = item.get_closest_marker("to_mutation_guard")
    return ToMutationGuard(*marker.args, **marker.kwargs) if marker else ToMutationGuard()
