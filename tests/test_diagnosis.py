"""What the guard computes to tell of a write is no event for the modes that its user has on."""

from __future__ import annotations

import contextlib
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from dispatch_guard import ToMutationError, ToMutationGuard, check_program
from dispatch_guard.conversions import meta_of
from dispatch_guard.guard import _promotes


class BufferWritten(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("state", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        y = self.state.to("cpu")
        y.add_(x)
        return y * 2


class ParameterWritten(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            y = self.weight.to("cpu")
            y.add_(x)
        return y * 2


class Constant(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = x.to("cpu")
        y.mul_(torch.arange(3.0))
        return y


@pytest.mark.parametrize("pre_dispatch", [False, True])
@pytest.mark.parametrize("tracing_mode", ["real", "fake", "symbolic"])
@pytest.mark.parametrize("program", [BufferWritten, ParameterWritten, Constant])
def test_a_write_is_told_whatever_the_tracer_thinks_of_its_tensors(
    program: type[nn.Module], tracing_mode: Any, pre_dispatch: bool
) -> None:
    module = program()
    with pytest.raises(ToMutationError), ToMutationGuard():
        make_fx(module, tracing_mode=tracing_mode, pre_dispatch=pre_dispatch)(torch.ones(3))


class Watching(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


class WatchingFunctions(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(getattr(func, "__name__", str(func)))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", [Watching, WatchingFunctions])
@pytest.mark.parametrize("outside", [True, False])
def test_other_modes_see_the_same_calls(mode: Any, outside: bool) -> None:
    def run(guarded: bool) -> list[str]:
        x, other = torch.ones(3), torch.ones(3, dtype=torch.float64)
        watching, guard = mode(), ToMutationGuard(on_violation="record")
        first, second = (watching, guard) if outside else (guard, watching)
        with first if guarded or first is watching else contextlib.nullcontext():
            with second if guarded or second is watching else contextlib.nullcontext():
                y = x.to("cpu")
                y.add_(other)
                y[0].unsqueeze_(0)
                y.t_()
                y.data = other.float()
        return watching.seen

    assert run(True) == run(False)


def test_a_graph_is_judged_under_any_mode() -> None:
    exported = torch.export.export(BufferWritten(), (torch.ones(3),))
    watching = Watching()
    for mode in (watching, FakeTensorMode(), torch.device("meta"), torch.inference_mode()):
        with mode:
            assert [violation.op for violation in check_program(exported)] == ["aten.add_.Tensor"]
    assert watching.seen == []


DTYPES = (torch.bool, torch.uint8, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32)
DTYPES += (torch.float64, torch.complex64, torch.complex128)


def test_promotion_is_that_of_torch() -> None:
    for one, other in itertools.product(DTYPES, DTYPES):
        for dims, other_dims in itertools.product((0, 1), (0, 1)):
            a, b = torch.ones((1,) * dims, dtype=one), torch.ones((1,) * other_dims, dtype=other)
            assert _promotes(meta_of(a), meta_of(b)) == (torch.result_type(a, b) != one), (one, other, dims, other_dims)
