"""A write is named as the user has written it, at the innermost line of theirs, in every tracer."""

from __future__ import annotations

import inspect
import io
from collections.abc import Callable
from typing import Any

import message_helpers
import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from ways import TORCH

from dispatch_guard import ToMutationError, ToMutationGuard, Violation, check_program

# ---- names: each in-place method with a scalar that it may be given by keyword

SCALARS: dict[str, Callable[[Tensor, Tensor], object]] = {
    "add_": lambda y, g: y.add_(g, alpha=0.1),
    "add_ of a tensor": lambda y, g: y.add_(g, alpha=g[0]),
    "sub_": lambda y, g: y.sub_(g, alpha=2),
    "addcmul_": lambda y, g: y.addcmul_(g, g, value=0.1),
    "addcmul_ after copy_": lambda y, g: y.addcmul_(g.clone().copy_(g), g, value=0.1),
    "addcdiv_": lambda y, g: y.addcdiv_(g, g, value=0.1),
    "addmv_": lambda y, g: y.addmv_(torch.eye(3), g, beta=0.5, alpha=2),
    "addr_": lambda y, g: y.expand(3, 3).clone().to("cpu").addr_(g, g, beta=0.5, alpha=2),
    "lerp_": lambda y, g: y.lerp_(g, 0.1),
    "clamp_": lambda y, g: y.clamp_(min=0.5, max=1.0),
    "div_": lambda y, g: y.div_(g, rounding_mode="floor"),
    "round_": lambda y, g: y.round_(decimals=1),
    "nan_to_num_": lambda y, g: y.nan_to_num_(nan=1.0),
    "index_add_": lambda y, g: y.index_add_(0, torch.tensor([0]), g[:1], alpha=2),
    "index_fill_": lambda y, g: y.index_fill_(0, torch.tensor([0]), value=2.0),
    "masked_fill_": lambda y, g: y.masked_fill_(g > 0, value=2.0),
    "fill_": lambda y, g: y.fill_(value=2.0),
    "uniform_": lambda y, g: y.uniform_(to=2.0),
    "normal_": lambda y, g: y.normal_(mean=1.0, std=2.0),
    "logit_": lambda y, g: y.logit_(eps=0.1),
    "_foreach_lerp_": lambda y, g: torch._foreach_lerp_([y], [g], 0.1),
    "_foreach_add_": lambda y, g: torch._foreach_add_([y], [g], alpha=2),
    "_foreach_addcmul_": lambda y, g: torch._foreach_addcmul_([y], [g], [g], 0.1),
}


class Writes(nn.Module):
    def __init__(self, write: Callable[[Tensor, Tensor], object]) -> None:
        super().__init__()
        self.write = write

    def forward(self, x: Tensor, g: Tensor) -> Tensor:
        y = x.to("cpu")
        self.write(y, g)
        return x.sin()


DECORATOR = ToMutationGuard(on_violation="record")


class Decorated(Writes):
    @DECORATOR
    def forward(self, x: Tensor, g: Tensor) -> Tensor:
        return super().forward(x, g)


def operands() -> tuple[Tensor, Tensor]:
    return torch.ones(3), torch.full((3,), 0.25)


def recorded(run: Callable[[], object]) -> list[Violation]:
    with ToMutationGuard(on_violation="record") as guard:
        run()
    return guard.violations


def ops(violations: list[Violation]) -> list[str | None]:
    return list(dict.fromkeys(violation.op for violation in violations))


@pytest.mark.parametrize("name", SCALARS)
def test_a_write_has_the_name_that_is_written(name: str) -> None:
    module = Writes(SCALARS[name])
    if name.startswith("addcmul_") and TORCH == (2, 10):
        pytest.skip("Dynamo keeps no place of it, so nothing tells that it is no add_")
    expected = ops(recorded(lambda: module(*operands())))
    assert name.split()[0] in [op.split(".")[1] for op in expected if op]
    if "of a tensor" not in name:  # of which make_fx needs the number
        assert ops(recorded(lambda: make_fx(module)(*operands()))) == expected
    for strict in (False, True):
        exported = torch.export.export(module, operands(), strict=strict)
        assert ops(recorded(lambda strict=strict: torch.export.export(module, operands(), strict=strict))) == expected
        assert ops(check_program(exported)) == expected
        assert ops(recorded(lambda exported=exported: exported.run_decompositions())) == expected
    torch._dynamo.reset()
    decorated = Decorated(SCALARS[name])
    torch.compile(decorated, backend="eager", fullgraph=True)(*operands())
    assert ops(DECORATOR.violations) == expected


def test_a_function_that_only_looks_like_one_of_those_keeps_its_operator() -> None:
    class Copies(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x.to("cpu")
            y.copy_(x.clone().addcmul_(x, x, value=0.1))
            return y

    (found,) = recorded(lambda: torch.export.export(Copies(), (torch.ones(3),), strict=True))
    assert found.op == "aten.copy_.default"


# ---- places


class Base(nn.Module):
    def low(self, y: Tensor) -> None:
        y.add_(1)


class Method(Base):
    def middle(self, y: Tensor) -> None:
        self.low(y)

    def forward(self, x: Tensor) -> Tensor:
        y = x.to("cpu")
        self.middle(y)
        return y * 2


class Elsewhere(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = message_helpers.moved(x)
        message_helpers.scaled_(y)
        return y * 2


class Static(nn.Module):
    @staticmethod
    def write(y: Tensor) -> None:
        y.mul_(3)

    def forward(self, x: Tensor) -> Tensor:
        y = x.to("cpu")
        Static.write(y)
        return y


class Nested(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        def write(y: Tensor) -> None:
            y.mul_(3)

        y = x.to("cpu")
        write(y)
        return y


class NamedAsAWrite(nn.Module):
    def shift_(self, y: Tensor) -> Tensor:
        return y.add_(1)

    def forward(self, x: Tensor) -> Tensor:
        y = x.to("cpu")
        self.shift_(y)
        return y


class Child(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.sub = Method()

    def forward(self, x: Tensor) -> Tensor:
        return self.sub(x)


class Decorates(nn.Module):
    @torch.no_grad()
    def write(self, y: Tensor) -> None:
        y.sin_()

    def forward(self, x: Tensor) -> Tensor:
        y = x.to("cpu")
        self.write(y)
        return y


class Branch(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        def yes(t: Tensor) -> Tensor:
            y = t.sin().to("cpu")
            y.add_(1)
            return y

        return torch.cond(x.sum() > 0, yes, torch.cos, (x,))


class BranchMethod(Base):
    def yes(self, t: Tensor) -> Tensor:
        y = t.sin().to("cpu")
        self.low(y)
        return y

    def no(self, t: Tensor) -> Tensor:
        return t.cos()

    def forward(self, x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, self.yes, self.no, (x,))


PLACED = [Method, Elsewhere, Static, Nested, NamedAsAWrite, Child, Decorates, Branch, BranchMethod]


def saved(exported: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    file = io.BytesIO()
    torch.export.save(exported, file)
    file.seek(0)
    return torch.export.load(file)


def message(violations: list[Violation]) -> str:
    return str(ToMutationError(violations[0]))


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("program", PLACED)
def test_a_write_in_a_helper_is_at_the_line_in_the_helper(program: type[nn.Module], strict: bool) -> None:
    args = (torch.ones(3),)
    eager = message(recorded(lambda: program()(*args)))
    exported = torch.export.export(program(), args, strict=strict)
    ways: dict[str, Callable[[], Any]] = {
        "export": lambda: recorded(lambda: torch.export.export(program(), args, strict=strict)),
        "run_decompositions": lambda: recorded(lambda: exported.run_decompositions()),
        "module": lambda: recorded(lambda: exported.module()(*args)),
        "check_program": lambda: check_program(exported),
        "loaded": lambda: check_program(saved(exported)),
    }
    for way, run in ways.items():
        assert message(run()) == eager, way


class Ambiguous(nn.Module):
    def write(self, y: Tensor, twice: bool) -> None:
        y.add_(1)
        if twice:
            y.add_(2)

    def forward(self, x: Tensor) -> Tensor:
        y = x.to("cpu")
        self.write(y, False)
        return y


def test_where_a_graph_leaves_two_lines_to_choose_from_it_is_the_call() -> None:
    (found,) = check_program(torch.export.export(Ambiguous(), (torch.ones(3),)))
    assert found.site is not None and found.site.line.strip() == "self.write(y, False)"


def test_a_subclass_has_its_own_helper() -> None:
    class Other(Method):
        def low(self, y: Tensor) -> None:
            y.add_(2)

    (found,) = check_program(torch.export.export(Other(), (torch.ones(3),)))  # a class in a function can't be looked up
    assert found.site is not None and found.site.line.strip() == "self.middle(y)"
    (found,) = check_program(torch.export.export(Overrides(), (torch.ones(3),)))
    first = inspect.getsourcelines(Overrides)[1]
    assert found.site is not None and found.site.lineno == first + 2


class Overrides(Method):
    def low(self, y: Tensor) -> None:
        y.add_(2)
