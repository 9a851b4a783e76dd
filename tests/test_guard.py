"""The promises, by name: raised before the write, never lost, nothing else changed, nothing kept alive."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from reported_cases import MutateResultReadSource
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode
from ways import ALL, COMPILE, Run, stacks

from dispatch_guard import (
    Site,
    ToMutationError,
    ToMutationGuard,
    ToMutationWarning,
    Violation,
    allow_mutation,
)


def violate(x: torch.Tensor) -> torch.Tensor:
    y = x.to("cpu")
    y.add_(5)
    return y


# ---- raised before the write


def test_raises_before_the_write() -> None:
    x = torch.zeros(3)
    version = x._version
    with pytest.raises(ToMutationError), ToMutationGuard():
        violate(x)
    assert torch.equal(x, torch.zeros(3))
    assert x._version == version


def test_a_write_before_the_conversion_is_none_of_ours() -> None:
    x = torch.zeros(3)
    with ToMutationGuard() as guard:
        x.add_(1)
        y = x.to("cpu")
        _ = y + 1
    assert guard.conversions == 1 and guard.violations == []


def test_writes_to_strangers_pass() -> None:
    with ToMutationGuard() as guard:
        x = torch.zeros(3)
        y = x.to("cpu")
        z = y + 1
        z.add_(1)
        z[0] = 4
        torch.add(x, y, out=torch.empty(3))
    assert guard.violations == []


@pytest.mark.parametrize("side", ["source", "result"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_anything_that_shares_storage_with_either_side(side: str, dtype: torch.dtype) -> None:
    base = torch.zeros(4, 4, dtype=dtype)
    views: list[Callable[[torch.Tensor], torch.Tensor]] = [
        lambda t: t,
        lambda t: t[1:],
        lambda t: t.view(-1)[:3].unsqueeze(0),
        lambda t: t.detach(),
        lambda t: t.data,
        lambda t: t.T,
        lambda t: t.unbind()[2].chunk(2)[1],
        lambda t: t.as_strided((2,), (1,)),
        lambda t: t.view(torch.int32),
        lambda t: t.expand(2, 4, 4)[0],
    ]
    for view in views:
        with pytest.raises(ToMutationError) as caught, ToMutationGuard():
            source = base.clone()
            result = source.float()
            view(source if side == "source" else result).zero_()
        if dtype is torch.float64:
            assert caught.value.violation.role == side


def test_the_base_of_a_converted_view_is_guarded() -> None:
    with pytest.raises(ToMutationError), ToMutationGuard():
        base = torch.zeros(4, 4)
        result = base[1].to("cpu")
        base.add_(1)
        return result


# ---- cannot be lost


class Swallows(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.to("cpu")
        try:
            y.add_(5)
        except Exception:
            pass
        return x.sin()


@pytest.mark.parametrize("way", ["eager", "export", "export_strict", "make_fx_fake"])
def test_a_swallowed_error_is_raised_on_leaving(way: str) -> None:
    with pytest.raises(ToMutationError) as caught, ToMutationGuard():
        ALL[way](Swallows(), (torch.randn(3),))
    assert caught.value.violation.site is not None


def test_a_wrapped_error_is_raised_unwrapped() -> None:
    with pytest.raises(ToMutationError) as caught, ToMutationGuard():
        try:
            violate(torch.zeros(3))
        except RuntimeError as error:
            raise ValueError("wrapped") from error
    assert caught.value.violation.op == "aten.add_.Tensor"


def test_a_write_from_another_thread_is_raised_on_leaving() -> None:
    x = torch.zeros(3)
    with pytest.raises(ToMutationError) as caught, ToMutationGuard() as guard:
        _y = x.to("cpu")
        thread = threading.Thread(target=lambda: x.add_(1))
        thread.start()
        thread.join()
        assert guard.violations == []
    assert caught.value.violation.kind == "unseen"
    assert caught.value.violation.site is None
    assert caught.value.violation.conversion.site is not None


def test_a_write_from_another_thread_is_raised_at_the_next_event() -> None:
    x = torch.zeros(3, dtype=torch.float64)
    with pytest.raises(ToMutationError) as caught, ToMutationGuard():
        y = x.float()
        thread = threading.Thread(target=lambda: y.add_(1))
        thread.start()
        thread.join()
        y.double()
        raise AssertionError("not reached")
    assert caught.value.violation.kind == "unseen"


@pytest.mark.parametrize("view", [lambda t: t[0], lambda t: t.T[1:].unsqueeze(0)])
def test_a_write_from_another_thread_to_what_a_dead_view_was_of(view: Any) -> None:
    x = torch.zeros(3, 3)
    with pytest.raises(ToMutationError), ToMutationGuard():
        view(x).to("cpu")
        thread = threading.Thread(target=lambda: x.add_(1))
        thread.start()
        thread.join()


def test_a_write_where_modes_are_off_is_raised_on_leaving() -> None:
    from torch.utils._python_dispatch import _disable_current_modes

    x = torch.zeros(3)
    with pytest.raises(ToMutationError), ToMutationGuard():
        _y = x.to("cpu")
        with _disable_current_modes():
            x.add_(1)


def test_the_users_own_exceptions_pass_through_untouched() -> None:
    error = ValueError("mine")
    with pytest.raises(ValueError) as caught, ToMutationGuard():
        _ = torch.zeros(3).to("cpu")
        raise error
    assert caught.value is error
    assert error.__cause__ is None and error.__context__ is None


def test_keyboard_interrupt_is_not_replaced() -> None:
    with pytest.raises(KeyboardInterrupt), ToMutationGuard():
        try:
            violate(torch.zeros(3))
        except ToMutationError:
            pass
        raise KeyboardInterrupt


# ---- changes nothing else


@pytest.mark.parametrize("run", COMPILE.values(), ids=COMPILE)
def test_compiled_functions_compute_the_same_and_compile_again_afterwards(run: Run) -> None:
    class Model(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x.to("cpu") * 2).relu()

    x = torch.randn(4)
    with ToMutationGuard() as guard:
        guarded = run(Model(), (x,))
    assert guard.conversions == 1
    assert torch.equal(guarded, (x * 2).relu())
    assert torch.equal(run(Model(), (x,)), (x * 2).relu())


def test_a_function_compiled_before_is_seen_and_stays_compiled() -> None:
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, example: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(lambda x: violate(x) * 2, backend=backend, fullgraph=True)
    compiled(torch.zeros(3))
    assert len(graphs) == 1
    with pytest.raises(ToMutationError), ToMutationGuard():
        compiled(torch.zeros(3))
    compiled(torch.zeros(3))
    assert len(graphs) == 1

    fresh = torch.compile(lambda x: x * 3, backend=backend, fullgraph=True)
    with ToMutationGuard():
        fresh(torch.zeros(3))
    assert len(graphs) == 1
    fresh(torch.zeros(3))
    assert len(graphs) == 2


def test_fullgraph_still_complains_outside_the_guard() -> None:
    torch._dynamo.reset()
    with ToMutationGuard():
        pass
    with pytest.raises(Exception, match="break"):
        torch.compile(lambda x: (torch._dynamo.graph_break(), x + 1)[1], backend="eager", fullgraph=True)(torch.ones(2))


def test_other_threads_are_unaffected() -> None:
    seen: list[object] = []

    def work() -> None:
        seen.append(stacks())
        seen.append(violate(torch.zeros(3)).tolist())

    with ToMutationGuard() as guard:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert seen == [([], []), [5.0, 5.0, 5.0]]
    assert guard.conversions == 0


def test_leaving_in_another_thread_is_a_clear_error() -> None:
    guard = ToMutationGuard()
    guard.__enter__()
    errors: list[BaseException] = []

    def leave() -> None:
        try:
            guard.__exit__(None, None, None)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=leave)
    thread.start()
    thread.join()
    guard.__exit__(None, None, None)
    assert len(errors) == 1
    assert isinstance(errors[0], RuntimeError)
    assert "entered in another thread" in str(errors[0])


def test_one_guard_can_not_be_in_two_threads_at_once() -> None:
    errors: list[BaseException] = []
    with ToMutationGuard() as guard:

        def enter() -> None:
            try:
                guard.__enter__()
            except RuntimeError as error:
                errors.append(error)

        thread = threading.Thread(target=enter)
        thread.start()
        thread.join()
    assert len(errors) == 1


def test_a_storage_dies_under_the_guard_when_its_last_tensor_does() -> None:
    with ToMutationGuard():
        x = torch.zeros(3, dtype=torch.float64)
        y = x.float()
        references = [weakref.ref(x), weakref.ref(y)]
        storages = [x.untyped_storage()._weak_ref(), y.untyped_storage()._weak_ref()]
        del x, y
        assert [reference() for reference in references] == [None, None]
        assert all(torch.UntypedStorage._expired(storage) for storage in storages)


def test_a_new_storage_at_an_old_address_is_a_stranger() -> None:
    with ToMutationGuard() as guard:
        for _ in range(1000):
            x = torch.zeros(3)
            _ = x.to("cpu")
            del x, _
            torch.zeros(3).add_(1)
    assert guard.conversions == 1000


def test_memory_stays_flat_over_many_conversions() -> None:
    x = torch.zeros(3)
    sizes = []
    with ToMutationGuard() as guard:
        for _ in range(5):
            for _ in range(10_000):
                x.double()
                x.to("cpu")
            gc.collect()
            sizes.append(len(gc.get_objects()))
    assert guard.conversions == 100_000
    assert sizes[-1] - sizes[1] < 2000  # the ledger forgets in bunches; a leak would be of tens of thousands


def test_a_loop_of_conversions_makes_no_endless_chain() -> None:
    with pytest.raises(ToMutationError), ToMutationGuard():
        x = torch.zeros(3)
        for _ in range(5000):
            x = x.to("cpu")
        x.add_(1)


def test_leaving_forgets_everything() -> None:
    guard = ToMutationGuard()
    x = torch.zeros(3)
    with guard:
        y = x.to("cpu")
    y.add_(1)
    with guard:
        y.add_(1)
    assert guard.violations == [] and guard.conversions == 0


# ---- entering


def test_it_is_reusable_nestable_and_reentrant() -> None:
    guard = ToMutationGuard(on_violation="record")
    for _ in range(2):
        with guard:
            violate(torch.zeros(3))
        assert len(guard.violations) == 1 and guard.conversions == 1
    with guard, guard:
        x = torch.zeros(3)
        with guard:
            y = x.to("cpu")
        y.add_(1)
    assert len(guard.violations) == 1 and guard.conversions == 1


def test_nested_guards_both_see() -> None:
    with ToMutationGuard(on_violation="record") as outer, ToMutationGuard(on_violation="record") as inner:
        violate(torch.zeros(3))
    assert len(outer.violations) == len(inner.violations) == 1
    assert outer.conversions == inner.conversions == 1


def test_an_inner_guard_does_not_hide_a_write_from_the_outer_one() -> None:
    with ToMutationGuard(on_violation="record") as outer:
        x = torch.zeros(3)
        y = x.to("cpu")
        with ToMutationGuard() as inner:
            y.add_(1)
    assert len(outer.violations) == 1 and inner.violations == []


def test_a_decorated_call_does_not_hide_what_it_does_from_the_outer_guard() -> None:
    @ToMutationGuard()
    def convert(x: torch.Tensor) -> torch.Tensor:
        return x.to("cpu")

    with pytest.raises(ToMutationError), ToMutationGuard():
        convert(torch.zeros(3)).add_(1)


@pytest.mark.parametrize("way", ["warn", "record"])
def test_warn_and_record_run_on(way: Any) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with ToMutationGuard(on_violation=way) as guard:
            result = violate(torch.zeros(3))
            result.mul_(2)
    assert torch.equal(result, torch.full((3,), 10.0))
    assert [violation.op for violation in guard.violations] == ["aten.add_.Tensor", "aten.mul_.Tensor"]
    if way == "record":
        assert caught == []
    else:
        assert [w.category for w in caught] == [ToMutationWarning] * 2
        assert caught[0].filename == __file__
        assert caught[0].lineno == violate.__code__.co_firstlineno + 2


def test_a_warning_turned_to_an_error_is_raised_before_the_write() -> None:
    x = torch.zeros(3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(ToMutationWarning), ToMutationGuard(on_violation="warn"):
            violate(x)
    assert torch.equal(x, torch.zeros(3))


@pytest.mark.parametrize("strict", [False, True])
def test_record_changes_nothing_in_a_violating_export(strict: bool) -> None:
    model, args = MutateResultReadSource(), (torch.randn(3),)
    plain = torch.export.export(model, args, strict=strict)
    with ToMutationGuard(on_violation="record") as guard:
        guarded = torch.export.export(model, args, strict=strict)
    assert str(plain) == str(guarded)
    assert [violation.op for violation in guard.violations] == ["aten.add_.Tensor"]
    assert guard.conversions == 1


@pytest.mark.parametrize(
    "options, error, words",
    [
        ({"policy": "all"}, ValueError, "policy must be one of 'any', 'observable', not 'all'"),
        ({"on_violation": "ignore"}, ValueError, "on_violation must be one of 'raise', 'warn', 'record'"),
        ({"when": 3}, ValueError, "when must be one of 'always', 'tracing', not 3"),
        ({"policy": "observable"}, NotImplementedError, 'policy="observable" is not there yet'),
        ({"polcy": "any"}, TypeError, "polcy"),
    ],
)
def test_bad_arguments_say_which_and_what_is_allowed(options: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        ToMutationGuard(**options)


# ---- when="tracing"


def test_tracing_only_leaves_eager_alone() -> None:
    with ToMutationGuard(when="tracing") as guard:
        violate(torch.zeros(3))
    assert guard.conversions == 0


@pytest.mark.parametrize("way", [way for way in ALL if way.startswith(("export", "draft", "make_fx", "compile"))])
def test_tracing_only_guards_every_tracer(way: str) -> None:
    if way.startswith("make_fx_real"):
        pass
    with pytest.raises(ToMutationError), ToMutationGuard(when="tracing"):
        ALL[way](MutateResultReadSource(), (torch.randn(3),))


def test_tracing_only_guards_fake_tensors() -> None:
    with pytest.raises(ToMutationError), ToMutationGuard(when="tracing"), FakeTensorMode():
        violate(torch.zeros(3))


# ---- records


def test_records_are_frozen_picklable_and_hold_no_tensor() -> None:
    with ToMutationGuard(on_violation="record") as guard:
        x = torch.zeros(3, 4)
        other = torch.zeros(1)
        y = x.to(other, non_blocking=True)
        y.add_(5)
    (violation,) = guard.violations
    assert pickle.loads(pickle.dumps(violation)) == violation
    error = ToMutationError(violation)
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is ToMutationError and again.violation == violation and str(again) == str(error)
    with pytest.raises(AttributeError):
        violation.op = "x"  # type: ignore[misc]
    reference = weakref.ref(other)
    del other
    assert reference() is None
    assert violation.op == "aten.add_.Tensor"
    assert violation.argument == "self"
    assert violation.role == "result"
    assert violation.version == 0
    assert violation.module == ""
    conversion = violation.conversion
    assert conversion.call == "Tensor.to"
    assert "non_blocking=True" in conversion.arguments
    assert conversion.copied is False
    assert conversion.source == conversion.result
    assert conversion.source.dtype is torch.float32
    assert conversion.source.device == torch.device("cpu")
    assert conversion.source.shape == (3, 4)
    assert isinstance(conversion.site, Site)
    assert conversion.site.filename == __file__
    assert conversion.site.line.strip() == "y = x.to(other, non_blocking=True)"
    assert conversion.site.function.endswith("test_records_are_frozen_picklable_and_hold_no_tensor")


def test_the_module_path_is_from_the_root() -> None:
    class Bad(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return violate(x)

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attn = nn.Sequential(nn.Identity(), Bad())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.attn(x)

    model = nn.ModuleDict({"layers": nn.ModuleList([Block(), Block()])})
    model.forward = lambda x: model["layers"][1](x)  # type: ignore[method-assign]
    for way in ("eager", "export"):
        with pytest.raises(ToMutationError) as caught, ToMutationGuard():
            ALL[way](model, (torch.zeros(3),))
        assert caught.value.violation.module == "layers.1.attn.1", way
        assert caught.value.violation.conversion.module == "layers.1.attn.1", way

    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([Block(), Block()])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers[1](x)

    for way in ("eager", "export", "export_strict", "compile_aot_eager"):
        with pytest.raises(ToMutationError) as caught, ToMutationGuard():
            ALL[way](Root(), (torch.zeros(3),))
        assert caught.value.violation.module == "layers.1.attn.1", way
        assert caught.value.violation.conversion.module == "layers.1.attn.1", way


# ---- allow_mutation


@pytest.mark.parametrize("way", ALL)
def test_allowed_writes_are_let_through_and_recorded(way: str) -> None:
    class Model(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x.to("cpu")
            with allow_mutation("x is not used again"):
                y.add_(5)
            return y.sin()

    with ToMutationGuard() as guard:
        ALL[way](Model(), (torch.zeros(3),))
    assert {violation.allowed for violation in guard.violations} == {"x is not used again"}


@pytest.mark.parametrize("way", ALL)
def test_what_follows_an_allowed_write_is_not_allowed(way: str) -> None:
    class Model(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x.to("cpu")
            with allow_mutation("x is not used again"):
                y.add_(5)
            y.mul_(2)
            return y.sin()

    with pytest.raises(ToMutationError) as caught, ToMutationGuard():
        ALL[way](Model(), (torch.zeros(3),))
    assert caught.value.violation.op.startswith("aten.mul_")


def test_allow_mutation_as_a_decorator() -> None:
    @allow_mutation("on purpose")
    def allowed(x: torch.Tensor) -> torch.Tensor:
        return violate(x)

    with ToMutationGuard() as guard:
        allowed(torch.zeros(3))
    assert [violation.allowed for violation in guard.violations] == ["on purpose"]


def test_allow_mutation_wants_a_reason() -> None:
    with pytest.raises(TypeError):
        allow_mutation()  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="reason"):
        allow_mutation(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="reason"):
        allow_mutation("  ")


def test_allow_mutation_holds_for_its_own_thread_only() -> None:
    errors: list[BaseException] = []

    def work() -> None:
        try:
            with ToMutationGuard():
                violate(torch.zeros(3))
        except ToMutationError as error:
            errors.append(error)

    with allow_mutation("here"):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert len(errors) == 1


# ---- composes


def debug_mode() -> Any:
    from torch.utils._debug_mode import DebugMode

    return DebugMode()


OTHERS: dict[str, Callable[[], Any]] = {
    "flops": lambda: FlopCounterMode(display=False),
    "debug": debug_mode,
    "fake": lambda: FakeTensorMode(allow_non_fake_inputs=True),
    "autocast": lambda: torch.autocast("cpu"),
    "guard": lambda: ToMutationGuard(),
    "device": lambda: torch.device("cpu"),
    "saved_tensors": lambda: torch.autograd.graph.allow_mutation_on_saved_tensors(),
}


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("order", ["inside", "outside"])
def test_composes_with_other_modes(other: str, order: str) -> None:
    def contexts() -> list[Any]:
        both = [OTHERS[other](), ToMutationGuard()]
        return both if order == "inside" else both[::-1]

    linear = nn.Linear(3, 3)
    first, second = contexts()
    with first, second:
        linear(torch.zeros(2, 3)).to("cpu")
    first, second = contexts()
    with pytest.raises(ToMutationError), first, second:
        violate(torch.zeros(3))


def test_autocast_tags_nothing() -> None:
    linear = nn.Linear(3, 3)
    with ToMutationGuard() as guard, torch.autocast("cpu"):
        linear(torch.zeros(2, 3))
        linear.weight.data.zero_()
    assert guard.conversions == 0


def test_deepcopy_and_pickle_of_a_guard() -> None:
    guard = ToMutationGuard(on_violation="record")
    for again in (copy.deepcopy(guard), pickle.loads(pickle.dumps(guard))):
        with again:
            violate(torch.zeros(3))
        assert len(again.violations) == 1


def test_make_fx_graphs_are_the_same() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        y = x.float().to("cpu").double()
        return (y + 1).mul_(2)

    for mode in ("real", "fake", "symbolic"):
        for pre_dispatch in (False, True):
            plain = make_fx(program, tracing_mode=mode, pre_dispatch=pre_dispatch)(torch.zeros(3))
            with ToMutationGuard() as guard:
                guarded = make_fx(program, tracing_mode=mode, pre_dispatch=pre_dispatch)(torch.zeros(3))
            assert plain.code == guarded.code
            assert guard.conversions == 3


def test_violation_type() -> None:
    with pytest.raises(RuntimeError) as caught, ToMutationGuard():
        violate(torch.zeros(3))
    assert isinstance(caught.value, ToMutationError)
    assert isinstance(caught.value.violation, Violation)


def test_tracing_only_takes_fake_tensors_whose_mode_is_off() -> None:
    with FakeTensorMode():
        fake = torch.ones(3)
    with pytest.raises(ToMutationError), ToMutationGuard(when="tracing"):
        fake.to("cpu").add_(1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_parameter_may_be_put_back_converted(dtype: torch.dtype) -> None:
    linear = nn.Linear(2, 2)
    with ToMutationGuard():
        for parameter in linear.parameters():
            parameter.data = parameter.data.to(dtype)
    assert linear.weight.dtype == dtype
    with pytest.raises(ToMutationError), ToMutationGuard():
        linear.weight.to(torch.float32)
        linear.weight.data = torch.zeros(2, 2)
