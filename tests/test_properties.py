"""Random programs: the guard raises exactly when a reference interpreter, written from the rule alone, says so."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from dispatch_guard import ToMutationError, ToMutationGuard

Tensor = torch.Tensor
EXAMPLES = int(os.environ.get("DISPATCH_GUARD_EXAMPLES", "100"))

CONVERT = ["to_cpu", "float", "type_as", "to_dtype", "copy_true", "double"]
VIEW = ["view", "slice", "transpose", "detach", "unsqueeze", "chunk"]
PURE = ["add", "sin", "clone", "cat"]
WRITE = ["add_", "mul_", "copy_", "setitem", "out", "zero_", "iadd"]


@dataclass(frozen=True)
class Step:
    kind: str
    source: int
    other: int


def programs(writes: list[str] = WRITE) -> st.SearchStrategy[list[Step]]:
    step = st.builds(Step, st.sampled_from(CONVERT * 2 + VIEW + PURE + writes), st.integers(0, 99), st.integers(0, 99))
    return st.lists(step, min_size=1, max_size=9)


def run(program: list[Step], x: Tensor) -> Tensor:
    values = [x.clone(), x * 2, torch.ones_like(x).reshape(2, 3)]
    for step in program:
        t = values[step.source % len(values)]
        u = values[step.other % len(values)]
        same = u if u.shape == t.shape and u.dtype == t.dtype else t + 1
        values.append(_apply(step.kind, t, same))
    return torch.stack([value.sum().double() for value in values])


def _apply(kind: str, t: Tensor, u: Tensor) -> Tensor:
    match kind:
        case "to_cpu":
            return t.to("cpu")
        case "float":
            return t.float()
        case "double":
            return t.double()
        case "type_as":
            return t.type_as(u)
        case "to_dtype":
            return t.to(t.dtype)
        case "copy_true":
            return t.to("cpu", copy=True)
        case "view":
            return t.view(t.shape)
        case "slice":
            return t[:1]
        case "transpose":
            return t.transpose(0, -1)
        case "detach":
            return t.detach()
        case "unsqueeze":
            return t.unsqueeze(0).squeeze(0)
        case "chunk":
            return t.chunk(2)[0]
        case "add":
            return t + 1
        case "sin":
            return t.sin()
        case "clone":
            return t.clone()
        case "cat":
            return torch.cat([t, t])
        case "add_":
            t.add_(1)
        case "mul_":
            t.mul_(2)
        case "copy_":
            t.copy_(u.clone())
        case "setitem":
            t[0] = 1
        case "zero_":
            t.zero_()
        case "iadd":
            t += 1
        case "out":
            torch.add(t, 1, out=t)
    return t


def guilty(program: list[Step]) -> bool:
    """The rule: a write to memory that a conversion's source or result lives in, after that conversion.

    Memory is counted as the aliasing reading of each conversion has it and as the copying one has it; the rule tags
    both sides, so the verdict may not depend on which.
    """
    for aliases in (True, False):
        memory = [0, 1, 2]  # of each value, by number
        tagged: set[int] = set()
        for step in program:
            mine = memory[step.source % len(memory)]
            if step.kind in WRITE and mine in tagged:
                return True
            new = len(memory) + 3
            if step.kind in CONVERT and step.kind != "copy_true":
                result = mine if aliases else new
                tagged |= {mine, result}
                memory.append(result)
            else:
                memory.append(mine if step.kind in WRITE + VIEW else new)
    return False


class Program(nn.Module):
    def __init__(self, program: list[Step]) -> None:
        super().__init__()
        self.program = program

    def forward(self, x: Tensor) -> Tensor:
        return run(self.program, x)


def verdict(call: Any) -> bool:
    try:
        with ToMutationGuard():
            call()
    except ToMutationError:
        return True
    return False


# The same programs every time, unless more are asked for.
relaxed = settings(
    max_examples=EXAMPLES,
    derandomize="DISPATCH_GUARD_EXAMPLES" not in os.environ,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


@relaxed
@given(programs())
def test_eager_agrees_with_the_rule(program: list[Step]) -> None:
    assert verdict(lambda: run(program, torch.ones(2, 3))) == guilty(program)


@relaxed
@given(programs())
def test_fake_tensors_on_a_second_device_agree_with_the_rule(program: list[Step]) -> None:
    def call() -> None:
        with FakeTensorMode():
            run(program, torch.ones(2, 3, device="meta"))

    assert verdict(call) == guilty(program)


@pytest.mark.parametrize("strict", [False, True])
def test_export_agrees_with_the_rule(strict: bool) -> None:
    @settings(relaxed, max_examples=max(20, EXAMPLES // 4))
    @given(programs())
    def check(program: list[Step]) -> None:
        torch._dynamo.reset()
        found = verdict(lambda: torch.export.export(Program(program), (torch.ones(2, 3),), strict=strict))
        assert found == guilty(program)

    check()


@settings(relaxed, max_examples=max(20, EXAMPLES // 4))
@given(programs(writes=[]))
def test_programs_without_writes_export_the_same(program: list[Step]) -> None:
    plain = torch.export.export(Program(program), (torch.ones(2, 3),))
    with ToMutationGuard() as guard:
        guarded = torch.export.export(Program(program), (torch.ones(2, 3),))
    assert str(plain.graph) == str(guarded.graph)
    assert (
        guard.conversions
        == sum(step.kind in CONVERT and step.kind != "copy_true" for step in program) + len(program) + 3
    )  # one more for each value that is returned
