"""Help for a write to what others hold (a buffer, a parameter, an argument) keeps the update."""

from __future__ import annotations

import inspect
import textwrap
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dispatch_guard import ToMutationError, ToMutationGuard


class State(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("past", torch.zeros(3))
        self.register_buffer("sq", torch.zeros(3))


class Result(State):
    def forward(self, x: Tensor) -> Tensor:
        past = self.past.to(x.dtype)
        y = past + x
        past.copy_(x)
        return y


class Source(State):
    def forward(self, x: Tensor) -> Tensor:
        y = self.past.to(x.dtype) + x
        self.past.copy_(x)
        return y


class Lost(State):
    def forward(self, x: Tensor) -> Tensor:
        sq = self.sq.to(torch.float64)
        sq.mul_(0.5).add_(x)
        return sq * 2


class Added(State):
    def forward(self, x: Tensor) -> Tensor:
        past = self.past.float()
        past += x
        return past * 2


class ThroughAView(State):
    def forward(self, x: Tensor) -> Tensor:
        past = self.past.to("cpu")
        head = past[:1]
        head.mul_(0).add_(x[:1])
        return past * 2


class ThroughAnotherName(State):
    def forward(self, x: Tensor) -> Tensor:
        held = self.past
        past = held.to(x.device)
        past.add_(x)
        return past * 2


class Argument(State):
    def forward(self, x: Tensor) -> Tensor:
        past = x.to(torch.float32)
        y = past * 2
        past.copy_(y)
        return y


class Chained(State):
    def forward(self, x: Tensor) -> Tensor:
        self.past.to(x.dtype).copy_(x)
        return self.past + 1


# The program, what of its source becomes what (``{help}`` is the code that the first help gives), and what is updated.
CASES: list[tuple[type[State], list[tuple[str, str]], str, float]] = [
    (
        Result,
        [("self.past.to(x.dtype)", "self.past.to(x.dtype, copy=True)"), ("past.copy_(x)", "past.copy_(x); {back}")],
        "past",
        2.0,
    ),
    (Source, [("self.past.to(x.dtype)", "self.past.to(x.dtype, copy=True)")], "past", 2.0),
    (
        Lost,
        [("self.sq.to(torch.float64)", "self.sq.to(torch.float64, copy=True)"), (".add_(x)", ".add_(x); {back}")],
        "sq",
        2.0,
    ),
    (
        Added,
        [("self.past.float()", "self.past.to(torch.float32, copy=True)"), ("past += x", "past += x; {back}")],
        "past",
        2.0,
    ),
    (
        ThroughAView,
        [('self.past.to("cpu")', 'self.past.to("cpu", copy=True)'), (".add_(x[:1])", ".add_(x[:1]); {back}")],
        "past",
        2.0,
    ),
    (
        ThroughAnotherName,
        [("held.to(x.device)", "held.to(x.device, copy=True)"), ("past.add_(x)", "past.add_(x); {back}")],
        "past",
        2.0,
    ),
    (Chained, [("self.past.to(x.dtype).copy_(x)", "self.past.copy_(x)")], "past", 2.0),
]


def example() -> tuple[Tensor]:
    return (torch.full((3,), 2.0),)


def help_for(program: type[State]) -> tuple[str, ...]:
    with pytest.raises(ToMutationError) as caught, ToMutationGuard():
        program()(*example())
    return caught.value.violation.help


def mended(program: type[State], edits: list[tuple[str, str]], first: str) -> Any:
    source = textwrap.dedent(inspect.getsource(program))
    for old, new in edits:
        assert source.count(old) == 1
        source = source.replace(old, new.replace("{back}", first.rpartition("after the write ")[2]))
        assert new.partition("; {back}")[0] in first or "{back}" in new or program is Chained
    scope: dict[str, Any] = dict(globals())
    exec(source, scope)
    return scope[program.__name__]


@pytest.mark.parametrize("program, edits, buffer, value", CASES, ids=[case[0].__name__ for case in CASES])
def test_the_first_help_keeps_the_update(
    program: type[State], edits: list[tuple[str, str]], buffer: str, value: float
) -> None:
    fixed = mended(program, edits, help_for(program)[0])
    module = fixed()
    with ToMutationGuard() as guard:
        module(*example())
    assert guard.violations == [] and module.get_buffer(buffer)[0] == value
    for strict in (False, True):
        with ToMutationGuard():
            exported = torch.export.export(fixed(), example(), strict=strict)
        decomposed = exported.run_decompositions()
        assert list(decomposed.graph_signature.buffers_to_mutate.values()) == [buffer]
        kept = exported.module()
        kept(*example())
        assert kept.get_buffer(buffer)[0] == value


@pytest.mark.parametrize("program", [case[0] for case in CASES] + [Argument])
def test_help_that_loses_the_update_is_not_given(program: type[State]) -> None:
    for line in help_for(program):
        assert "out of place" not in line and ".clone()" not in line and "empty_like" not in line
        # A copy at the conversion is fine where the write is to the source, or where it is written back.
        assert "copy=True" not in line or "write it back" in line or program is Source


def test_an_argument_that_is_filled_is_filled_still() -> None:
    first = help_for(Argument)[0]
    assert first.endswith("past = x.to(torch.float32, copy=True), and after the write x.copy_(past)")


def test_an_update_that_is_lost_here_is_told_to_be() -> None:
    assert help_for(Lost)[0].startswith("if this is to update self.sq, which it does not do here: ")


class InPlaceModule(State):
    def __init__(self) -> None:
        super().__init__()
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        past = self.past.to(x.dtype)
        return self.relu(past) + x


class Given(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = x.to("cpu")
        x.add_(1)
        return y


def test_a_module_that_works_in_place_on_a_buffer() -> None:
    assert "set inplace=False" not in " ".join(help_for(InPlaceModule))
    assert "self.past.copy_(past)" in help_for(InPlaceModule)[0]


def test_a_write_to_an_argument_itself_reaches_the_caller() -> None:
    with pytest.raises(ToMutationError) as caught, ToMutationGuard():
        Given()(torch.ones(2))
    assert caught.value.violation.help[0] == 'take a copy of your own at the conversion: x.to("cpu", copy=True)'
