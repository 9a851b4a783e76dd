"""The reasons for which writes are let through: a stack for each thread, and nothing else is kept here.

What a guard has learned under a reason (lines it let through, nodes of Dynamo's graph) belongs to that guard.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Generator
from typing import Any, TypeVar

import torch
from typing_extensions import ParamSpec

from . import _compat

P = ParamSpec("P")
R = TypeVar("R")


class _Entry:
    """A reason in force, and how many nodes the graph had, where Dynamo is tracing."""

    __slots__ = ("nodes", "reason")

    def __init__(self, reason: str, nodes: int = 0) -> None:
        self.reason = reason
        self.nodes = nodes


class _Stack(threading.local):
    """The reasons in force on this thread, innermost last."""

    def __init__(self) -> None:
        self.entries: list[_Entry] = []

    def remove(self, entry: _Entry) -> None:
        """Take ``entry`` off, wherever it is: generators may leave in another order than they entered."""
        self.entries = [other for other in self.entries if other is not entry]


_stack = _Stack()


def reason_in_force() -> str | None:
    """The innermost reason that :class:`allow_mutation` was given on this thread, ``None`` outside of any.

    Example:
        >>> from dispatch_guard.allowances import allow_mutation, reason_in_force
        >>> with allow_mutation("it is our own"):
        ...     reason_in_force()
        'it is our own'
    """
    return _stack.entries[-1].reason if _stack.entries else None


class allow_mutation:  # reads as a function, as torch.no_grad does
    """Let writes to converted tensors through, for a stated reason; they are recorded as allowed.

    A context manager, and a decorator of functions and of generator functions, whose reason holds while their body
    runs and not between.

    Args:
        reason: why the write is safe.

    Raises:
        TypeError: when ``reason`` is not a string, and for a coroutine function or an asynchronous generator to
            decorate.
        ValueError: when it is empty.

    Example:
        >>> import torch
        >>> from dispatch_guard import ToMutationGuard, allow_mutation
        >>> x = torch.zeros(2)
        >>> with ToMutationGuard() as guard:
        ...     y = x.float()
        ...     with allow_mutation("x is not used again"):
        ...         _ = y.add_(5)
        >>> [v.allowed for v in guard.violations]
        ['x is not used again']
    """

    def __init__(self, reason: str) -> None:
        if not isinstance(reason, str):
            raise TypeError(f"allow_mutation takes the reason, a string, not {reason!r}")
        if not reason.strip():
            raise ValueError("allow_mutation needs a reason: say why the write is safe")
        self.reason = reason
        self._entered: list[_Entry] = []  # the same object may be entered again inside itself

    def __call__(self, fn: Callable[P, R]) -> Callable[P, R]:
        """Let the writes of each call of ``fn`` through."""
        reason = self.reason
        if inspect.iscoroutinefunction(fn) or inspect.isasyncgenfunction(fn):
            raise TypeError(
                f"allow_mutation() cannot decorate the coroutine function {fn.__qualname__}: other code runs between "
                "its pieces; allow the write itself instead"
            )
        if inspect.isgeneratorfunction(fn):
            return functools.wraps(fn)(functools.partial(_allowing_generator, fn, reason))

        @functools.wraps(fn)
        def allowing(*args: P.args, **kwargs: P.kwargs) -> R:
            with allow_mutation(reason):  # Dynamo takes only those that the traced code makes itself
                return fn(*args, **kwargs)

        return allowing

    def __enter__(self) -> None:
        if torch.compiler.is_dynamo_compiling():
            reason = self.reason  # noqa: F841  # _start_in_dynamo reads it
            torch._dynamo.comptime.comptime(_start_in_dynamo)
        else:
            entry = _Entry(self.reason)
            self._entered.append(entry)
            _stack.entries.append(entry)

    def __exit__(self, *exc_info: object) -> None:
        if torch.compiler.is_dynamo_compiling():
            torch._dynamo.comptime.comptime(_stop_in_dynamo)
        else:
            _stack.remove(self._entered.pop())


def _allowing_generator(fn: Callable[..., Generator[Any, Any, Any]], reason: str, *args: Any, **kwargs: Any) -> Any:
    """Run the generator ``fn(...)`` with ``reason`` in force in its body only, as torch.no_grad() runs one."""
    body = fn(*args, **kwargs)
    resume: Callable[[], Any] = functools.partial(next, body)
    while True:
        try:
            with allow_mutation(reason):
                value = resume()
        except StopIteration as stop:
            return stop.value
        try:
            resume = functools.partial(body.send, (yield value))
        except GeneratorExit:
            with allow_mutation(reason):
                body.close()
            raise
        except BaseException as error:
            resume = functools.partial(body.throw, error)


# ---- under Dynamo: its callbacks run while it traces


def _start_in_dynamo(context: Any) -> None:
    output = _compat.dynamo_output(context)
    entry = _Entry(context.get_local("reason").as_python_constant(), len(output.graph.nodes))
    _stack.entries.append(entry)
    output.add_cleanup_hook(lambda: _stack.remove(entry))  # where Dynamo gives up or starts over


def _stop_in_dynamo(context: Any) -> None:
    entry = _stack.entries.pop()
    output = _compat.dynamo_output(context)
    for node in list(output.graph.nodes)[entry.nodes :]:
        _compat.note_node(output, node, "allowed", entry.reason)
        _compat.note_body(output, node, "allowed", entry.reason)


allow_mutation.__module__ = "dispatch_guard"
