"""Every kind of tensor, and every way of writing to one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor
from ways import TORCH

from dispatch_guard import ToMutationError, ToMutationGuard

Tensor = torch.Tensor


class Weight(Tensor):
    """A quantized weight as torchao makes them: integers and a scale that pose as a float tensor."""

    @staticmethod
    def __new__(cls, data: Tensor, scale: Tensor) -> Any:
        return Tensor._make_wrapper_subclass(cls, data.shape, dtype=torch.float32)

    def __init__(self, data: Tensor, scale: Tensor) -> None:
        self.quantized, self.scale = data, scale

    def __tensor_flatten__(self) -> Any:
        return ["quantized", "scale"], None

    @staticmethod
    def __tensor_unflatten__(inner: Any, context: Any, size: Any, stride: Any) -> Any:
        return Weight(inner["quantized"], inner["scale"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        aten = torch.ops.aten
        if func in (aten._to_copy.default, aten.detach.default, aten.alias.default):
            return Weight(args[0].quantized, args[0].scale)
        if func is aten.mul_.Tensor:
            args[0].scale.mul_(args[1])
            return args[0]
        plain = [a.quantized.float() * a.scale if isinstance(a, Weight) else a for a in args]
        return func(*plain, **(kwargs or {}))


def jagged() -> Tensor:
    return torch.nested.nested_tensor([torch.ones(2, 4), torch.ones(3, 4)], layout=torch.jagged)


Write = Callable[[Tensor], object]

KINDS: dict[str, tuple[Callable[[], Tensor], list[Write]]] = {
    "coo": (
        lambda: torch.eye(3).to_sparse().coalesce(),
        [lambda t: t.zero_(), lambda t: t.mul_(2), lambda t: t.values().add_(1), lambda t: t._values().add_(1)],
    ),
    "csr": (lambda: torch.eye(3).to_sparse_csr(), [lambda t: t.mul_(2), lambda t: t.values().add_(1)]),
    "csc": (lambda: torch.eye(3).to_sparse_csc(), [lambda t: t.values().add_(1)]),
    "bsr": (lambda: torch.eye(4).to_sparse_bsr((2, 2)), [lambda t: t.values().add_(1)]),
    "nested": (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), [lambda t: t.mul_(2)]),
    "jagged": (jagged, [lambda t: t.mul_(2), lambda t: t.values().mul_(2)]),
    "conjugate": (lambda: torch.ones(3, dtype=torch.complex64).conj(), [lambda t: t.mul_(2)]),
    "negative": (lambda: torch.ones(3, dtype=torch.complex64).conj().imag, [lambda t: t.mul_(2)]),
    "zero-size": (lambda: torch.zeros(0), [lambda t: t.add_(1)]),
    "zero-dim": (lambda: torch.zeros(()), [lambda t: t.add_(1)]),
    "meta": (lambda: torch.zeros(3, device="meta"), [lambda t: t.add_(1)]),
    "two": (lambda: TwoTensor(torch.zeros(3), torch.zeros(3)), [lambda t: t.add_(1), lambda t: t.a.add_(1)]),
    "weight": (
        lambda: Weight(torch.ones(3, dtype=torch.int8), torch.ones(1)),
        [lambda t: t.mul_(2), lambda t: t.quantized.add_(1)],
    ),
    "parameter": (lambda: nn.Parameter(torch.zeros(3)), [lambda t: t.data.add_(1)]),
    "quantized": (
        lambda: torch.quantize_per_tensor(torch.ones(3), 1.0, 0, torch.quint8),
        [lambda t: t.copy_(torch.ones(3))],
    ),
    "mkldnn": (lambda: torch.ones(3, 3).to_mkldnn(), [lambda t: torch.relu_(t)]),
}


@pytest.mark.parametrize("kind", KINDS)
def test_converting_works_and_writing_after_it_raises(kind: str) -> None:
    make, writes = KINDS[kind]
    conversions: list[Callable[[Tensor], Tensor]] = [lambda t: t.to(t.dtype)]
    if kind not in ("quantized", "mkldnn"):
        wide = torch.complex128 if make().dtype.is_complex else torch.float64
        conversions.append(lambda t: t.to(wide))
    for convert in conversions:
        for write in writes:
            for side in ("source", "result"):
                with pytest.raises(ToMutationError), ToMutationGuard():
                    source = make()
                    result = convert(source)
                    write(source if side == "source" else result)


@pytest.mark.parametrize("kind", KINDS)
def test_a_tensor_of_its_own_may_be_written(kind: str) -> None:
    make, writes = KINDS[kind]
    for write in writes:
        with ToMutationGuard() as guard:
            converted = make()
            converted.to(converted.dtype)
            write(make())
        assert guard.violations == []


def test_tensors_of_one_raggedness_are_strangers() -> None:
    with ToMutationGuard() as guard:
        x = jagged()
        y = x.to(torch.float64)
        (x * 2).mul_(2)  # shares its offsets with x and y, and nothing else
        (y + 1).add_(1)
    assert guard.conversions == 1


# What each does to a float32 tensor of 3 by 3.
WRITES: dict[str, Write] = {
    "add_": lambda t: t.add_(1),
    "+=": lambda t: t.__iadd__(1),
    "t[i] = v": lambda t: t.__setitem__(0, 5.0),
    "t[mask] = v": lambda t: t.__setitem__(t > 0, 5.0),
    "out=": lambda t: torch.add(t, 1, out=t),
    "copy_": lambda t: t.copy_(torch.ones(3, 3)),
    "masked_fill_": lambda t: t.masked_fill_(t > 0, 1),
    "index_put_": lambda t: t.index_put_((torch.tensor([0]),), torch.ones((), dtype=t.dtype)),
    "fill_diagonal_": lambda t: t.fill_diagonal_(1),
    "uniform_": lambda t: t.uniform_(),
    "set_": lambda t: t.set_(torch.ones(2, dtype=t.dtype)),
    "resize_": lambda t: t.resize_(5),
    "squeeze_": lambda t: t.squeeze_(),
    "unsqueeze_": lambda t: t.unsqueeze_(0),
    "transpose_": lambda t: t.transpose_(0, 1),
    "t_": lambda t: t.t_(),
    "as_strided_": lambda t: t.as_strided_((2,), (1,)),
    ".data =": lambda t: setattr(t, "data", torch.ones(3, 3)),
    ".real": lambda t: t.real.add_(1),
    "apply_": lambda t: t.apply_(lambda value: value + 1),
    "map_": lambda t: t.map_(torch.ones(3, 3, dtype=t.dtype), lambda a, b: a + b),
    "map2_": lambda t: t.map2_(t.clone(), t.clone(), lambda a, b, c: a + b),
    "a chain of views": lambda t: t.view(-1).chunk(3)[1].unsqueeze(0).expand(1, 3).squeeze(0).unbind()[0].add_(1),
    "detach().T.data": lambda t: t.detach().T.data.add_(1),
    "view(dtype)": lambda t: t.view(torch.int32).add_(1),
    "as_strided": lambda t: t.as_strided((2,), (1,)).add_(1),
    "_foreach_add_": lambda t: torch._foreach_add_([torch.ones(1), t], 1),
    "_foreach_copy_": lambda t: torch._foreach_copy_([t], [torch.ones(3, 3)]),
    "relu(inplace=True)": lambda t: nn.functional.relu(t, inplace=True),
    "nn.ReLU(inplace=True)": lambda t: nn.ReLU(inplace=True)(t),
    "nn.init": lambda t: nn.init.ones_(t),
    "vector_to_parameters": lambda t: nn.utils.vector_to_parameters(torch.ones(9), [t]),
    "untyped_storage().fill_": lambda t: t.untyped_storage().fill_(0),
    "swap_tensors": lambda t: torch.utils.swap_tensors(t, torch.ones(3, 3)),
}


@pytest.mark.parametrize("write", WRITES)
def test_every_write_raises_on_either_side(write: str) -> None:
    for dtype in (torch.float32, torch.float64):
        for side in ("source", "result"):
            with pytest.raises(ToMutationError) as caught, ToMutationGuard():
                source = torch.ones(3, 3, dtype=dtype)
                result = source.float()
                WRITES[write](source if side == "source" else result)
            if dtype is torch.float64:
                assert caught.value.violation.role == side


@pytest.mark.parametrize("write", WRITES)
def test_no_such_write_to_a_stranger_raises(write: str) -> None:
    with ToMutationGuard() as guard:
        converted = torch.ones(3, 3).to("cpu")
        WRITES[write](converted + 1)
    assert guard.violations == []


def test_inference_tensors() -> None:
    for dtype in (torch.float32, torch.float64):
        for side in ("source", "result"):
            with pytest.raises(ToMutationError) as caught, torch.inference_mode(), ToMutationGuard():
                source = torch.ones(3, dtype=dtype)
                result = source.float()
                (source if side == "source" else result).add_(1)
            assert caught.value.violation.version is None


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "for-loop": lambda p: torch.optim.AdamW(p, foreach=False),
    "foreach": lambda p: torch.optim.AdamW(p, foreach=True),
    "fused": lambda p: torch.optim.AdamW(p, fused=True),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adagrad": lambda p: torch.optim.Adagrad(p),
}


@pytest.mark.parametrize("converted", [False, True])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_an_optimizer_step_on_a_converted_parameter(kind: str, converted: bool) -> None:
    def step() -> None:
        linear = nn.Linear(3, 3)
        optimizer = OPTIMIZERS[kind](linear.parameters())
        if converted:
            linear.weight.to("cpu")
        for _ in range(2):
            linear(torch.ones(2, 3)).sum().backward()
            optimizer.step()
            optimizer.load_state_dict(optimizer.state_dict())

    if not converted:
        with ToMutationGuard() as guard:
            step()
        assert guard.violations == []
        return
    with pytest.raises(ToMutationError), ToMutationGuard():
        step()


@pytest.mark.parametrize("statistic", ["running_mean", "running_var"])
@pytest.mark.parametrize("strict", [None, False, True])
@pytest.mark.parametrize(
    "norm, shape",
    [
        (lambda: nn.BatchNorm1d(3), (4, 3)),
        (lambda: nn.BatchNorm2d(3), (4, 3, 2, 2)),
        (lambda: nn.InstanceNorm1d(3, track_running_stats=True), (4, 3, 5)),
    ],
)
def test_running_statistics(norm: Any, shape: Any, strict: bool | None, statistic: str) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = norm()

        def forward(self, x: Tensor) -> Any:
            return getattr(self.norm, statistic).to(torch.float64), self.norm(x)

    def run(model: nn.Module) -> None:
        if strict is None:
            model(torch.randn(shape))
        else:
            torch.export.export(model, (torch.randn(shape),), strict=strict)

    with pytest.raises(ToMutationError) as caught, ToMutationGuard():
        run(Model().train())
    assert caught.value.violation.role == "source"
    if isinstance(Model().norm, nn.InstanceNorm1d) and TORCH == (2, 10):
        return  # there it writes its statistics (as they are) in eval mode too
    with ToMutationGuard() as guard:
        run(Model().eval())
    assert guard.violations == [] and guard.conversions == 1


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
def test_sparse_tensors_of_one_pattern_are_not_one_memory() -> None:
    matrix = torch.eye(3).to_sparse_csr()
    with ToMutationGuard():
        matrix.to("cpu")
        (matrix + matrix).mul_(2)
    with pytest.raises(ToMutationError), ToMutationGuard():
        matrix.to("cpu")
        matrix.values().mul_(2)
