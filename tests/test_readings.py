"""The proof by running: results of both readings of each conversion."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
from hypothesis import given
from reported_cases import CLEAN, RAISES
from test_properties import Step, programs, relaxed, run
from torch import nn

from dispatch_guard import ToMutationGuard, divergence

Tensor = torch.Tensor

DIVERGES = {
    "result written, source read": True,
    "source written, result returned": True,
    "mask rebound and filled": False,
    "static cache": False,  # the buffer is set to the result, so that it is what is written either way
    "logits shifted after float()": True,  # the caller's logits change
    "float().fill_()": True,  # t is filled, and read again
}


@pytest.mark.parametrize("name, _, model, make_args", RAISES + CLEAN, ids=[case[0] for case in RAISES + CLEAN])
def test_reported_programs(name: str, _: str, model: Any, make_args: Any) -> None:
    torch.manual_seed(0)
    assert divergence(model(), make_args()).diverges == DIVERGES.get(name, False)


def test_each_conversion_and_all_at_once() -> None:
    def program(x: Tensor, scale: Tensor) -> dict[str, Tensor]:
        a = x.to("cpu")
        b = a.sin().float()
        c = x.double()
        b.mul_(2)
        a.add_(5)
        return {"sine": x.sin(), "rest": b + c.float() + scale.to("cpu")}

    found = divergence(program, (torch.zeros(3),), {"scale": torch.ones(1)})
    assert [reading.conversion.call for reading in found.readings] == [
        "Tensor.to",
        "Tensor.float",
        "Tensor.double",
        "Tensor.float",
        "Tensor.to",
    ]
    assert [reading.runnable for reading in found.readings] == [True, True, False, False, True]
    assert [reading.diverges for reading in found.readings] == [True, False, False, False, False]
    first = found.readings[0].difference
    assert first is not None and first.where == "output['sine']" and first.largest == pytest.approx(0.9589, abs=1e-3)
    assert found.all_at_once == first
    assert "not runnable here, as Tensor.double copied" in str(found) and "output['sine'] differs by up to" in str(
        found
    )
    alone = divergence(program, (torch.zeros(3),), {"scale": torch.ones(1)}, each=False)
    assert alone.readings == () and alone.all_at_once == first and alone.diverges


def test_two_conversions_that_only_together_make_a_difference() -> None:
    def program(x: Tensor) -> Tensor:
        return (x * 1).to("cpu").to("cpu").add_(1)

    assert not divergence(program, (torch.zeros(3),)).diverges

    def either(x: Tensor) -> Tensor:
        y = x.to("cpu").to("cpu")
        y.add_(1)
        return x

    assert [reading.diverges for reading in divergence(either, (torch.zeros(3),)).readings] == [True, True]


class State(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("ema", torch.zeros(3))
        self.plain = torch.zeros(3)

    def forward(self, x: Tensor, which: str) -> Tensor:
        x = nn.functional.dropout(self.norm(x)) + random.random()
        held = {"ema": self.ema, "plain": self.plain, "weight": self.norm.weight.detach(), "none": x * 1}[which]
        held.to("cpu").add_(1)
        return x


@pytest.mark.parametrize(
    "which, where",
    [("ema", "buffer ema"), ("plain", "attribute plain"), ("weight", "parameter norm.weight"), ("none", None)],
)
def test_what_a_module_holds_counts_and_nothing_is_changed(which: str, where: str | None) -> None:
    model, x = State().train(), torch.rand(4, 3)
    state, inputs = copy.deepcopy(model.state_dict()), x.clone()
    numbers = torch.get_rng_state(), random.getstate()
    found = divergence(model, (x, which))
    assert (found.all_at_once.where if found.all_at_once else None) == where
    assert torch.equal(torch.get_rng_state(), numbers[0]) and random.getstate() == numbers[1]
    assert torch.equal(x, inputs) and torch.equal(model.plain, torch.zeros(3)) and model.norm.training
    for name, value in model.state_dict().items():
        assert torch.equal(value, state[name]), name


def test_arguments_that_share_memory_still_do() -> None:
    def program(x: Tensor, part: Tensor) -> Tensor:
        part.to("cpu").add_(1)
        return x.sum()

    x = torch.zeros(4)
    found = divergence(program, (x, x[:2]))
    assert found.all_at_once is not None and found.all_at_once.where == "output" and found.all_at_once.largest == 2


def test_an_error_in_one_reading_is_a_difference() -> None:
    def program(x: Tensor) -> Tensor:
        x.to("cpu").add_(1)
        if x.sum() == 0:
            raise RuntimeError("nothing there")
        return x.sin()

    found = divergence(program, (torch.zeros(3),))
    assert str(found.all_at_once) == "the run (it raises RuntimeError) differs"
    with pytest.raises(RuntimeError, match="nothing there"):
        divergence(program, (-torch.ones(1),))


def test_a_program_that_is_not_the_same_twice() -> None:
    calls: list[int] = []

    def program(x: Tensor) -> Tensor:
        calls.append(0)
        return x + len(calls)

    with pytest.raises(ValueError, match="two runs of the program as it is written differ"):
        divergence(program, (torch.zeros(3),))


def test_not_a_number_is_like_itself() -> None:
    def program(x: Tensor) -> tuple[Tensor, float]:
        return x.to("cpu").log(), float("nan")

    assert not divergence(program, (-torch.ones(3),)).diverges


def test_training_and_gradients() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            loss = self.linear(x.to("cpu")).sum()
            loss.backward()
            return loss.detach()

    assert not divergence(Net(), (torch.rand(2, 3),)).diverges


@relaxed
@given(programs())
def test_what_differs_is_a_violation(program: list[Step]) -> None:
    with ToMutationGuard(on_violation="record") as guard:
        run(program, torch.rand(2, 3))
    if divergence(lambda x: run(program, x), (torch.rand(2, 3),)).diverges:
        assert guard.violations
