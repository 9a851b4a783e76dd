"""Every spelling of a conversion, and what is none."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import profile
from ways import ALL

from dispatch_guard import ToMutationError, ToMutationGuard
from dispatch_guard.conversions import METHODS

Tensor = torch.Tensor
other = torch.zeros(1)

# Each returns its float32 argument on the cpu as it is.
ALIASING: dict[str, Callable[[Tensor], Tensor]] = {
    "to(dtype)": lambda x: x.to(torch.float32),
    "to(dtype=)": lambda x: x.to(dtype=torch.float32),
    "to(str)": lambda x: x.to("cpu"),
    "to(device)": lambda x: x.to(torch.device("cpu")),
    "to(device=)": lambda x: x.to(device="cpu"),
    "to(device, dtype)": lambda x: x.to("cpu", torch.float32),
    "to(other)": lambda x: x.to(other),
    "to(tensor=)": lambda x: x.to(tensor=other),
    "to(dtype, non_blocking)": lambda x: x.to(torch.float32, True),
    "to(dtype, non_blocking, no copy)": lambda x: x.to(torch.float32, True, False),
    "to(device, dtype, non_blocking, no copy)": lambda x: x.to("cpu", torch.float32, True, False),
    "to(no copy)": lambda x: x.to("cpu", copy=False),
    "to(memory_format)": lambda x: x.to("cpu", memory_format=torch.preserve_format),
    "to()": lambda x: x.to(None, torch.float32),
    "cpu": lambda x: x.cpu(),
    "float": lambda x: x.float(),
    "type(dtype)": lambda x: x.type(torch.float32),
    "type(str)": lambda x: x.type("torch.FloatTensor"),
    "type(class)": lambda x: x.type(torch.FloatTensor),
    "type_as": lambda x: x.type_as(other),
    "to_dense": lambda x: x.to_dense(),
    "as_tensor": lambda x: torch.as_tensor(x),
    "as_tensor(dtype)": lambda x: torch.as_tensor(x, dtype=torch.float32, device="cpu"),
    "as_tensor(data=)": lambda x: torch.as_tensor(data=x),
    "asarray": lambda x: torch.asarray(x),
    "asarray(obj=)": lambda x: torch.asarray(obj=x, dtype=torch.float32),
    "unbound to": lambda x: torch.Tensor.to(x, "cpu"),
    "unbound cpu": lambda x: torch.Tensor.cpu(x),
    "map": lambda x: next(map(torch.Tensor.float, [x])),
    "getattr": lambda x: getattr(x, "fl" + "oat")(),
    "methodcaller": lambda x: operator.methodcaller("to", "cpu")(x),
    "partial": lambda x: functools.partial(torch.Tensor.to, device="cpu")(x),
    "aten.to": lambda x: torch.ops.aten.to(x, torch.float32),
    "aten.to.dtype": lambda x: torch.ops.aten.to.dtype(x, torch.float32),
    "aten.to.device": lambda x: torch.ops.aten.to.device(x, "cpu", torch.float32),
    "aten.to.other": lambda x: torch.ops.aten.to.other(x, other),
    "aten.to.dtype_layout": lambda x: torch.ops.aten.to.dtype_layout(x, dtype=torch.float32),
    "aten.to(self=)": lambda x: torch.ops.aten.to.dtype(self=x, dtype=torch.float32),
    "aten.type_as": lambda x: torch.ops.aten.type_as(x, other),
    "_cast_Float": lambda x: torch._cast_Float(x),
    "chained": lambda x: x.to("cpu").float().type_as(x),
}


@pytest.mark.parametrize("spelling", ALIASING)
def test_every_aliasing_spelling_counts(spelling: str) -> None:
    convert = ALIASING[spelling]
    for write in (lambda x, y: y.add_(1), lambda x, y: x.add_(1)):
        with pytest.raises(ToMutationError) as caught, ToMutationGuard():
            x = torch.zeros(3)
            y = convert(x)
            write(x, y)
        assert not caught.value.violation.conversion.copied


@pytest.mark.parametrize("way", ["export", "export_strict"])
@pytest.mark.parametrize("spelling", [s for s in ALIASING if s not in ("type(class)", "_cast_Float", "to_dense")])
def test_every_aliasing_spelling_counts_in_export(spelling: str, way: str) -> None:
    convert = ALIASING[spelling]

    class Program(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            z = x.clone()
            y = convert(z)
            y.add_(1)
            return z.sin()

    try:
        ALL[way](Program(), (torch.zeros(3),))
    except Exception:
        pytest.skip("torch does not export this spelling")
    with pytest.raises(ToMutationError), ToMutationGuard():
        ALL[way](Program(), (torch.zeros(3),))


def test_a_bound_method_saved_before_the_guard() -> None:
    x = torch.zeros(3)
    saved = x.to
    with pytest.raises(ToMutationError), ToMutationGuard():
        saved("cpu").add_(1)


@pytest.mark.parametrize("name", METHODS)
def test_every_method_counts_where_it_copies(name: str) -> None:
    arguments: dict[str, tuple[Any, ...]] = {
        "to": (torch.float16,),
        "type": (torch.float16,),
        "type_as": (other.half(),),
    }
    if name in ("cuda", "xpu", "ipu", "hpu", "mtia"):
        pytest.skip("no such device here; fake tensors reach one by to() alone")
    source = torch.zeros(3, dtype=torch.float64 if name != "double" else torch.float32)
    if name == "to_dense":
        source = torch.eye(3).to_sparse()
    if name == "cpu":
        source = torch.zeros(3)
    for written in ("result", "source"):
        with pytest.raises(ToMutationError) as caught, ToMutationGuard():
            x = source.clone()
            y = getattr(x, name)(*arguments.get(name, ()))
            (y if written == "result" else x).zero_()
        assert caught.value.violation.conversion.call == f"Tensor.{name}"


def test_no_converting_method_of_a_tensor_is_missing_from_the_list() -> None:
    """Decided by calling: what runs aten::to and returns another dtype, or the tensor itself, converts."""
    converting = set()
    for name in dir(torch.Tensor):
        if name.startswith("__") or name.endswith("_"):
            continue
        for arguments in ((), (torch.float16,), (torch.zeros(1, dtype=torch.float16),)):
            x = torch.ones(3)
            try:
                with profile() as run:
                    result = getattr(x, name)(*arguments)
            except Exception:
                continue
            if not isinstance(result, Tensor):
                continue
            top = [event for event in run.events() if event.cpu_parent is None]
            if len(top) == 1 and top[0].name in ("aten::to", "aten::type_as", "aten::to_dense"):
                converting.add(name)
    assert converting - {"cuda", "xpu", "ipu", "hpu", "mtia"} <= set(METHODS)
    assert {"to", "float", "half", "cpu", "type", "type_as", "long", "bool", "to_dense"} <= converting


NONE: dict[str, Callable[[Tensor], Tensor]] = {
    "copy=True": lambda x: x.to("cpu", copy=True),
    "copy=True, dtype": lambda x: x.to(torch.float32, copy=True),
    "copy by position": lambda x: x.to(torch.float32, False, True),
    "copy by position, device": lambda x: x.to("cpu", torch.float32, False, True),
    "copy by position, other": lambda x: x.to(other, False, True),
    "copy in aten.to": lambda x: torch.ops.aten.to(x, torch.float16, copy=True),
    "copy in aten.to.dtype": lambda x: torch.ops.aten.to.dtype(x, torch.float32, False, True),
    "_to_copy": lambda x: torch.ops.aten._to_copy(x, dtype=torch.float32),
    "asarray(copy=True)": lambda x: torch.asarray(x, copy=True),
    "clone": lambda x: x.clone(),
    "contiguous": lambda x: x.contiguous(),
    "tensor": lambda x: torch.tensor(x.tolist()),
    "new_tensor": lambda x: x.new_tensor([1.0, 2.0, 3.0]),
    "softmax(dtype)": lambda x: torch.softmax(x, 0, dtype=torch.float64),
    "sum(dtype)": lambda x: x.sum(0, keepdim=True, dtype=torch.float64),
    "addition of dtypes": lambda x: x + torch.ones(3, dtype=torch.int64),
    "copy_": lambda x: torch.empty(3, dtype=torch.float64).copy_(x),
    "type()": lambda x: x.clone() if x.type() else x,
    "as_tensor of a list": lambda x: torch.as_tensor([1.0, 2.0]),
    "view(dtype)": lambda x: x.view(torch.int32),
}


@pytest.mark.parametrize("spelling", NONE)
def test_what_is_no_conversion(spelling: str) -> None:
    for way in ("result", "source"):
        with ToMutationGuard() as guard:
            x = torch.zeros(3)
            y = NONE[spelling](x)
            (y if way == "result" else x).zero_()
        assert guard.conversions == 0 and guard.violations == []


def test_moving_a_module_is_no_conversion() -> None:
    with ToMutationGuard() as guard:
        module = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.LSTM(3, 3))
        for move in (
            lambda m: m.to("cpu"),
            lambda m: m.to(torch.float64),
            lambda m: m.to(torch.float32, non_blocking=True),
            lambda m: m.float(),
            lambda m: m.double(),
            lambda m: m.cpu(),
            lambda m: m.type(torch.float32),
            lambda m: m.half().float(),
            lambda m: m.bfloat16().float(),
            lambda m: m._apply(lambda t: t.to("cpu")),
        ):
            move(module)
            with torch.no_grad():
                for parameter in module.parameters():
                    parameter.zero_()
    assert guard.conversions == 0


def test_modules_that_move_by_swapping() -> None:
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        with ToMutationGuard() as guard:
            module = nn.Linear(3, 3)
            module.to(torch.float64)
            with torch.no_grad():
                module.weight.zero_()
        assert guard.conversions == 0
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def test_conversions_of_views_parameters_buffers_and_subclasses() -> None:
    class Sub(torch.Tensor):
        pass

    buffer = nn.Buffer(torch.zeros(3))
    for make in (
        lambda: torch.zeros(4, 3)[1],
        lambda: nn.Parameter(torch.zeros(3)),
        lambda: buffer,
        lambda: torch.zeros(3).as_subclass(Sub),
        lambda: torch.zeros(3, requires_grad=True) * 1,
        lambda: torch.zeros(0),
        lambda: torch.zeros(()),
    ):
        for dtype in (torch.float32, torch.float64):
            for side in ("source", "result"):
                with pytest.raises(ToMutationError), ToMutationGuard(), torch.no_grad():
                    x = make()
                    y = x.to(dtype)
                    (x if side == "source" else y).zero_()


def test_conversions_inside_autograd_functions() -> None:
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            y = x.to("cpu")
            y.add_(1)
            return y * 2

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            converted = grad.to("cpu")
            converted.mul_(2)
            return converted

    with pytest.raises(ToMutationError), ToMutationGuard():
        Double.apply(torch.zeros(3, requires_grad=True).clone())

    class Backward(Double):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

    y = Backward.apply(torch.zeros(3, requires_grad=True)).cos()
    with pytest.raises(ToMutationError), ToMutationGuard():
        y.sum().backward()


def test_conversions_in_hooks() -> None:
    def hook(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        converted = output.to("cpu")
        with torch.no_grad():
            converted.add_(1)
        return converted

    linear = nn.Linear(3, 3)
    linear.register_forward_hook(hook)
    with pytest.raises(ToMutationError), ToMutationGuard():
        linear(torch.zeros(2, 3))


def test_conversions_in_torchs_own_python_code() -> None:
    from torch.nn.utils.rnn import pack_sequence

    with pytest.raises(ToMutationError), ToMutationGuard():
        packed = pack_sequence([torch.zeros(3, 2), torch.zeros(2, 2)])
        packed.to("cpu").data.add_(1)

    for module, inputs in (
        (nn.MultiheadAttention(4, 2), (torch.zeros(3, 1, 4),) * 3),
        (nn.LSTM(4, 4), (torch.zeros(3, 1, 4),)),
        (nn.GRU(4, 4), (torch.zeros(3, 1, 4),)),
        (nn.TransformerEncoderLayer(4, 2, 8), (torch.zeros(3, 1, 4),)),
        (nn.EmbeddingBag(5, 3), (torch.tensor([1, 2], dtype=torch.int32), torch.tensor([0], dtype=torch.int64))),
    ):
        for training in (True, False):
            module.train(training)
            with ToMutationGuard() as guard:
                module(*inputs)
            assert guard.violations == []


def test_traced_and_scripted_functions() -> None:
    def convert(x: Tensor) -> Tensor:
        return x.to(torch.float64)

    traced = torch.jit.trace(convert, (torch.zeros(3),))
    with ToMutationGuard() as guard:
        traced(torch.zeros(3))
    assert guard.violations == []
    with pytest.raises(ToMutationError), ToMutationGuard():
        torch.jit.trace(lambda x: x.to("cpu").add_(1), (torch.zeros(3),))


def test_conversions_in_handlers_of_modes_and_subclasses() -> None:
    from torch.overrides import TorchFunctionMode

    class Mode(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            return result.to("cpu") if func is torch.Tensor.sin else result

    class Sub(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = super().__torch_function__(func, types, args, kwargs or {})
            return result.as_subclass(torch.Tensor).to("cpu") if func is torch.Tensor.sin else result

    with pytest.raises(ToMutationError), ToMutationGuard(), Mode():
        torch.ones(3).sin().add_(1)
    with pytest.raises(ToMutationError), ToMutationGuard():
        torch.ones(3).as_subclass(Sub).sin().add_(1)
    with ToMutationGuard() as guard:
        assert torch.equal(torch.ones(3).as_subclass(Sub).cos(), torch.ones(3).cos())
    assert guard.conversions == 0


DROPOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "F": lambda y: torch.nn.functional.dropout(y, training=False),
    "module": nn.Dropout().eval(),
    "p=0": lambda y: torch.nn.functional.dropout(y, 0.0),
    "torch": lambda y: torch.dropout(y, 0.5, False),
    "operator": lambda y: torch.ops.aten.dropout(y, 0.5, False),
    "twice": lambda y: nn.Dropout().eval()(nn.Dropout().eval()(y)),
    "feature": lambda y: torch.nn.functional.feature_alpha_dropout(y, training=False),
}


@pytest.mark.parametrize("way", ["eager", "export", "export_strict", "make_fx_fake"])
@pytest.mark.parametrize("name", DROPOUTS)
def test_dropout_that_drops_nothing_is_its_argument(name: str, way: str) -> None:
    """Tracing makes a copy of it, eager does not."""

    class Result(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x.sin().to("cpu")
            DROPOUTS[name](y).mul_(2)
            return y

    class Source(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            x = x.sin()
            y = DROPOUTS[name](x).to("cpu")
            x.mul_(2)
            return y

    for program in (Result(), Source()):
        with pytest.raises(ToMutationError), ToMutationGuard():
            ALL[way](program, (torch.ones(2, 3, 4),))


@pytest.mark.parametrize("way", ["eager", "export", "export_strict"])
def test_dropout_that_drops_makes_a_new_tensor(way: str) -> None:
    class Program(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.dropout(x.sin().to("cpu"), training=True).mul_(2)

    with ToMutationGuard():
        ALL[way](Program(), (torch.ones(2, 3),))


def test_the_state_of_an_optimizer_is_its_own_business() -> None:
    """README.md tells of it among what is not seen."""
    one, other = (nn.Linear(2, 2) for _ in range(2))
    first, second = torch.optim.Adam(one.parameters()), torch.optim.Adam(other.parameters())
    for module, optimizer in ((one, first), (other, second)):
        module(torch.ones(2)).sum().backward()
        optimizer.step()
    average = first.state[one.weight]["exp_avg"]
    before = average.clone()
    with ToMutationGuard() as guard:
        second.load_state_dict(first.state_dict())
        second.step()
    assert second.state[other.weight]["exp_avg"] is average and not average.equal(before)
    assert (guard.conversions, guard.violations) == (0, [])


def test_a_tensor_of_the_users_beside_an_optimizer_is_not() -> None:
    linear = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(linear.parameters())
    linear(torch.ones(2)).sum().backward()
    optimizer.step()
    with pytest.raises(ToMutationError), ToMutationGuard():
        optimizer.state[linear.weight]["exp_avg"].to("cpu")
        optimizer.step()
