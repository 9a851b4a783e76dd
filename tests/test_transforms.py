"""Transforms of programs, backward passes, and operators of the user's own."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functionalize, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.checkpoint import checkpoint
from ways import ALL, TORCH

from dispatch_guard import ToMutationError, ToMutationGuard

Tensor = torch.Tensor
Program = Callable[[Tensor], Tensor]
X = torch.ones(3, 4)


def bad(x: Tensor) -> Tensor:
    z = x.clone()
    y = z.to("cpu")
    y.add_(1)
    return z.sin()


def good(x: Tensor) -> Tensor:
    y = x.to("cpu") + 1
    y.mul_(2)
    return y.sin()


def total(f: Program) -> Program:
    return lambda x: f(x).sum()


@pytest.fixture(autouse=True)
def hooks_of_checkpoints_are_gone() -> Iterator[None]:
    """Up to torch 2.12 a checkpoint left by an exception has its hooks on until the traceback is collected."""
    yield
    if TORCH < (2, 13):
        gc.collect()


TRANSFORMS: dict[str, Callable[[Program], Any]] = {
    "vmap": lambda f: vmap(f)(X),
    "vmap of vmap": lambda f: vmap(vmap(f))(X),
    "vmap in chunks": lambda f: vmap(f, chunk_size=2)(X),
    "grad": lambda f: grad(total(f))(X),
    "vjp": lambda f: vjp(f, X)[1](X),
    "jvp": lambda f: jvp(f, (X,), (X,)),
    "jacrev": lambda f: jacrev(f)(X[0]),
    "jacfwd": lambda f: jacfwd(f)(X[0]),
    "hessian": lambda f: hessian(total(f))(X[0]),
    "vmap of grad": lambda f: vmap(grad(total(f)))(X),
    "grad of vmap": lambda f: grad(lambda x: vmap(f)(x).sum())(X),
    "functionalize": lambda f: functionalize(f)(X),
    "checkpoint": lambda f: checkpoint(f, X.clone().requires_grad_(), use_reentrant=False).sum().backward(),
    "reentrant checkpoint": lambda f: checkpoint(f, X.clone().requires_grad_(), use_reentrant=True).sum().backward(),
    "backward": lambda f: f(X.clone().requires_grad_()).sum().backward(),
    "graph break": lambda f: torch.compile(lambda x: (torch._dynamo.graph_break(), f(x))[1], backend="eager")(X),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_a_violation_in_a_transformed_function_raises(transform: str) -> None:
    with pytest.raises(ToMutationError) as caught, ToMutationGuard():
        TRANSFORMS[transform](bad)
    site = caught.value.violation.site
    assert site is not None and site.line.strip() == "y.add_(1)"


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_a_clean_transformed_function_computes_the_same(transform: str) -> None:
    plain = TRANSFORMS[transform](good)
    with ToMutationGuard() as guard:
        guarded = TRANSFORMS[transform](good)
    assert guard.conversions > 0 and guard.violations == []
    if plain is not None and transform != "vjp":
        torch.testing.assert_close(plain, guarded, rtol=0, atol=0)


def test_a_write_in_a_transform_to_a_tensor_converted_outside() -> None:
    with pytest.raises(ToMutationError), ToMutationGuard():
        y = torch.ones(3).to("cpu")
        vmap(lambda t: t.add_(1))(y)


def test_a_write_in_a_hook_to_a_tensor_converted_in_the_forward_pass() -> None:
    with pytest.raises(ToMutationError), ToMutationGuard():
        y = torch.ones(3).to("cpu")
        out = torch.ones(3, requires_grad=True) * 2
        out.register_hook(lambda g: y.add_(1))
        out.sum().backward()


def test_a_write_in_a_backward_pass_to_a_tensor_converted_in_the_forward_pass() -> None:
    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.buffer = x.detach().to("cpu")
            return x * 2

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            ctx.buffer.add_(1)
            return g

    for backward in (
        lambda y: y.sum().backward(),
        lambda y: torch.autograd.backward(y.sum()),
    ):
        with pytest.raises(ToMutationError), ToMutationGuard():
            backward(Function.apply(torch.ones(3, requires_grad=True)))


@pytest.mark.parametrize("how", ["Tensor.backward", "autograd.backward", "autograd.grad"])
@pytest.mark.parametrize("clean", [False, True])
def test_conversions_in_backward_hooks(how: str, clean: bool) -> None:
    def hook(g: Tensor) -> Tensor:
        converted = g.cos().to("cpu")
        return converted + 1 if clean else converted.add_(1)

    def run() -> Any:
        x = torch.ones(3, requires_grad=True)
        y = x * 2
        y.register_hook(hook)
        if how == "Tensor.backward":
            y.sum().backward(retain_graph=True)
            return x.grad
        if how == "autograd.backward":
            torch.autograd.backward([y.sum()])
            return x.grad
        return torch.autograd.grad(y.sum(), [x])[0]

    if clean:
        plain = run()
        with ToMutationGuard() as guard:
            guarded = run()
        assert guard.conversions == 1 and torch.equal(plain, guarded)
        return
    with pytest.raises(ToMutationError), ToMutationGuard():
        run()


# ---- operators of the user's own


@torch.library.custom_op("guard_tests::writes", mutates_args={"x"})
def writes(x: Tensor, others: list[Tensor]) -> None:
    x.add_(1)


@torch.library.custom_op("guard_tests::writes_list", mutates_args={"others"})
def writes_list(x: Tensor, others: list[Tensor]) -> None:
    others[0].add_(1)


@torch.library.custom_op("guard_tests::converts", mutates_args=())
def converts(x: Tensor, inside: bool) -> Tensor:
    y = x.clone().to("cpu")
    if inside:
        y.add_(1)
    return y.sin()


@converts.register_fake
def _(x: Tensor, inside: bool) -> Tensor:
    return torch.empty_like(x)


library = torch.library.Library("guard_tests_library", "DEF")
library.define("increment(Tensor(a!) x) -> ()")
library.impl("increment", lambda x: x.add_(1) and None, "CPU")
library.impl("increment", lambda x: None, "Meta")
library.define("composite(Tensor x) -> Tensor")
library.impl("composite", lambda x: x.clone().to("cpu").add_(1), "CompositeImplicitAutograd")


def test_what_a_custom_operator_says_it_mutates() -> None:
    x = torch.ones(2)
    for call, argument in (
        (lambda t: writes(t, [x]), "x"),
        (lambda t: writes_list(x, [x, t]), "others"),
        (lambda t: torch.ops.guard_tests_library.increment(t), "x"),
        (lambda t: torch.ops.guard_tests_library.increment.default(x=t), "x"),
    ):
        with pytest.raises(ToMutationError) as caught, ToMutationGuard():
            call(torch.ones(2).to("cpu"))
        assert caught.value.violation.argument == argument
    with ToMutationGuard() as guard:
        y = torch.ones(2).to("cpu")
        writes(torch.ones(2), [y])
        writes_list(y, [torch.ones(2)])
    assert guard.violations == []


@pytest.mark.parametrize("requires_grad", [False, True])
def test_inside_the_kernel_of_a_custom_operator(requires_grad: bool) -> None:
    x = torch.ones(2, requires_grad=requires_grad)
    expected = converts(x, False)
    with ToMutationGuard() as guard:
        assert torch.equal(converts(x, False), expected)
        assert converts(x, False).requires_grad == expected.requires_grad
    assert guard.conversions == 2
    with pytest.raises(ToMutationError), ToMutationGuard():
        converts(x, True)
    with pytest.raises(ToMutationError), ToMutationGuard():
        torch.ops.guard_tests_library.composite(x.detach())


@pytest.mark.parametrize("strict", [False, True])
def test_custom_operators_in_export(strict: bool) -> None:
    class Model(nn.Module):
        def __init__(self, bad: bool) -> None:
            super().__init__()
            self.bad = bad

        def forward(self, x: Tensor) -> Tensor:
            z = x.clone()
            y = z.to("cpu") if self.bad else z.to("cpu") + 1
            torch.ops.guard_tests_library.increment(y)
            return converts(y, True)

    plain = torch.export.export(Model(False), (torch.ones(2),), strict=strict)
    with ToMutationGuard() as guard:
        guarded = torch.export.export(Model(False), (torch.ones(2),), strict=strict)
        decomposed = guarded.run_decompositions()
    assert guard.violations == []
    assert str(plain.graph) == str(guarded.graph)
    assert str(plain.run_decompositions().graph) == str(decomposed.graph)  # with auto_functionalized operators
    with pytest.raises(ToMutationError), ToMutationGuard():
        torch.export.export(Model(True), (torch.ones(2),), strict=strict)


def test_attention() -> None:
    q = torch.randn(1, 1, 4, 8)
    with ToMutationGuard() as guard:
        F.scaled_dot_product_attention(q, q, q)
        flex_attention(q, q, q, score_mod=lambda score, b, h, i, j: score * 2)
    assert guard.violations == []
    with pytest.raises(ToMutationError), ToMutationGuard():
        flex_attention(q, q, q, score_mod=lambda score, b, h, i, j: score.clone().to("cpu").add_(1))


@pytest.mark.parametrize("below", [False, True])
def test_backward_hooks_where_another_function_mode_is_on(below: bool) -> None:
    def run() -> None:
        z = torch.ones(3, requires_grad=True) * 2

        def hook(grad: Tensor) -> Tensor:
            converted = grad.to("cpu")
            return converted.mul_(2)

        z.register_hook(hook)
        z.sum().backward()

    with torch.device("cpu") if below else contextlib.nullcontext():
        with pytest.raises(ToMutationError), ToMutationGuard():
            with contextlib.nullcontext() if below else torch.device("cpu"):
                run()


@pytest.mark.parametrize("way", ["eager", "export", "export_strict"])
def test_callbacks_of_a_loss(way: str) -> None:
    def distance(a: Tensor, b: Tensor) -> Tensor:
        y = (a * 1).to("cpu")
        y.add_(1)
        return (y - b).pow(2).sum(-1)

    loss = nn.TripletMarginWithDistanceLoss(distance_function=distance)
    with pytest.raises(ToMutationError), ToMutationGuard():
        ALL[way](loss, (torch.ones(2, 3), torch.ones(2, 3), torch.zeros(2, 3)))


@pytest.mark.parametrize("below", [False, True])
def test_bodies_of_subclasses_and_composites_where_another_function_mode_is_on(below: bool) -> None:
    def bad(x: Tensor) -> Tensor:
        y = x.clone().to("cpu")
        return y.add_(1)

    class Subclass(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.sin:
                with torch._C.DisableTorchFunctionSubclass():
                    bad(args[0])
            return super().__torch_function__(func, types, args, kwargs or {})

    with torch.library._scoped_library("dispatch_guard_tests", "FRAGMENT") as library:
        library.define("composite(Tensor x) -> Tensor")
        library.impl("composite", bad, "CompositeImplicitAutograd")
        for run in (
            lambda: torch.sin(torch.ones(3).as_subclass(Subclass)),
            lambda: torch.ops.dispatch_guard_tests.composite(torch.ones(3)),
        ):
            with torch.device("cpu") if below else contextlib.nullcontext():
                with pytest.raises(ToMutationError), ToMutationGuard():
                    with contextlib.nullcontext() if below else torch.device("cpu"):
                        run()


HIDDEN_WRITES: dict[str, Callable[[Tensor], Any]] = {
    "method": lambda z: z.add_(1),
    "item": lambda z: z.__setitem__(0, 1),
    "out": lambda z: torch.sin(torch.ones(3), out=z),
    "outs": lambda z: torch.max(torch.ones(2, 3), 0, out=(z, torch.empty(3, dtype=torch.long))),
    "foreach": lambda z: torch._foreach_add_([z], 1),
    "inplace": lambda z: F.relu(z, inplace=True),
    "positional inplace": lambda z: F.relu(z, True),
    "module": nn.ReLU(inplace=True),
    "operator": lambda z: torch.ops.aten.add_(z, 1),
    "overload": lambda z: torch.ops.aten.add_.Tensor(z, 1),
    "statistics": lambda z: F.batch_norm(torch.rand(2, 3), z, torch.ones(3), training=True),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", HIDDEN_WRITES)
def test_writes_that_functionalize_makes_pure(name: str) -> None:
    def program(x: Tensor) -> Tensor:
        z = x * 1
        y = z.to("cpu")
        HIDDEN_WRITES[name](z)
        return y.sum()

    with pytest.raises(ToMutationError), ToMutationGuard():
        functionalize(program)(torch.ones(3))
    with ToMutationGuard(on_violation="record") as guard:
        functionalize(program)(torch.ones(3))
    assert len(guard.violations) == 1
    if name in ("method", "item", "inplace", "module", "operator"):
        for inside in (lambda: functionalize(grad(program))(X[0]), lambda: functionalize(vmap(program))(X)):
            with pytest.raises(ToMutationError), ToMutationGuard():
                inside()


def test_operators_of_the_user_run_as_without_the_guard() -> None:
    with torch.library._scoped_library("dispatch_guard_tests", "FRAGMENT") as library:
        library.define("product(Tensor x) -> Tensor")
        library.impl("product", lambda x: x @ x, "CompositeImplicitAutograd")
        library.define("kernel(Tensor x) -> Tensor")
        library.impl("kernel", lambda x: (x @ x).clone(), "CPU")
        library.define("ones(int n) -> Tensor")
        library.impl("ones", lambda n: torch.ones(n), "CompositeImplicitAutograd")
        ops = torch.ops.dispatch_guard_tests
        programs: list[Callable[[Tensor], Tensor]] = [
            lambda x: ops.product(x),
            lambda x: ops.kernel(x),
            lambda x: ops.kernel.default(x),
            lambda x: x + ops.ones(3),
        ]
        x = torch.full((3, 3), 1.01)
        for program in programs:
            for autocast in (False, True):
                with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                    plain = program(x)
                    with ToMutationGuard():
                        guarded = program(x)
                assert plain.dtype == guarded.dtype
                torch.testing.assert_close(plain, guarded, rtol=0, atol=0)

        class Program(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                with torch.autocast("cpu", torch.bfloat16):
                    return ops.product(x) + ops.ones(3)

        for strict in (False, True):
            unguarded = torch.export.export(Program(), (x,), strict=strict)
            with ToMutationGuard():
                program_under_guard = torch.export.export(Program(), (x,), strict=strict)
            assert str(unguarded.graph) == str(program_under_guard.graph)
