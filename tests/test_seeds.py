"""The two programs the project started from, and those re-made from public reports, in every way of running."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from reported_cases import CLEAN, RAISES, MutateResultReadSource, MutateSourceReturnResult, StaticCache
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from ways import ALL, Run

from dispatch_guard import ToMutationError, ToMutationGuard

SEEDS = [MutateResultReadSource, MutateSourceReturnResult]


@pytest.mark.parametrize("run", ALL.values(), ids=ALL)
@pytest.mark.parametrize("model", SEEDS)
def test_the_seeds_raise_in_every_way_of_running(model: type[nn.Module], run: Run) -> None:
    x = torch.randn(3)
    before = x.clone()
    with pytest.raises(ToMutationError) as caught, ToMutationGuard():
        run(model(), (x,))
    assert torch.equal(x, before)
    violation = caught.value.violation
    assert violation.site is not None and violation.conversion.site is not None
    assert "sin_()" in violation.site.line or "add_(5)" in violation.site.line
    assert '.to("cpu")' in violation.conversion.site.line
    assert violation.conversion.call == "Tensor.to"
    assert violation.conversion.site.lineno < violation.site.lineno


@pytest.mark.parametrize("run", ALL.values(), ids=ALL)
@pytest.mark.parametrize("name, report, model, make_args", RAISES, ids=[case[0] for case in RAISES])
def test_reported_programs_raise(name: str, report: str, model: Any, make_args: Callable[[], Any], run: Run) -> None:
    with pytest.raises(ToMutationError), ToMutationGuard():
        run(model(), make_args())


@pytest.mark.parametrize("run", ALL.values(), ids=ALL)
@pytest.mark.parametrize("name, report, model, make_args", CLEAN, ids=[case[0] for case in CLEAN])
def test_harmless_reported_programs_pass(
    name: str, report: str, model: Any, make_args: Callable[[], Any], run: Run
) -> None:
    with ToMutationGuard() as guard:
        run(model(), make_args())
    assert guard.violations == []


@pytest.mark.parametrize("other", ["meta", "cuda"])
@pytest.mark.parametrize("made_on", ["cpu", "other"])
@pytest.mark.parametrize("model", SEEDS)
def test_the_verdict_is_the_same_on_a_second_device(model: type[nn.Module], made_on: str, other: str) -> None:
    with pytest.raises(ToMutationError) as caught, FakeTensorMode(), ToMutationGuard():
        x = torch.empty(3, device="cpu" if made_on == "cpu" else other)
        model()(x)
    assert caught.value.violation.conversion.copied == (made_on == "other")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_verdict_is_the_same_on_a_second_dtype(dtype: torch.dtype) -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        y = x.float()
        y.add_(5)
        return x.sin()

    with pytest.raises(ToMutationError) as caught, ToMutationGuard():
        program(torch.zeros(3, dtype=dtype))
    assert caught.value.violation.conversion.copied == (dtype is torch.float64)


def test_dynamic_shapes_raise_too() -> None:
    for strict in (False, True):
        with pytest.raises(ToMutationError) as caught, ToMutationGuard():
            torch.export.export(
                MutateResultReadSource(), (torch.randn(3),), dynamic_shapes=({0: torch.export.Dim("n")},), strict=strict
            )
        assert isinstance(caught.value.violation.conversion.source.shape[0], str)


def test_buffers_and_parameters_are_as_they_were() -> None:
    for strict in (False, True):
        model = StaticCache()
        key = model.key
        with pytest.raises(ToMutationError), ToMutationGuard():
            torch.export.export(model, RAISES[3][3](), strict=strict)
        assert model.key is key
        assert torch.equal(key, torch.zeros_like(key))


def test_decompositions_run_under_the_guard() -> None:
    model = CLEAN[1][2]()
    exported = torch.export.export(model, CLEAN[1][3]())
    plain = exported.run_decompositions()
    with ToMutationGuard() as guard:
        guarded = exported.run_decompositions()
    assert guard.violations == []
    assert str(plain.graph) == str(guarded.graph)


def test_decompositions_of_a_program_exported_without_the_guard_raise() -> None:
    exported = torch.export.export(MutateResultReadSource(), (torch.randn(3),))
    with pytest.raises(ToMutationError) as caught, ToMutationGuard():
        exported.run_decompositions()
    assert caught.value.violation.site is not None
    assert caught.value.violation.site.line.strip() == "y.add_(5)"
