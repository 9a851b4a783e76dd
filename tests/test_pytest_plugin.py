"""The pytest plugin: marker, fixture and option, each in a pytest run of its own."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

pytest_plugins = "pytester"

EXPORTS = """
import pytest
import torch
from torch import nn
from torch.export import draft_export, export  # imported before the plugin guards anything


class Bad(nn.Module):
    def forward(self, x):
        y = x.to("cpu")
        y.add_(5)
        return x.sin()


class Good(nn.Module):
    def forward(self, x):
        return x.to("cpu") + 1


@pytest.mark.parametrize("times", [1, 2])
def test_bad(times):
    for _ in range(times):
        export(Bad(), (torch.zeros(3),))


def test_good():
    torch.export.export(Good(), (torch.zeros(3),))


def test_strict_and_draft():
    torch.export.export(Bad(), (torch.zeros(3),), strict=True)
    draft_export(Bad(), (torch.zeros(3),))


def test_without_export():
    x = torch.zeros(3)
    x.to("cpu").add_(5)
"""


Run = Callable[..., pytest.RunResult]


@pytest.fixture
def run(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    monkeypatch.setenv("PYTHONWARNINGS", "ignore")
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)

    def runs(source: str, *arguments: str) -> pytest.RunResult:
        pytester.makepyfile(source)
        plugins = ("-p", "dispatch_guard.pytest_plugin", "-p", "no:cacheprovider")
        return pytester.run(sys.executable, "-m", "pytest", *plugins, "-W", "ignore", *arguments)

    return runs


def test_off_unless_asked_and_torch_is_not_imported(run: Run) -> None:
    source = "import sys\ndef test_nothing():\n    assert 'torch' not in sys.modules"
    result = run(source)
    result.assert_outcomes(passed=1)
    result.stdout.no_fnmatch_line("*to_mutation_guard*")


def test_every_export_of_the_run_is_guarded_and_listed(run: Run) -> None:
    result = run(EXPORTS, "--to-mutation-guard")
    result.assert_outcomes(passed=5)
    text = result.stdout.str()
    assert text.count("y.add_(5)") == 1  # one place, met in several tests
    result.stdout.fnmatch_lines(
        [
            "*= to_mutation_guard =*",
            "in-place aten.add_.Tensor on the result of Tensor.to",
            "  in *.py::test_bad[[]1]",
            "  in *.py::test_bad[[]2] (2 times)",
            "  in *.py::test_strict_and_draft (2 times)",
            "6 exports, 6 conversions, 5 violations",
        ]
    )


def test_an_export_fails_on_request(run: Run) -> None:
    result = run(EXPORTS, "--to-mutation-guard=raise", "-k", "bad or good")
    result.assert_outcomes(passed=1, failed=2, deselected=2)
    result.stdout.fnmatch_lines(["E*dispatch_guard.ToMutationError: in-place aten.add_.Tensor*"])


def test_workers_hand_their_violations_over(run: Run) -> None:
    pytest.importorskip("xdist")
    result = run(EXPORTS, "--to-mutation-guard=record", "-n", "2", "-k", "bad or good")
    result.assert_outcomes(passed=3)
    result.stdout.fnmatch_lines(["  in *.py::test_bad[[]2] (2 times)", "4 exports, 4 conversions, 3 violations"])


def test_exports_while_tests_are_collected(run: Run) -> None:
    result = run(EXPORTS + "\nexport(Bad(), (torch.zeros(3),))\n", "--to-mutation-guard", "-k", "without")
    result.assert_outcomes(passed=1, deselected=4)
    result.stdout.fnmatch_lines(["  in (while tests were collected)", "1 exports, 1 conversions, 1 violations"])


MARKED = """
import pytest
import torch
import dispatch_guard

@pytest.mark.to_mutation_guard
def test_raises():
    x = torch.zeros(3)
    y = x.to("cpu")
    y.add_(5)


@pytest.mark.to_mutation_guard(policy="any", on_violation="record")
def test_records():
    x = torch.zeros(3)
    y = x.to("cpu")
    y.add_(5)
    assert False, "to see the report"


@pytest.mark.to_mutation_guard
class TestClass:
    def test_swallows(self):
        x = torch.zeros(3)
        try:
            x.to("cpu").add_(5)
        except RuntimeError:
            pass

    @pytest.mark.to_mutation_guard(on_violation="record")
    def test_nearest_marker_counts(self):
        torch.zeros(3).to("cpu").add_(5)


def test_fixture(to_mutation_guard):
    torch.zeros(3).to("cpu")
    assert to_mutation_guard.conversions == 1


def test_fixture_raises(to_mutation_guard):
    torch.zeros(3).to("cpu").add_(5)


@pytest.mark.to_mutation_guard(on_violation="record")
def test_fixture_and_marker(to_mutation_guard):
    torch.zeros(3).to("cpu").add_(5)
    assert [violation.op for violation in to_mutation_guard.violations] == ["aten.add_.Tensor"]


@pytest.mark.to_mutation_guard(on_violation="shout")
def test_wrong_argument():
    pass


def test_unmarked():
    torch.zeros(3).to("cpu").add_(5)
"""


def test_markers_and_fixtures(run: Run) -> None:
    result = run(MARKED, "--strict-markers", "-rA")
    result.stdout.fnmatch_lines_random(
        [
            "E*dispatch_guard.ToMutationError: in-place aten.add_.Tensor on the result of Tensor.to",
            "FAILED *::test_raises - *",
            "FAILED *::test_records - *",
            "FAILED *::TestClass::test_swallows - *",
            "PASSED *::TestClass::test_nearest_marker_counts",
            "PASSED *::test_fixture",
            "FAILED *::test_fixture_raises - *",
            "PASSED *::test_fixture_and_marker",
            "E*ValueError: on_violation must be one of *",
            "FAILED *::test_wrong_argument - *",
            "PASSED *::test_unmarked",
            "*- Captured to_mutation_guard call -*",
            "1 conversions, 1 violations",
        ]
    )


def test_the_marker_is_told(run: Run) -> None:
    result = run("", "--markers")
    result.stdout.fnmatch_lines(["@pytest.mark.to_mutation_guard(policy=*): guard the whole test*"])
