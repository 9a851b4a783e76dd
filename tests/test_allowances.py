"""What allow_mutation() lets through belongs to the guard that has seen it, and to no other."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from ways import stacks

from dispatch_guard import ToMutationError, ToMutationGuard, allow_mutation, check_program, divergence
from dispatch_guard.allowances import reason_in_force


class Allowed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = x.to("cpu")
        with allow_mutation("x is our own"):
            y.add_(1)
        return y * 2


class AllowedInHelper(nn.Module):
    def bump(self, y: Tensor) -> None:
        with allow_mutation("x is our own"):
            y.add_(1)

    def forward(self, x: Tensor) -> Tensor:
        y = x.to("cpu")
        self.bump(y)
        return y * 2


class HelperAllowed(nn.Module):
    def bump(self, y: Tensor) -> None:
        y.add_(1)

    def forward(self, x: Tensor) -> Tensor:
        y = x.to("cpu")
        with allow_mutation("x is our own"):
            self.bump(y)
        return y * 2


class InBranch(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        def yes(t: Tensor) -> Tensor:
            y = t.sin().to("cpu")
            return y.add_(1)

        with allow_mutation("it is made in there"):
            return torch.cond(x.sum() > 0, yes, torch.cos, (x,))


class BranchAllows(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        def yes(t: Tensor) -> Tensor:
            y = t.sin().to("cpu")
            with allow_mutation("it is made in there"):
                return y.add_(1)

        return torch.cond(x.sum() > 0, yes, torch.cos, (x,))


class HalfAllowed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = x.to("cpu")
        with allow_mutation("the first one"):
            y.add_(1)
        y.mul_(2)
        return y


@ToMutationGuard()
def decorated(x: Tensor) -> Tensor:
    return x + 1


def another_guard() -> None:
    with ToMutationGuard():
        torch.zeros(2).to("cpu")


def decorated_helper() -> None:
    decorated(torch.zeros(2))


def left_by_an_exception() -> None:
    with pytest.raises(KeyError), ToMutationGuard():
        raise KeyError


def query() -> None:
    with allow_mutation("of a query"):
        check_program(torch.export.export(Allowed(), example()))


def proof() -> None:
    divergence(Allowed(), example())


MEANWHILE: list[Callable[[], None]] = [another_guard, decorated_helper, left_by_an_exception, query, proof]
PROGRAMS = [Allowed, AllowedInHelper, HelperAllowed, InBranch, BranchAllows]


def example() -> tuple[Tensor]:
    return (torch.ones(3),)


@pytest.mark.parametrize("meanwhile", MEANWHILE)
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("program", PROGRAMS)
def test_what_was_let_through_stays_so_as_the_program_is_decomposed(
    program: type[nn.Module], strict: bool, meanwhile: Callable[[], None]
) -> None:
    with ToMutationGuard() as guard:
        exported = torch.export.export(program(), example(), strict=strict)
        meanwhile()
        exported.run_decompositions()
    assert {violation.allowed for violation in guard.violations} <= {"x is our own", "it is made in there"}
    assert guard.violations


@pytest.mark.parametrize("strict", [False, True])
def test_only_what_was_let_through_is(strict: bool) -> None:
    with ToMutationGuard(on_violation="record") as guard:
        torch.export.export(HalfAllowed(), example(), strict=strict).run_decompositions()
    verdicts = {(violation.op, violation.allowed) for violation in guard.violations}
    assert verdicts == {("aten.add_.Tensor", "the first one"), ("aten.mul_.Tensor", None)}


@pytest.mark.parametrize("strict", [False, True])
def test_another_guard_has_not_learned_it(strict: bool) -> None:
    with ToMutationGuard():
        exported = torch.export.export(Allowed(), example(), strict=strict)
    with pytest.raises(ToMutationError), ToMutationGuard():
        exported.run_decompositions()


def test_nor_has_the_same_guard_once_it_is_entered_anew() -> None:
    guard = ToMutationGuard()
    with guard:
        exported = torch.export.export(Allowed(), example())
    with pytest.raises(ToMutationError), guard:
        exported.run_decompositions()


@pytest.mark.parametrize("strict", [False, True])
def test_both_of_two_nested_guards_learn_it(strict: bool) -> None:
    with ToMutationGuard() as outer:
        with ToMutationGuard() as inner:
            exported = torch.export.export(Allowed(), example(), strict=strict)
            exported.run_decompositions()
        exported.run_decompositions()
    for guard in (outer, inner):
        assert {violation.allowed for violation in guard.violations} == {"x is our own"}


def test_a_guard_entered_twice_keeps_what_it_has_learned_until_it_is_left_for_good() -> None:
    guard = ToMutationGuard()
    with guard:
        with guard:
            exported = torch.export.export(Allowed(), example())
        exported.run_decompositions()
    assert {violation.allowed for violation in guard.violations} == {"x is our own"}


@pytest.mark.parametrize("strict", [False, True])
def test_a_query_neither_reads_nor_writes_the_reasons(strict: bool) -> None:
    exported = torch.export.export(Allowed(), example(), strict=strict)
    with allow_mutation("other"):
        assert [violation.allowed for violation in check_program(exported)] == [None]
        assert reason_in_force() == "other"
    assert [violation.allowed for violation in check_program(exported)] == [None]
    with pytest.raises(ToMutationError), ToMutationGuard():
        exported.run_decompositions()


def test_a_query_is_no_event_for_a_guard_around_it() -> None:
    exported = torch.export.export(Allowed(), example())
    with ToMutationGuard() as guard:
        assert len(check_program(exported)) == 1
    assert guard.conversions == 0 and guard.violations == []


class Sometimes(nn.Module):
    def __init__(self, allowed: bool) -> None:
        super().__init__()
        self.allowed = allowed

    def forward(self, x: Tensor) -> Tensor:
        y = x.to("cpu")
        with allow_mutation("this time") if self.allowed else contextlib.nullcontext():
            y.add_(1)
        return x.sin()


class BranchSometimes(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        def yes(t: Tensor) -> Tensor:
            y = t.sin().to("cpu")
            y.add_(1)
            return y

        z = x
        for allowed in (True, False):
            with allow_mutation("this time") if allowed else contextlib.nullcontext():
                z = z + torch.cond(x.sum() > 0, yes, torch.cos, (x,))
        return z


class OneHelperAllows(nn.Module):
    def allows(self, y: Tensor) -> None:
        with allow_mutation("in here"):
            y.add_(1)

    def does_not(self, y: Tensor) -> None:
        y.add_(1)

    def forward(self, x: Tensor) -> Tensor:
        y = x.to("cpu")
        for write in (self.allows, self.does_not):
            write(y)
        return y * 2


class Nested(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = x.to("cpu")
        with allow_mutation("outer"), allow_mutation("inner"):
            y.add_(1)
        return y * 2


@pytest.mark.parametrize("second", [False, True])
@pytest.mark.parametrize("first", [False, True])
def test_an_export_lets_nothing_through_in_the_next(first: bool, second: bool) -> None:
    with pytest.raises(ToMutationError), ToMutationGuard():
        torch.export.export(Sometimes(True), example(), strict=first)
        torch.export.export(Sometimes(False), example(), strict=second)


@pytest.mark.parametrize("strict", [False, True])
def test_a_body_that_is_let_through_once_is_not_the_next_time(strict: bool) -> None:
    with pytest.raises(ToMutationError), ToMutationGuard():
        torch.export.export(BranchSometimes(), example(), strict=strict)


def test_a_run_in_eager_mode_lets_nothing_through_in_a_graph() -> None:
    exported = torch.export.export(Sometimes(False), example())
    with pytest.raises(ToMutationError), ToMutationGuard():
        Sometimes(True)(*example())
        exported.run_decompositions()


@pytest.mark.parametrize("strict", [False, True])
def test_of_two_helpers_only_one_is_let_through(strict: bool) -> None:
    with ToMutationGuard(on_violation="record") as guard:
        exported = torch.export.export(OneHelperAllows(), example(), strict=strict)
        assert [violation.allowed for violation in guard.violations] == ["in here", None]
        del guard.violations[:]
        exported.run_decompositions()
    assert None in [violation.allowed for violation in guard.violations]


@pytest.mark.parametrize("strict", [False, True])
def test_the_innermost_reason_is_told(strict: bool) -> None:
    with ToMutationGuard() as guard:
        torch.export.export(Nested(), example(), strict=strict)
    assert [violation.allowed for violation in guard.violations] == ["inner"]


# ---- the stack of reasons


def write() -> None:
    x = torch.zeros(2)
    x.to("cpu").add_(1)


def test_a_generator_decorated_with_a_reason_has_it_in_its_body_only() -> None:
    @allow_mutation("of the generator")
    def steps() -> Iterator[int]:
        received = []
        try:
            for number in range(3):
                write()
                received.append((yield number))
        finally:
            write()
        return received  # type: ignore[return-value]

    with ToMutationGuard(on_violation="record") as guard:
        generator = steps()
        assert next(generator) == 0 and reason_in_force() is None
        write()
        assert generator.send("a") == 1  # type: ignore[attr-defined]
        generator.close()  # type: ignore[attr-defined]
        assert reason_in_force() is None
    reasons = [violation.allowed for violation in guard.violations]
    assert reasons == ["of the generator", None, "of the generator", "of the generator"]

    with ToMutationGuard() as guard:
        generator = steps()
        next(generator)
        with pytest.raises(ZeroDivisionError):
            generator.throw(ZeroDivisionError())  # type: ignore[attr-defined]
        generator = steps()
        with pytest.raises(StopIteration) as stopped:
            for _ in range(4):
                next(generator)
    assert stopped.value.value == [None, None, None] and reason_in_force() is None


def test_reasons_that_end_in_another_order_than_they_began() -> None:
    def steps() -> Iterator[None]:
        with allow_mutation("of the generator"):
            yield

    generator = steps()
    next(generator)
    with allow_mutation("around"):
        next(generator, None)
        assert reason_in_force() == "around"
    assert reason_in_force() is None


def test_one_object_entered_within_itself() -> None:
    allowing = allow_mutation("twice")
    with allowing:
        with allowing:
            assert reason_in_force() == "twice"
        assert reason_in_force() == "twice"
    assert reason_in_force() is None


def test_an_exception_ends_a_reason() -> None:
    with pytest.raises(KeyError), allow_mutation("until it fails"):
        raise KeyError
    assert reason_in_force() is None


def test_a_thread_has_reasons_of_its_own() -> None:
    seen = []
    with allow_mutation("here"):
        thread = threading.Thread(target=lambda: seen.append(reason_in_force()))
        thread.start()
        thread.join()
    assert seen == [None]


def test_coroutines_cannot_be_decorated() -> None:
    async def coroutine() -> None: ...

    async def generator() -> Iterator[None]:  # type: ignore[misc]
        yield

    for function in (coroutine, generator):
        with pytest.raises(TypeError, match="cannot decorate the coroutine function"):
            allow_mutation("why")(function)


# ---- guards that overlap


def test_a_guard_in_a_generator_may_be_left_before_one_entered_after_it() -> None:
    before = stacks()

    def steps() -> Iterator[ToMutationGuard]:
        with ToMutationGuard(on_violation="record") as guard:
            yield guard

    generator = steps()
    first = next(generator)
    with ToMutationGuard(on_violation="record") as second:
        write()
        next(generator, None)
        write()
    assert stacks() == before
    assert (len(first.violations), len(second.violations)) == (1, 2)


def test_guards_that_overlap_leave_torch_compile_as_it_was() -> None:
    first, second = ToMutationGuard(on_violation="record"), ToMutationGuard(on_violation="record")
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert torch.utils._python_dispatch.is_in_torch_dispatch_mode(include_infra_modes=False)
    compiled = torch.compile(lambda x: x.to("cpu").add_(1), backend="eager")
    torch._dynamo.reset()
    compiled(torch.zeros(2))
    second.__exit__(None, None, None)
    assert len(second.violations) == 1
    assert not torch.utils._python_dispatch.is_in_torch_dispatch_mode(include_infra_modes=False)

    counter = torch._dynamo.testing.CompileCounter()
    torch.compile(lambda x: x + 1, backend=counter)(torch.zeros(2))
    assert counter.frame_count == 1


def test_entering_that_fails_leaves_nothing_on(monkeypatch: pytest.MonkeyPatch) -> None:
    before = stacks()
    monkeypatch.setattr("dispatch_guard._compat.accept_uncompiled", lambda *_: 1 / 0)
    guard = ToMutationGuard()
    with pytest.raises(ZeroDivisionError), guard:
        pass
    assert stacks() == before
    monkeypatch.undo()
    with pytest.raises(ToMutationError), guard:
        write()
    assert stacks() == before


@pytest.mark.parametrize("kind", ["dispatch", "function"])
def test_a_guard_whose_mode_others_took_off_leaves_completely_with_one_error(kind: str) -> None:
    before = stacks()
    guard = ToMutationGuard()
    with pytest.raises(RuntimeError, match="was taken off the stack by other code"), guard:
        if kind == "dispatch":
            torch._C._pop_torch_dispatch_stack(None)
        else:
            torch._C._pop_torch_function_stack()
    assert stacks() == before
    with pytest.raises(ToMutationError), guard:
        write()


def test_a_guard_left_once_too_often_says_so() -> None:
    guard = ToMutationGuard()
    with guard:
        pass
    with pytest.raises(RuntimeError, match="has been left before"):
        guard.__exit__(None, None, None)
