"""Giving a tensor object other memory or another shape writes no memory: only the object tells the readings apart."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from ways import EAGER, EXPORT, MAKE_FX, Run, functionalize, vmap

from dispatch_guard import ToMutationError, ToMutationGuard, check_program

Program = Callable[[Tensor], object]


def data_of_another_object(x: Tensor) -> object:
    w = x.clone()
    old = w.data.to(torch.float32)
    w.data = torch.zeros(2, 3)
    return old + w


def data_of_another_object_that_copied(x: Tensor) -> object:
    w = x.clone()
    old = w.detach().to(torch.float64)
    w.data = torch.zeros(2, 3)
    return old + w


def set_on_another_object(x: Tensor) -> object:
    w = x.clone()
    old = w.detach().to(torch.float32)
    w.set_(torch.zeros(2, 3))
    return old + w


def transposed_view(x: Tensor) -> object:
    y = x.clone().to(torch.float32)
    view = y[:2, :2]
    view.t_()
    return y.sum() + view


def unsqueezed_view(x: Tensor) -> object:
    y = x.to(torch.float32)
    row = y[0]
    row.unsqueeze_(0)
    return row + y


def squeezed_source_of_a_view(x: Tensor) -> object:
    w = x.clone()[None]
    y = w[0].to(torch.float32)
    w.squeeze_(0)
    return y + w


def put_back(x: Tensor) -> object:
    w = x.clone()
    w.data = w.data.to(torch.float32)
    return w + 1


def detached_in_place(x: Tensor) -> object:
    y = x.clone().to("cpu")
    y.detach_()
    return y


HARMLESS: list[Program] = [
    detached_in_place,
    data_of_another_object,
    data_of_another_object_that_copied,
    set_on_another_object,
    transposed_view,
    unsqueezed_view,
    squeezed_source_of_a_view,
    put_back,
]


def data_of_the_source(x: Tensor) -> object:
    w = x.clone()
    old = w.to(torch.float32)
    w.data = torch.zeros(2, 3)
    return old + w


def data_of_the_result(x: Tensor) -> object:
    w = x.clone()
    y = w.to(torch.float32)
    y.data = torch.zeros(2, 3)
    return y + w


def data_of_a_copied_source(x: Tensor) -> object:
    w = x.clone()
    old = w.to(torch.float64)
    w.data = torch.zeros(2, 3)
    return old + w


def data_after_a_conversion_of_another_object(x: Tensor) -> object:
    w = x.clone()
    old = w.to(torch.float32)
    other = w.detach().to(torch.float32)
    w.data = torch.zeros(2, 3)
    return old + other + w


def set_on_the_result(x: Tensor) -> object:
    w = x.clone()
    y = w.to(torch.float32)
    y.set_(torch.zeros(2, 3))
    return y + w


def transposed_result(x: Tensor) -> object:
    w = x.clone()
    y = w.to(torch.float32)
    y.t_()
    return y.sum() + w


def transposed_source_of_a_copy(x: Tensor) -> object:
    w = x.clone()
    y = w.to(torch.float64)
    w.t_()
    return y.sum() + w


def data_of_another_part_of_the_result(x: Tensor) -> object:
    w = x.clone()
    y = w.to(torch.float64)
    w.data = y.view(-1)
    return y + 0


def data_transposed(x: Tensor) -> object:
    w = x[:, :2].clone()
    y = w.to(torch.float32)
    w.data = w.data.t()
    return y + w


def reshaped_after_being_put_back(x: Tensor) -> object:
    w = x.clone()
    y = w.to(torch.float64)
    w.data = y
    w.unsqueeze_(0)
    return y + 0


def reshaped_by_what_dropout_gives_back(x: Tensor) -> object:
    w = x.clone()
    y = w.to("cpu")
    nn.functional.dropout(y, 0.5, False).unsqueeze_(0)
    return w + 0


def given_back_as_it_is(x: Tensor) -> object:
    w = x.clone()
    y = w.to("cpu")
    torch.atleast_1d(y).unsqueeze_(0)
    return w + 0


def real_part(x: Tensor) -> object:
    w = x.clone()
    y = w.to("cpu")
    y.real.unsqueeze_(0)
    return w + 0


def written_after_set(x: Tensor) -> object:
    y = x.to("cpu")
    other = torch.zeros(2, 3)
    other.set_(y)
    other.add_(1)
    return x + 0


def written_after_data(x: Tensor) -> object:
    y = x.to("cpu")
    other = torch.zeros(2, 3)
    other.data = y
    other.add_(1)
    return x + 0


def written_through_a_reshaped_view(x: Tensor) -> object:
    y = x.clone().to(torch.float32)
    row = y[0]
    row.unsqueeze_(0)
    row.add_(1)
    return y


HARMFUL: list[Program] = [
    data_of_the_source,
    data_of_the_result,
    data_of_a_copied_source,
    data_after_a_conversion_of_another_object,
    set_on_the_result,
    transposed_result,
    transposed_source_of_a_copy,
    data_of_another_part_of_the_result,
    data_transposed,
    reshaped_after_being_put_back,
    reshaped_by_what_dropout_gives_back,
    given_back_as_it_is,
    real_part,
    written_after_set,
    written_after_data,
    written_through_a_reshaped_view,
]
WAYS: dict[str, Run] = {**EAGER, **EXPORT, **MAKE_FX, "functionalize": functionalize, "vmap": vmap}
# vmap hands set_() slices of what it wraps, and no mode sees it under functionalize(); there atleast_1d() gives back
# another object, whose shape is its own.
UNSEEN = {
    (set_on_the_result, "functionalize"),
    (set_on_the_result, "vmap"),
    (given_back_as_it_is, "functionalize"),
}


class Module(nn.Module):
    def __init__(self, program: Program) -> None:
        super().__init__()
        self.program = program

    def forward(self, x: Tensor) -> object:
        return self.program(x)


def example() -> tuple[Tensor]:
    return (torch.ones(2, 3),)


def runs(program: Program, run: Run) -> bool:
    """Whether torch can do it in this way without a guard, which is not so for all of set_()."""
    try:
        run(Module(program), example())
    except Exception:
        return False
    return True


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("program", HARMLESS)
def test_what_touches_no_memory_is_clean(program: Program, way: str) -> None:
    if not runs(program, WAYS[way]):
        pytest.skip("torch refuses it without a guard")
    with ToMutationGuard() as guard:
        WAYS[way](Module(program), example())
    assert guard.violations == [] and guard.conversions > 0


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("program", HARMFUL)
def test_what_one_reading_sees_and_the_other_does_not_raises(program: Program, way: str) -> None:
    if not runs(program, WAYS[way]) or (program, way) in UNSEEN:
        pytest.skip("torch refuses it without a guard, or does nothing")
    with pytest.raises(ToMutationError), ToMutationGuard():
        WAYS[way](Module(program), example())


@pytest.mark.parametrize("program", [*HARMLESS, *HARMFUL])
def test_a_graph_tells_the_same(program: Program) -> None:
    if not runs(program, EXPORT["export"]):
        pytest.skip("torch refuses it without a guard")
    exported = torch.export.export(Module(program), example())
    assert bool(check_program(exported)) == (program in HARMFUL)


def test_on_another_device_too() -> None:
    with FakeTensorMode():
        for program in HARMLESS:
            with ToMutationGuard():
                program(torch.ones(2, 3, device="meta").to(torch.float32, copy=True).cpu().clone())
        for program in HARMFUL:
            with pytest.raises(ToMutationError), ToMutationGuard():
                program(torch.ones(2, 3))


def test_a_shape_that_changes_is_no_unseen_write() -> None:
    x = torch.ones(2, 3)
    with ToMutationGuard() as guard:
        y = x.to("cpu")
        y[0].unsqueeze_(0)
    assert guard.violations == [] and y.shape == (2, 3)


def test_a_shape_that_changes_hides_no_unseen_write() -> None:
    x = torch.ones(2, 3)
    with pytest.raises(ToMutationError) as caught, ToMutationGuard():
        y = x.to("cpu")
        y[0].unsqueeze_(0)
        thread = threading.Thread(target=lambda: y.add_(1))
        thread.start()
        thread.join()
    assert caught.value.violation.kind == "unseen"


def test_an_operator_of_the_users_is_no_rebinding_whatever_its_tags() -> None:
    with torch.library._scoped_library("dispatch_guard_rebinding", "DEF") as library:
        library.define("write(Tensor(a!) t) -> ()", tags=(torch.Tag.inplace_view,))
        library.impl("write", lambda t: None, "CPU")
        with pytest.raises(ToMutationError), ToMutationGuard():
            torch.ops.dispatch_guard_rebinding.write(torch.ones(2).to("cpu").view(-1))


def test_weights_of_an_adapter_that_are_merged_and_restored() -> None:
    weight = nn.Parameter(torch.ones(2, 2))
    with ToMutationGuard():
        kept = weight.data.to(torch.float32)
        merged = weight.data + 1
        weight.data = merged.to(weight.dtype)
        weight.data = kept
    assert weight.tolist() == [[1, 1], [1, 1]]


def test_a_rebinding_says_that_it_is_one() -> None:
    with ToMutationGuard(on_violation="record") as guard:
        data_of_the_source(torch.ones(2, 3))
        transposed_result(torch.ones(2, 3))
    assert [(v.kind, v.op, v.call) for v in guard.violations] == [
        ("rebind", None, "Tensor.data"),
        ("operator", "aten.t_.default", "aten.t_.default"),
    ]
