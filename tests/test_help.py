"""Each kind of help, applied to the program it was given for: the guard passes then, and the numbers are right."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable
from typing import Any

import message_programs
import pytest
import torch
import torch.nn.functional as F
from message_programs import PROGRAMS
from torch import Tensor, nn
from ways import ALL

from dispatch_guard import ToMutationError, ToMutationGuard


class Compared(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = x.to("cpu")
        y.gt_(0)
        return y


class Widened(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = x.to(torch.float32)
        y.add_(torch.arange(4, dtype=torch.float64))
        return y


class Row(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = x.to(torch.float32)
        y[1:].mul_(3)
        return y


class Function(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = x.to(torch.float32)
        nn.init.constant_(y, 3.0)
        return y


class SourceType(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = x * 1
        z = y.type(torch.float32)
        y.neg_()
        return z


class Filled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = x.cpu()
        y.fill_(x.max())
        return y


class Operator(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = torch.ops.aten.to.dtype(x, torch.float32)
        y.exp_()
        return y


MORE = (Compared, Widened, Row, Function, SourceType, Filled, Operator)
ALL_PROGRAMS = {**PROGRAMS, **{program.__name__: program for program in MORE}}


def shifted(x: Tensor) -> Tensor:
    return (2 * x - (2 * x).max()).exp()


def after_first(x: Tensor, value: Tensor) -> Tensor:
    return torch.cat([x[:1], value[1:]])


# The program, what the help says, what it makes of which line, and what the program is to compute.
CASES: list[tuple[str, str, str, str, Callable[[Tensor], Tensor]]] = [
    ("Result", "y = y + 5", "y.add_(5)", "y = y + 5", lambda x: x.sin()),
    ("Result", 'x.to("cpu", copy=True)', 'x.to("cpu")', 'x.to("cpu", copy=True)', lambda x: x.sin()),
    ("Source", "y = y.sin()", "y.sin_()", "y = y.sin()", lambda x: x),
    ("Source", 'y.to("cpu", copy=True)', 'y.to("cpu")', 'y.to("cpu", copy=True)', lambda x: x),
    ("Rebound", "x = x - x.max(dim=-1, keepdim=True)[0]", "x -= x.max(dim=-1, keepdim=True)[0]", "", shifted),
    ("Rebound", "x.to(torch.float32, copy=True)", "x.float()", "", shifted),
    ("Copied", "y = y.clamp(min=0)", "y.clamp_(min=0)", "", lambda x: x.double().clamp(min=0) + x),
    ("Copied", "x.to(torch.float64, copy=True)", "x.double()", "", lambda x: x.double().clamp(min=0) + x),
    (
        "Item",
        "y = y.clone()",
        "y[0] = 3.0",
        "y = y.clone(); y[0] = 3.0",
        lambda x: 2 * torch.cat([x[:1] * 0 + 3, x[1:]]),
    ),
    ("View", "x.to(torch.float32, copy=True)", "x.float()", "", lambda x: after_first(x, 2 * x)),
    (
        "Chain",
        'torch.full_like(x.to("cpu"), 2.5)',
        'x.to("cpu")\n            .fill_(2.5)',
        "",
        lambda x: (0 * x + 2.5).sin(),
    ),
    ("Chain", 'x.to("cpu", copy=True)', 'x.to("cpu")', "", lambda x: (0 * x + 2.5).sin()),
    (
        "OneLine",
        'torch.full_like(x.float(), float("-inf"))',
        'x.float().fill_(float("-inf"))',
        "",
        lambda x: torch.full_like(x[None], float("-inf")).triu(1),
    ),
    (
        "Functional",
        "pass inplace=False and use what is returned",
        "F.relu(y, inplace=True)",
        "y = F.relu(y, inplace=False)",
        lambda x: F.relu(x) + 1,
    ),
    ("Functional", "torch.asarray(x, copy=True)", "torch.as_tensor(x)", "", lambda x: F.relu(x) + 1),
    (
        "Layers",
        "set inplace=False on the module net.1",
        "nn.ReLU(inplace=True)",
        "nn.ReLU(inplace=False)",
        lambda x: F.relu(x) + 1,
    ),
    ("Layers", "x.to(x, copy=True)", "x.type_as(x)", "", lambda x: F.relu(x) + 1),
    ("Twice", "y = torch.empty_like(y).copy_(x + 1)", "y.copy_(x + 1)", "", lambda x: x + 1),
    ("Twice", "h.to(torch.float32, copy=True)", "h.float()", "", lambda x: x + 1),
    ("Buffer", "self.key.to(x.device, copy=True)", "self.key.to(x.device)", "", lambda x: 2 * x),
    (
        "Statistics",
        "convert it after the module has run",
        "mean = self.norm.running_mean.float()\n        return self.norm(x[:, None]) + mean",
        "out = self.norm(x[:, None])\n        return out + self.norm.running_mean.float()",
        lambda x: F.batch_norm(x[:, None], None, None, training=True) + 0.1 * x.mean(),
    ),
    (
        "Statistics",
        "self.norm.running_mean.to(torch.float32, copy=True)",
        "self.norm.running_mean.float()",
        "",
        lambda x: F.batch_norm(x[:, None], None, None, training=True),
    ),
    ("Compared", "y = y.clone()", "y.gt_(0)", "y = y.clone(); y.gt_(0)", lambda x: (x > 0).float()),
    ("Widened", "y = y.clone()", "y.add_(", "y = y.clone(); y.add_(", lambda x: x + torch.arange(4.0)),
    ("Row", "y = y.clone()", "y[1:].mul_(3)", "y = y.clone(); y[1:].mul_(3)", lambda x: after_first(x, 3 * x)),
    (
        "Function",
        "y = y.clone()",
        "nn.init.constant_(y, 3.0)",
        "y = y.clone(); nn.init.constant_(y, 3.0)",
        lambda x: 0 * x + 3,
    ),
    ("SourceType", "y.to(torch.float32, copy=True)", "y.type(torch.float32)", "", lambda x: x),
    ("Filled", "y = y.clone()", "y.fill_(x.max())", "y = y.clone(); y.fill_(x.max())", lambda x: 0 * x + x.max()),
    ("Filled", 'x.to("cpu", copy=True)', "x.cpu()", "", lambda x: 0 * x + x.max()),
    (
        "Operator",
        "torch.ops.aten.to.dtype(x, torch.float32, copy=True)",
        "torch.ops.aten.to.dtype(x, torch.float32)",
        "",
        lambda x: x.exp(),
    ),
]


def example() -> Tensor:
    return torch.tensor([-1.0, 0.5, 2.0, 3.0])


def rewritten(name: str, old: str, new: str) -> Any:
    source = textwrap.dedent(inspect.getsource(ALL_PROGRAMS[name]))
    assert source.count(old) == 1
    scope = {**vars(message_programs), **globals()}
    exec(source.replace(old, new), scope)
    return scope[name]


@pytest.mark.parametrize("way", ["eager", "export", "export_strict"])
@pytest.mark.parametrize("name, help, old, new, meant", CASES)
def test_help_is_true(name: str, help: str, old: str, new: str, meant: Callable[[Tensor], Tensor], way: str) -> None:
    with pytest.raises(ToMutationError) as caught, ToMutationGuard():
        ALL_PROGRAMS[name]()(example())
    assert any(help in line for line in caught.value.violation.help), caught.value.violation.help

    program = rewritten(name, old, new or help)()
    with ToMutationGuard() as guard:
        result = ALL[way](program, (example(),))
    assert guard.violations == []
    if way != "eager":
        result = result.module()(example())
    expected = meant(example())
    assert result.dtype == expected.dtype
    torch.testing.assert_close(result, expected)


def test_no_new_name_is_offered_where_others_are_to_see_the_write() -> None:
    for name in ("View", "Buffer"):
        with pytest.raises(ToMutationError) as caught, ToMutationGuard():
            PROGRAMS[name]()(example())
        assert not any("out of place" in line or ".clone()" in line for line in caught.value.violation.help)


def test_an_optimizer_step_is_fine_on_a_converted_copy() -> None:
    linear = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(linear.parameters(), lr=0.5)

    def train(copy: bool) -> None:
        weight = linear.weight.to("cpu", copy=True) if copy else linear.weight.to("cpu")
        (torch.ones(2) @ weight).sum().backward()
        optimizer.step()

    with pytest.raises(ToMutationError) as caught, ToMutationGuard():
        train(copy=False)
    assert "convert a copy of the parameter" in caught.value.violation.help[0]
    optimizer.zero_grad()
    before = linear.weight.detach().clone()
    with ToMutationGuard():
        train(copy=True)
    torch.testing.assert_close(linear.weight, before - 0.5)


def scale_(x: Tensor) -> None:
    x.mul_(2)


def unnamed(x: Tensor) -> None:
    y = x.float()
    y.ravel().add_(1)


def other_name(x: Tensor) -> None:
    x = x.float()
    scale_(x)


def closure(x: Tensor) -> None:
    y = x.float()

    def inner() -> None:
        y.add_(1)

    inner()


def unpacked(x: Tensor) -> None:
    y = x.float()
    y.add_(1, **{"alpha": 2})


def unpacked_out(x: Tensor) -> None:
    y = x.float()
    torch.add(y, 1, out=y, **{"alpha": 2})  # type: ignore[call-overload]


def starred(x: Tensor) -> None:
    y = x.float()
    y.add_(*(1,))


def inside(x: Tensor) -> None:
    y = x.float()
    y.add_(y.mul_(2))


@pytest.mark.parametrize("program", [unnamed, other_name, closure, unpacked, unpacked_out, starred, inside])
def test_no_twin_is_offered_that_would_lose_the_write_or_its_arguments(program: Callable[[Tensor], None]) -> None:
    with pytest.raises(ToMutationError) as caught, ToMutationGuard():
        program(torch.ones(3))
    assert not any("out of place" in line for line in caught.value.violation.help)
