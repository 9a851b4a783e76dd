"""The decorator: a fresh scope for each call, wherever the function runs."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from ways import ALL

from dispatch_guard import ToMutationError, ToMutationGuard, allow_mutation

Tensor = torch.Tensor


class Bad(nn.Module):
    @ToMutationGuard()
    def forward(self, x: Tensor) -> Tensor:
        y = x.to("cpu")
        y.add_(5)
        return x.sin()


class Good(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    @ToMutationGuard()
    def forward(self, x: Tensor) -> Tensor:
        y = x.to("cpu") + 5
        y.mul_(2)
        return self.linear(y)


class Inside(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.cos()) * 2


class Breaks(nn.Module):
    """Dynamo breaks its graph between the conversion and the write."""

    @ToMutationGuard()
    def forward(self, x: Tensor, bad: bool = True) -> Tensor:
        y = x.to("cpu")
        torch._dynamo.graph_break()
        if bad:
            y.add_(5)
        return x.sin()


class Child(Good):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 1


class BadChild(Bad):
    @ToMutationGuard()
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * 2)


@ToMutationGuard()
def function(x: Tensor, *, scale: float = 2.0) -> Tensor:
    """What it does."""
    return x.float() * scale


@pytest.mark.parametrize("way", ALL)
@pytest.mark.parametrize("make", [Bad, lambda: Inside(Bad()), BadChild], ids=["root", "inner", "super"])
def test_it_guards_in_every_way_of_running(make: Any, way: str) -> None:
    x = torch.zeros(3)
    with pytest.raises(ToMutationError) as caught:
        ALL[way](make(), (x,))
    assert torch.equal(x, torch.zeros(3))
    site = caught.value.violation.site
    assert site is not None and site.line.strip() == "y.add_(5)"
    assert type(caught.value).__name__ == "ToMutationError"
    assert type(pickle.loads(pickle.dumps(caught.value))) is ToMutationError


@pytest.mark.parametrize("way", ALL)
@pytest.mark.parametrize("make", [Good, lambda: Inside(Good()), Child], ids=["root", "inner", "super"])
def test_clean_functions_run_in_every_way(make: Any, way: str) -> None:
    ALL[way](make(), (torch.zeros(3),))


@pytest.mark.parametrize("strict", [False, True])
def test_the_exported_graph_is_that_of_the_bare_function(strict: bool) -> None:
    decorated = torch.export.export(Good(), (torch.zeros(3),), strict=strict)

    class Bare(Good):
        forward = Good.forward.__wrapped__  # type: ignore[attr-defined]

    bare = torch.export.export(Bare(), (torch.zeros(3),), strict=strict)
    assert decorated.graph_module.code == bare.graph_module.code
    assert str(decorated.graph_signature) == str(bare.graph_signature)
    assert [str(node.meta.get("val")) for node in decorated.graph.nodes] == [
        str(node.meta.get("val")) for node in bare.graph.nodes
    ]


@pytest.mark.parametrize("way", [way for way in ALL if way.startswith("compile") and "fullgraph" not in way])
def test_it_guards_across_graph_breaks(way: str) -> None:
    with pytest.raises(ToMutationError):
        ALL[way](Breaks(), (torch.zeros(3),))
    with pytest.raises(ToMutationError):
        ALL[way](Inside(Breaks()), (torch.zeros(3),))
    ALL[way](Inside(nn.Sequential(Good())), (torch.zeros(3),))


def test_a_clean_function_is_compiled_and_not_only_run() -> None:
    graphs = []

    def backend(graph: torch.fx.GraphModule, example: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(Good(), backend=backend)
    compiled(torch.zeros(3))
    compiled(torch.zeros(3))
    assert len(graphs) == 1


def test_each_call_has_a_scope_of_its_own() -> None:
    @ToMutationGuard()
    def convert(x: Tensor) -> Tensor:
        return x.to("cpu")

    @ToMutationGuard()
    def write(x: Tensor) -> Tensor:
        return x.add_(1)

    x = convert(torch.zeros(3))
    x.add_(1)
    assert torch.equal(write(x), torch.full((3,), 2.0))


def test_an_outer_call_sees_what_inner_calls_do() -> None:
    @ToMutationGuard()
    def recursive(x: Tensor, depth: int) -> Tensor:
        y = x.to("cpu")
        if depth:
            return recursive(y, depth - 1)
        return y * 2

    assert torch.equal(recursive(torch.ones(3), 5), torch.full((3,), 2.0))

    @ToMutationGuard()
    def recursive_write(x: Tensor, depth: int) -> Tensor:
        return recursive_write(x.to("cpu"), depth - 1) if depth else x.add_(1)

    with pytest.raises(ToMutationError):
        recursive_write(torch.ones(3), 1)
    recursive_write(torch.ones(3), 0)


def test_name_documentation_and_signature_are_kept() -> None:
    assert function.__name__ == "function"
    assert function.__doc__ == "What it does."
    assert list(inspect.signature(function).parameters) == ["x", "scale"]
    assert list(inspect.signature(Good.forward).parameters) == ["self", "x"]
    assert pickle.loads(pickle.dumps(function)) is function
    named = torch.export.export(Good(), (), {"x": torch.zeros(3)})
    assert named.module()(x=torch.zeros(3)).shape == (3,)


def test_modules_copy_pickle_and_save() -> None:
    module = Good()
    x = torch.zeros(3)
    buffer = io.BytesIO()
    torch.save(module, buffer)
    buffer.seek(0)
    for again in (
        copy.deepcopy(module),
        pickle.loads(pickle.dumps(module)),
        torch.load(buffer, weights_only=False),
    ):
        assert torch.equal(again(x), module(x))


def test_static_and_class_methods_in_either_order() -> None:
    class Holder:
        @staticmethod
        @ToMutationGuard()
        def one(x: Tensor) -> Tensor:
            return x.float().add_(1)

        @ToMutationGuard()
        @staticmethod
        def two(x: Tensor) -> Tensor:
            return x.float().add_(1)

        @classmethod
        @ToMutationGuard()
        def three(cls, x: Tensor) -> Tensor:
            return x.float().add_(1)

        @ToMutationGuard()
        @classmethod
        def four(cls, x: Tensor) -> Tensor:
            return x.float().add_(1)

    for call in (Holder.one, Holder.two, Holder.three, Holder.four, Holder().one, Holder().four):
        with pytest.raises(ToMutationError):
            call(torch.zeros(3))


def test_without_parentheses_it_says_to_write_them() -> None:
    with pytest.raises(TypeError, match=r"write @ToMutationGuard\(\)"):

        @ToMutationGuard
        def f(x: Tensor) -> Tensor:
            return x


def test_what_cannot_be_decorated_says_so() -> None:
    async def coroutine() -> None: ...

    def generator() -> Iterator[int]:
        yield 1

    async def async_generator() -> AsyncIterator[int]:
        yield 1

    for fn in (coroutine, generator, async_generator):
        with pytest.raises(TypeError, match=f"cannot decorate the generator or coroutine function .*{fn.__name__}"):
            ToMutationGuard()(fn)
    with pytest.raises(TypeError, match="decorate the module's forward"):
        ToMutationGuard()(nn.Linear(2, 2))
    with pytest.raises(TypeError, match="functions and methods"):
        ToMutationGuard()(nn.Linear)
    with pytest.raises(TypeError, match="functions and methods"):
        ToMutationGuard()(3)  # type: ignore[arg-type]


def test_the_guard_that_decorates_tells_of_the_last_call() -> None:
    guard = ToMutationGuard(on_violation="record")

    @guard
    def write(x: Tensor, times: int) -> Tensor:
        y = x.to("cpu")
        for _ in range(times):
            y.add_(1)
        return y

    write(torch.zeros(3), 2)
    assert len(guard.violations) == 2 and guard.conversions == 1
    write(torch.zeros(3), 0)
    assert guard.violations == [] and guard.conversions == 1


def test_tracing_only_costs_nothing_in_eager_and_guards_tracing() -> None:
    guard = ToMutationGuard(when="tracing")

    class Model(nn.Module):
        @guard
        def forward(self, x: Tensor) -> Tensor:
            y = x.to("cpu")
            y.add_(5)
            return x.sin()

    Model()(torch.zeros(3))
    assert guard.conversions == 0
    for way in [way for way in ALL if way.startswith(("export", "draft", "make_fx", "compile"))]:
        with pytest.raises(ToMutationError):
            ALL[way](Model(), (torch.zeros(3),))


@pytest.mark.parametrize("way", ["eager", "export", "export_strict", "compile_eager_fullgraph"])
def test_under_an_outer_guard(way: str) -> None:
    with ToMutationGuard() as guard:
        ALL[way](Inside(Good()), (torch.zeros(3),))
    assert guard.conversions == 1
    with pytest.raises(ToMutationError), ToMutationGuard():
        ALL[way](Inside(Bad()), (torch.zeros(3),))


@pytest.mark.parametrize("way", ["eager", "export", "export_strict", "compile_eager_fullgraph"])
def test_allowed_inside(way: str) -> None:
    class Model(nn.Module):
        @ToMutationGuard()
        def forward(self, x: Tensor) -> Tensor:
            y = x.to("cpu")
            with allow_mutation("on purpose"):
                y.add_(5)
            return x.sin()

    ALL[way](Model(), (torch.zeros(3),))
    with ToMutationGuard():
        ALL[way](Model(), (torch.zeros(3),))


def test_many_threads_at_once() -> None:
    results: list[object] = []

    def work() -> None:
        for _ in range(20):
            results.append(function(torch.ones(3)).tolist())
            try:
                Bad()(torch.zeros(3))
            except ToMutationError:
                results.append("raised")

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results.count("raised") == 80 and len(results) == 160


def test_a_users_exception_in_a_traced_function_leaves_no_mode() -> None:
    class Model(nn.Module):
        @ToMutationGuard()
        def forward(self, x: Tensor) -> Tensor:
            x.to("cpu")
            raise ValueError("mine")

    for way in ("eager", "export", "make_fx_fake"):
        with pytest.raises(ValueError, match="mine"):
            ALL[way](Model(), (torch.zeros(3),))
    for way in ("export_strict", "compile_eager", "compile_eager_fullgraph"):
        with pytest.raises(Exception, match="mine"):
            ALL[way](Model(), (torch.zeros(3),))


class Allowing(nn.Module):
    def __init__(self, *allowed: bool) -> None:
        super().__init__()
        self.allowed = allowed

    def forward(self, x: Tensor) -> Tensor:
        y = (x * 1).float()
        for allowed in self.allowed:
            with allow_mutation("y is private") if allowed else torch.no_grad():
                y.add_(1)
        return y


@pytest.mark.parametrize("strict", [False, True])
def test_a_write_allowed_once_is_not_allowed_again(strict: bool) -> None:
    with ToMutationGuard() as guard:
        torch.export.export(Allowing(True, True), (torch.ones(3),), strict=strict)
    assert [violation.allowed for violation in guard.violations] == ["y is private"] * 2
    torch.export.export(Allowing(True), (torch.ones(3),), strict=strict)  # without a guard
    for allowed in ((True, False), (False,)):
        torch._dynamo.reset()
        with pytest.raises(ToMutationError), ToMutationGuard():
            torch.export.export(Allowing(*allowed), (torch.ones(3),), strict=strict)


@pytest.mark.parametrize("strict", [False, True])
def test_a_function_that_may_write(strict: bool) -> None:
    class Program(nn.Module):
        @allow_mutation("y is private")
        def write(self, y: Tensor) -> None:
            y.add_(1)

        def forward(self, x: Tensor) -> Tensor:
            y = (x * 1).float()
            self.write(y)
            return y

    with ToMutationGuard() as guard:
        torch.export.export(Program(), (torch.ones(3),), strict=strict)
    assert [violation.allowed for violation in guard.violations] == ["y is private"]
    torch.testing.assert_close(
        torch.compile(Program(), backend="eager", fullgraph=True)(torch.ones(3)), torch.ones(3) + 1
    )


@pytest.mark.parametrize("strict", [False, True])
def test_an_allowed_write_stays_allowed_as_the_program_is_decomposed(strict: bool) -> None:
    with ToMutationGuard() as guard:
        torch.export.export(Allowing(True), (torch.ones(3),), strict=strict).run_decompositions()
    assert {violation.allowed for violation in guard.violations} == {"y is private"}
