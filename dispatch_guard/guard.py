"""The guard: joins conversions, ledger and mutations, and decides whether to raise, warn or record."""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from types import CodeType, FrameType, FunctionType, MethodType, TracebackType
from typing import Any, Final, Literal, TypeVar, get_args

import torch
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import ParamSpec, Self

from . import _compat
from .allowances import reason_in_force
from .conversions import ConversionMode, Side, Tag, is_again, is_internal_call, meta_of, source_of
from .ledger import Ledger, Watch
from .mutations import DETACH, has_user_kernel, is_plain, rebinds, written_arguments
from .report import advice, report, role_of
from .sites import Frames, Place, frames_here, frames_of_trace, here, inplace_module, is_among, module_path
from .source import call_at, write_at
from .storages import keys_of, lives_of, same_geometry
from .violations import Conversion, Kind, Role, TensorMeta, ToMutationError, ToMutationWarning, Violation

P = ParamSpec("P")
R = TypeVar("R")

Policy = Literal["any", "observable"]
OnViolation = Literal["raise", "warn", "record"]
When = Literal["always", "tracing"]
Format = Literal["text", "json", "sarif", "github"]
_POLICIES, _ON_VIOLATION, _WHEN = map(get_args, (Policy, OnViolation, When))

_log = logging.getLogger("dispatch_guard")


class ToMutationGuard(TorchDispatchMode):
    """Raises at any in-place write to a tensor that has been through ``to()``.

    ``Tensor.to()`` returns the same tensor when nothing has to change and a copy when something does, so a write after
    it means different things on different devices and dtypes; an exported program keeps only one meaning.  Inside the
    guard, a write to the result of a conversion, to its source, or to anything that shares storage with either raises
    before it runs.

    Use it around an export or a call, or as a decorator (``@ToMutationGuard()``), which guards each call by itself,
    also where Dynamo traces it (``torch.export.export(..., strict=True)``, ``torch.compile(..., fullgraph=True)``).

    Args:
        policy: ``"any"`` reports every such write.
        on_violation: ``"raise"`` raises :class:`ToMutationError`; ``"warn"`` issues a :class:`ToMutationWarning` at the
            user's line; ``"record"`` only keeps it in :attr:`violations`.
        when: ``"tracing"`` makes the guard active only under export, compile, make_fx or fake tensors (a decorated
            method: among its arguments, or under their mode).

    Raises:
        TypeError: for positional arguments, as when the decorator is written without parentheses.
        ValueError: for a value that is not listed above.
        NotImplementedError: for ``policy="observable"``.

    Attributes:
        violations: the :class:`Violation` records since the guard was last entered, allowed ones included.
        conversions: how many conversions were seen since then.

    Example:
        >>> import torch
        >>> from dispatch_guard import ToMutationGuard
        >>> x = torch.zeros(2)
        >>> with ToMutationGuard(on_violation="record") as guard:
        ...     y = x.to("cpu")
        ...     _ = y.add_(5)
        >>> guard.conversions, [v.op for v in guard.violations]
        (1, ['aten.add_.Tensor'])
    """

    # Without this torch refuses to run cond, while_loop and their like under the mode (torch/_ops.py, since 2.7).
    supports_higher_order_operators = True

    def __init__(
        self,
        /,
        *misplaced: Any,
        policy: Policy = "any",
        on_violation: OnViolation = "raise",
        when: When = "always",
    ) -> None:
        if misplaced:
            raise TypeError(
                "ToMutationGuard takes no positional arguments; to decorate, write @ToMutationGuard() with parentheses"
            )
        _check_choice("policy", policy, _POLICIES)
        _check_choice("on_violation", on_violation, _ON_VIOLATION)
        _check_choice("when", when, _WHEN)
        if policy == "observable":
            raise NotImplementedError('policy="observable" is not there yet; use policy="any"')
        super().__init__()
        self.policy = policy
        self.on_violation = on_violation
        self.when = when
        self.violations: list[Violation] = []
        self.conversions = 0
        self._ledger: Ledger[Side] = Ledger()
        self._error: ToMutationError | None = None  # raised once, and raised again on leaving if it got lost
        self._nodes: dict[tuple[str, str], dict[str, Any]] = {}  # what is known of those that Dynamo has made
        self._noted_output: weakref.ref[Any] | None = None  # Dynamo's, that makes their graph
        self._noted_graph: weakref.ref[Any] | None = None  # that graph, once it runs
        self._learned: dict[tuple[str, Frames], str | None] = {}  # reasons by operator and frames: graphs are run later
        self._function_mode: ConversionMode | None = None
        self._leaving = contextlib.ExitStack()  # takes off all that entering has put on
        self._autocast: Any = None  # what it was as a user's operator was called
        self._inside = 0  # how many of our dispatch handlers are running: conversions in there are torch's own
        self._depth = 0
        self._thread = 0
        self._logging = False
        self._left_uncompiled: set[CodeType] = set()
        self._deferred = False  # under Dynamo's own tracing violations are told at the end: see _dynamo_callbacks

    # ---- entering and leaving

    def __enter__(self) -> Self:
        if self._depth:
            self._check_thread("entered")
            self._depth += 1
            return self
        self.violations = []
        self.conversions = 0
        self._ledger = Ledger()
        self._error = None
        self._inside = 0
        self._logging = _log.isEnabledFor(logging.DEBUG)
        self._thread = threading.get_ident()
        function_mode = ConversionMode(
            self._on_conversion,
            self._on_alias,
            self._on_bodies,
            self._on_kernel,
            self._on_subclasses,
            self._on_write,
            self._on_functionalized,
        )
        with contextlib.ExitStack() as entering:
            entering.push(functools.partial(_unwind, _compat.remembered_state()))
            _compat.process_flags.enter()
            entering.callback(_compat.process_flags.leave)
            super().__enter__()
            entering.push(self._take_off)
            function_mode.__enter__()
            entering.push(functools.partial(_take_off_function_mode, function_mode))
            entering.callback(self._compile_again)
            entering.callback(_compat.accept_uncompiled, _compat.accept_uncompiled())
            self._leaving = entering.pop_all()
        self._function_mode = function_mode
        self._depth = 1
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._check_thread("left")
        if not self._depth:
            raise RuntimeError("this ToMutationGuard has been left before")
        self._depth -= 1
        if self._depth:
            return
        problem: RuntimeError | None = None
        try:
            self._leaving.__exit__(exc_type, exc, traceback)
        except RuntimeError as others_doing:
            problem = others_doing
        self._function_mode = None
        error = self._conclude(exc)
        if error is not None and exc is not error and (exc is None or isinstance(exc, Exception)):
            raise error from (None if _arose_from(exc, error) else exc)
        if problem is not None:
            raise problem

    def _conclude(self, exc: BaseException | None) -> ToMutationError | None:
        """The error to raise on leaving, if one is due; nothing of the run is kept but its records."""
        try:
            for side in self._ledger.moved():
                self._report_unseen(side)
        except ToMutationError:
            pass  # it is in self._error
        if exc is not None and self.on_violation == "raise":
            self._error = self._error or self._refused_swap(exc)
        self._ledger.clear()
        self._learned, self._nodes = {}, {}
        error, self._error = self._error, None
        return error

    def _take_off(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with _compat.dispatch_mode_on_top(self) as found:
            super().__exit__(exc_type, exc, traceback)
        if not found and exc is None:
            raise RuntimeError(_TAKEN_OFF)

    def _compile_again(self) -> None:
        codes, self._left_uncompiled = self._left_uncompiled, set()
        if codes:
            _compat.compile_again(codes)

    def _refused_swap(self, exc: BaseException) -> ToMutationError | None:
        """The violation behind torch's refusal to swap a tensor that our ledger has a weak reference to."""
        for tensor, frame in _compat.refused_swap(exc):
            side = self._ledger.find(keys_of(tensor))
            if side is not None:
                return ToMutationError(
                    violation_of("utils.swap_tensors", "t1", meta_of(tensor), side, here(frame), kind="rebind")
                )
        return None

    def _check_thread(self, what: str) -> None:
        if self._thread != threading.get_ident():
            raise RuntimeError(
                f"this ToMutationGuard was entered in another thread and cannot be {what} here: modes belong to a "
                "thread, so use one guard for each"
            )

    def report(self, format: Format = "text") -> str:
        """What was seen since the guard was last entered, as one text.

        Args:
            format: ``"text"``; ``"json"`` (the README tells its form); ``"sarif"`` (2.1.0); ``"github"``, a workflow
                command for each violation.

        Returns:
            The report: violations at the same two places are folded, with a count, and ordered by place.

        Raises:
            ValueError: for another format.

        Example:
            >>> import torch
            >>> from dispatch_guard import ToMutationGuard
            >>> with ToMutationGuard(on_violation="record") as guard:
            ...     _ = torch.zeros(2).to("cpu")
            >>> print(guard.report())
            1 conversions, 0 violations
        """
        return report(self.violations, self.conversions, format)

    # ---- what the two modes hand us

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not is_plain(func):
            if self._ledger and func is not DETACH:
                self._check_writes(func, args, kwargs)
            if isinstance(func, HigherOrderOperator):
                return self._run_higher_order(func, args, kwargs)
            if has_user_kernel(func) and _compat.can_run_kernel(args, kwargs) and self._only_guards_below():
                return self._run_kernel(func, args, kwargs)
        self._inside += 1
        try:
            return func(*args, **kwargs)
        finally:
            self._inside -= 1

    def _run_kernel(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator of the user's with all guards on in its kernel."""
        for guard in self._guards_below():
            guard._check_writes(func, args, kwargs)
        with contextlib.ExitStack() as watching:
            for guard in (*self._guards_below(), self):
                watching.enter_context(guard._watching_functions())
            watching.enter_context(self._watching_body())
            return _compat.run_kernel(func, args, kwargs, self._autocast)

    def _on_conversion(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], frame: FrameType) -> Any:
        result = func(*args, **kwargs)
        source = source_of(args, kwargs)
        if source is None or self._inside or not isinstance(result, torch.Tensor):
            return result
        if result is source and self._is_again(source, frame):
            self.conversions += 1  # in a loop, say: the same tensor, at the same place, unwritten since
        elif not is_internal_call(frame, self._deferred) and self._is_active(source):
            place = here(frame)
            if place is None or not place.is_of_numpy(self._noted(place, "numpy")):
                self.conversions += 1
                with _compat.no_torch_function():
                    self._tag(func, args, kwargs, source, result, place)
        return result

    def _is_again(self, source: torch.Tensor, frame: FrameType) -> bool:
        keys = keys_of(source)
        return is_again(self._ledger.settled(keys[0]), frame) and self._ledger.is_subject(keys, source)

    def _on_write(self, call: str, argument: str, tensor: torch.Tensor, value: Any = None) -> None:
        """A write that no operator shows."""
        if not self._ledger:
            return
        if call != "Tensor.data":
            self._check_write(call, argument, tensor)
            return
        if isinstance(value, torch.Tensor) and self._ledger.is_subject(keys_of(tensor), tensor):
            if not self._is_put_back(tensor, value):
                self._check_write(call, argument, tensor, kind="rebind")
            # From now on the object has that memory, and still is one that was converted.
            self._ledger.add_subject(keys_of(value), weakref.ref(tensor))

    def _on_alias(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Eager gives back the argument where tracing makes a copy: the copy stands for the argument."""
        result = func(*args, **kwargs)
        given = args[0] if args else kwargs.get("input")
        if _compat.is_tracing() and isinstance(given, torch.Tensor) and isinstance(result, torch.Tensor):
            for (key, gone), (other, other_gone) in zip(lives_of(result), lives_of(given)):
                if key != other:
                    if self._ledger.is_subject([other], given):
                        self._ledger.add_subject([other], weakref.ref(result))
                    self._ledger.join(key, gone, other, other_gone)
        return result

    def _on_functionalized(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], writes_first: bool) -> Any:
        """A call under functionalize(), which shows no mode what is written: ask its counters, once it has run."""
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        operator = _compat.operator_run_by(func, args, kwargs)
        if writes_first and tensors and self._is_written(operator, tensors[0]):
            self._on_write(str(operator), "self", tensors.pop(0))
        before = [(tensor, _compat.count_writes(tensor), self._ledger.find(keys_of(tensor))) for tensor in tensors]
        result = func(*args, **kwargs)
        for tensor, count, side in before:
            if side is not None and _compat.count_writes(tensor) != count:
                with _compat.no_torch_function():
                    self._report(self._violation(str(operator), "self", tensor, side))
        return result

    def _is_put_back(self, tensor: torch.Tensor, value: torch.Tensor) -> bool:
        """Whether ``tensor.data = value`` puts a result where its source was: ``p.data = p.half()``."""
        sides = [self._ledger.find(keys_of(side)) for side in (tensor, value)]
        one_conversion = None not in sides and len({id(side.tag) for side in sides if side is not None}) == 1
        return one_conversion and same_geometry(tensor, value)

    def _is_active(self, tensor: torch.Tensor) -> bool:
        if self.when == "always" or isinstance(tensor, FakeTensor):
            return True
        return _compat.is_tracing() or _compat.in_compiled_call()

    # ---- conversions and writes

    def _tag(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        source: torch.Tensor,
        result: torch.Tensor,
        place: Place | None,
    ) -> None:
        source_keys = keys_of(source)
        for side in self._ledger.moved(source_keys):
            self._report_unseen(side)
        earlier = self._ledger.find(source_keys)
        copied = result is not source and not set(keys_of(result)) & set(source_keys)
        tag = Tag(func, args, kwargs, source, result, copied, place, earlier.tag if earlier else None)
        if self._logging:
            conversion = tag.record()
            where = f"{conversion.site.filename}:{conversion.site.lineno}" if conversion.site else "an unknown place"
            _log.debug("%s tagged: %s, %s", conversion.call, where, "a copy" if copied else "an alias")
        sides: list[tuple[Role, torch.Tensor]] = [("source", source), ("result", result)]
        for role, tensor in sides if copied else sides[1:]:
            watches = _watches((tensor,) if copied or result is source else (source, result))
            # Operators are handed what a transform (vmap, grad) has wrapped, functions and methods the wrapper.
            objects = (tensor,) if copied or result is source else (source, result)
            subjects = [weakref.ref(each) for it in objects for each in (it, _compat.functorch_unwrap(it))]
            for key, gone in lives_of(tensor):
                self._ledger.tag(key, Side(tag, role), gone, watches, subjects)

    def _check_writes(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for name, tensor in written_arguments(func, args, kwargs):
            if self._is_written(func, tensor):
                self._check_write(str(func), name, tensor, args)

    def _is_written(self, operator: Any, tensor: torch.Tensor) -> bool:
        """Whether ``operator`` changes more of ``tensor`` than an object that no conversion has to do with."""
        if not rebinds(operator):
            return True
        keys = keys_of(tensor)
        if self._ledger.is_subject(keys, tensor):
            return True
        self._ledger.excuse(keys)  # torch counts it as a write to all that share the memory
        return False

    def _check_write(
        self,
        call: str,
        argument: str,
        tensor: torch.Tensor,
        operands: tuple[Any, ...] = (),
        kind: Kind = "operator",
    ) -> None:
        keys = keys_of(tensor)
        found = self._ledger.find(keys)
        if self._logging:
            _log.debug("%s checked: %s is %s", call, argument, "tagged" if found else "not tagged")
        if found is None:
            return
        self._ledger.let_through(keys)
        with _compat.no_torch_function():
            violation = self._violation(call, argument, tensor, found, operands, kind)
        self._report(violation)

    def _violation(
        self,
        call: str,
        argument: str,
        tensor: torch.Tensor,
        found: Side,
        operands: tuple[Any, ...] = (),
        kind: Kind = "operator",
    ) -> Violation:
        place = here()
        others = [meta_of(operand) for operand in operands if isinstance(operand, torch.Tensor)]
        violation = violation_of(
            call, argument, meta_of(tensor), found, place, others, allowed=self._reason_for(call, place), kind=kind
        )
        return replace(violation, version=_version(tensor))

    def _reason_for(self, call: str, place: Place | None) -> str | None:
        """Why a write is let through: for the reason in force, or, as a graph is run, for what was when it was made."""
        reason = reason_in_force()
        if reason is None and place is not None and place.stack_trace:
            reason = self._noted(place, "allowed")
            if reason is None and place.is_of_operator:
                frames = frames_of_trace(place.stack_trace)
                known = {
                    reason
                    for (name, learned), reason in self._learned.items()
                    if name == call and is_among(frames, learned)
                }
                return known.pop() if len(known) == 1 else None
        # Of a line that was let through once and not another time a graph does not tell which is which.
        if _compat.is_tracing():
            key = (call, frames_here())
            self._learned[key] = reason if self._learned.get(key, reason) == reason else None
        return reason

    def _remember_node(self, output: Any, key: tuple[str, str], name: str, value: Any) -> None:
        """What :func:`_compat.note_node` tells of a node, by stack trace and name, of a graph that Dynamo makes."""
        if self._noted_output is None or self._noted_output() is not output:
            self._nodes, self._noted_output, self._noted_graph = {}, weakref.ref(output), None
        self._nodes.setdefault(key, {}).setdefault(name, value)

    def _noted(self, place: Place, name: str) -> Any:
        """What is known of the node of Dynamo's that runs, if it is of the graph that the notes are of."""
        if name in place.notes or not self._nodes or place.graph is None:
            return place.notes.get(name)
        if self._noted_graph is None and _compat.is_dynamo_graph(place.graph()):
            self._noted_graph = place.graph  # the first one that runs after it was made
        if self._noted_graph is None or self._noted_graph() is not place.graph():
            return None
        return self._nodes.get((place.stack_trace, place.node_name), {}).get(name)

    def _report_unseen(self, side: Side) -> None:
        self._report(violation_of("unseen write", "self", None, side, None, kind="unseen"))

    def _report(self, violation: Violation) -> None:
        self.violations.append(violation)
        if violation.allowed is not None:
            return
        if self._deferred:
            return
        if self.on_violation == "raise":
            error = ToMutationError(violation)
            self._error = self._error or error
            raise error
        if self.on_violation == "warn":
            _warn(violation)

    # ---- higher-order operators: while a handler runs, its mode is off, yet the bodies must be seen

    def _on_bodies(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._other_function_modes():
            return self._after_others(func, args, kwargs)
        if isinstance(func, (OpOverload, OpOverloadPacket)) and not _compat.can_dispatch_overload(args, kwargs):
            return func(*args, **kwargs)
        with self._watching_functions():
            if isinstance(func, HigherOrderOperator):
                return _compat.dispatch_hop(func, args, kwargs)
            if isinstance(func, (OpOverload, OpOverloadPacket)):
                return _compat.dispatch_overload(func, args, kwargs)
            return _compat.without_override(func)(*args, **kwargs)

    def _after_others(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Other function modes are to handle this call too: let them go first, and come back to us last."""
        assert self._function_mode is not None
        with _compat.lowest_function_mode(self._function_mode):
            return func(*args, **kwargs)

    def _on_kernel(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        outer, self._autocast = self._autocast, _compat.autocast_state()
        try:
            return func(*args, **kwargs)
        finally:
            self._autocast = outer

    @staticmethod
    def _guards_below() -> list[ToMutationGuard]:
        return [mode for mode in _compat.dispatch_modes() if isinstance(mode, ToMutationGuard)]

    def _only_guards_below(self) -> bool:
        return len(self._guards_below()) == _compat.dispatch_stack_depth()

    @staticmethod
    def _other_function_modes() -> bool:
        return any(not isinstance(mode, ConversionMode) for mode in _compat.function_modes())

    def _on_subclasses(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What torch would do next (torch.overrides.handle_torch_function), with the function mode on meanwhile."""
        if self._other_function_modes():
            return self._after_others(func, args, kwargs)
        with self._watching_functions():
            for subclass in types:
                result = subclass.__torch_function__(func, types, args, kwargs)
                if result is not NotImplemented:
                    return result
        return func(*args, **kwargs)

    def _run_higher_order(self, hop: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        below = _compat.top_dispatch_mode()
        rule = None if below is None else _compat.hop_rule(hop, below)
        if rule is not None:
            # What torch would do next, with ourselves back on the stack: bodies reach the mode unwrapped.
            with _compat.popped_dispatch_mode() as below, self._watching_body():
                result = rule(below, *args, **kwargs)
            if result is not NotImplemented:
                self._hand_on_tags(hop, args, result)
                return result
        return hop(*_wrap_bodies(args, self._watching_body), **_wrap_bodies(kwargs, self._watching_body))

    def _hand_on_tags(self, hop: Any, args: tuple[Any, ...], result: Any) -> None:
        """Traced, a result is new memory; in eager it is what the body returned.  It is tagged as that is."""
        for value, tensor in _compat.traced_results(hop, args, result):
            side = self._ledger.find(keys_of(value))
            if side is not None:
                for key, gone in lives_of(tensor):
                    self._ledger.tag(key, side, gone)

    @contextlib.contextmanager
    def _watching_body(self) -> Iterator[None]:
        inside, self._inside = self._inside, 0
        with _compat.pushed_dispatch_mode(self):
            try:
                yield
            finally:
                self._inside = inside

    @contextlib.contextmanager
    def _watching_functions(self) -> Iterator[None]:
        mode = self._function_mode
        assert mode is not None
        with contextlib.nullcontext() if mode in _compat.function_modes() else _compat.pushed_function_mode(mode):
            yield

    # ---- torch.compile

    def ignore_compile_internals(self) -> bool:  # type: ignore[override]  # torch calls it on the mode (2.10 to 2.15)
        """Whether Dynamo may compile the frame it is at although we are active.

        It must compile the bodies of control-flow operators, or the exported graph would change.  Anything else runs as
        plain Python under the guard, where every write is seen.
        """
        if not self._depth:  # torch asks as the guard is entered, too
            return False
        if _compat.in_higher_order_compile():
            return True
        code = _compat.code_being_compiled()
        if code is not None:
            self._left_uncompiled.add(code)
        return False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # see _compat.leave_to_python

    # ---- the decorator

    def __call__(self, fn: Callable[P, R]) -> Callable[P, R]:
        """Guard each call of ``fn`` by itself.

        Args:
            fn: a function, method, static method or class method.

        Returns:
            A function with the name, documentation and signature of ``fn``.

        Raises:
            TypeError: for a class, a module, a generator or a coroutine function.
        """
        if isinstance(fn, (staticmethod, classmethod)):
            return type(fn)(self(fn.__func__))
        _check_decorated(fn)

        tracing_only = self.when == "tracing"
        start, stop = _dynamo_callbacks(self)  # real functions: Dynamo calls them while it traces `guarded`

        @functools.wraps(fn)
        def guarded(*args: P.args, **kwargs: P.kwargs) -> R:
            if torch.compiler.is_dynamo_compiling():
                with _TracedByDynamo(start, stop):
                    return fn(*args, **kwargs)
            if tracing_only and not _compat.is_tracing():
                for arg in (*args, *kwargs.values()) if kwargs else args:
                    if type(arg) is FakeTensor:
                        break
                else:
                    return fn(*args, **kwargs)
            guard = self._fresh()
            try:
                with guard:
                    return fn(*args, **kwargs)
            finally:
                self.violations, self.conversions = guard.violations, guard.conversions

        return guarded

    def _fresh(self) -> ToMutationGuard:
        return ToMutationGuard(policy=self.policy, on_violation=self.on_violation, when=self.when)


def violation_of(
    call: str,
    argument: str,
    written: TensorMeta | None,
    found: Side,
    place: Place | None,
    operands: Sequence[TensorMeta] = (),
    *,
    allowed: str | None = None,
    kind: Kind = "operator",
) -> Violation:
    """The record of a write: from records alone, so that no mode of the user's sees anything of it.

    Args:
        call: what writes: an operator's name, or what goes by in its place.
        argument: the argument that is written.
        written: dtype, device and shape of the tensor that is written, where that is known.
        found: what hangs on its memory.
        place: where the write is.
        operands: dtype, device and shape of the operator's tensors.
        allowed: the reason for which it is let through.
        kind: of the record.

    Returns:
        The violation; its ``version`` is to be filled in.
    """
    conversion = found.tag.record()
    call = place.as_written(call) if place else call
    operator = call.split(".")[1] if "." in call else call  # a higher-order operator has no namespace
    site = place.write_site(operator) if place else None
    text = write_at(site, operator) if site else None
    if text and written and any(_promotes(written, operand) for operand in operands):
        text = replace(text, instead=None)  # out of place it would have another dtype
    role = role_of(found.role, conversion, text.base if text else _attribute(conversion, argument))
    where = text.site if text else call_at(site) if site else None
    return Violation(
        op=None if kind != "operator" or call.startswith("Tensor.") else call,  # as apply_, which runs no operator
        argument=argument,
        role=role,
        version=None,
        site=where,
        module=module_path(place),
        conversion=conversion,
        allowed=allowed,
        expression=text.expression if text else "",
        written=written,
        help=advice(argument, conversion, text, where, inplace_module(place), role),
        kind=kind,
        call=call,
    )


def _promotes(written: TensorMeta, operand: TensorMeta) -> bool:
    """Whether the two make a result of another dtype than ``written`` has."""
    with _compat.no_modes():
        try:
            return torch.result_type(_like(written), _like(operand)) != written.dtype
        except RuntimeError:  # quantized dtypes have no rules
            return False


def _like(meta: TensorMeta) -> torch.Tensor:
    """A tensor of our own that promotes as the one of which ``meta`` tells: one without dimensions has less weight."""
    return torch.empty((0,) if meta.shape else (), dtype=meta.dtype, device="cpu")


def _attribute(conversion: Conversion, argument: str) -> str:
    """``norm.running_mean`` when that was converted and the argument ``running_mean`` is written."""
    return conversion.expression if conversion.expression.endswith(f".{argument}") else ""


_TAKEN_OFF: Final = (
    "a mode of this ToMutationGuard was taken off the stack by other code, so what ran since then was not guarded; the "
    "guard is left all the same"
)


def _take_off_function_mode(
    mode: ConversionMode,
    exc_type: type[BaseException] | None,
    exc: BaseException | None,
    traceback: TracebackType | None,
) -> None:
    with _compat.function_mode_on_top(mode) as found:
        mode.__exit__(exc_type, exc, traceback)
    if not found and exc is None:
        raise RuntimeError(_TAKEN_OFF)


def _unwind(
    restore: Callable[[], None],
    exc_type: type[BaseException] | None,
    exc: BaseException | None,
    traceback: TracebackType | None,
) -> None:
    if exc is not None:
        restore()


def _check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        allowed = ", ".join(repr(choice) for choice in choices)
        raise ValueError(f"{name} must be one of {allowed}, not {value!r}")


def _check_decorated(fn: Any) -> None:
    if isinstance(fn, type) or not callable(fn):
        raise TypeError(f"ToMutationGuard() decorates functions and methods, not {fn!r}")
    if isinstance(fn, torch.nn.Module):
        raise TypeError("ToMutationGuard() decorates functions and methods: decorate the module's forward instead")
    if inspect.iscoroutinefunction(fn) or inspect.isgeneratorfunction(fn) or inspect.isasyncgenfunction(fn):
        raise TypeError(
            f"ToMutationGuard() cannot decorate the generator or coroutine function {fn.__qualname__}: its body "
            "runs in pieces between which other code would be guarded; guard what it calls instead"
        )


def _wrap_bodies(args: Any, watching: Callable[[], contextlib.AbstractContextManager[None]]) -> Any:
    """``args``, with every body in it (a callable that a user or Dynamo made, at any depth) run under ``watching``."""
    if isinstance(args, (tuple, list)) and type(args) in (tuple, list):
        return type(args)(_wrap_bodies(arg, watching) for arg in args)
    if type(args) is dict:
        return {name: _wrap_bodies(arg, watching) for name, arg in args.items()}
    if not isinstance(args, (FunctionType, MethodType, functools.partial, torch.fx.GraphModule)):
        return args

    def body(*operands: Any, **named: Any) -> Any:
        with watching():
            return args(*operands, **named)

    return body


def _arose_from(exc: BaseException | None, error: BaseException) -> bool:
    """Whether ``exc`` was raised while ``error`` was handled, or wraps it."""
    seen: set[int] = set()
    while exc is not None and id(exc) not in seen:
        if exc is error:
            return True
        seen.add(id(exc))
        exc = exc.__cause__ or exc.__context__
    return False


def _watches(tensors: tuple[torch.Tensor, ...]) -> list[Watch]:
    """What to look at for writes that no mode sees: the tensors, and what they are views of, which may outlive them."""
    bases = (tensor._base for tensor in tensors if tensor._is_view())
    watches = (_watch(tensor) for tensor in (*tensors, *bases) if tensor is not None)
    return [watch for watch in watches if watch is not None]


def _watch(tensor: torch.Tensor) -> Watch | None:
    version = _version(tensor)
    if version is None:
        return None
    reference = weakref.ref(tensor)

    def counter() -> int | None:
        alive = reference()
        return None if alive is None else _version(alive)

    return Watch(counter, version)


def _version(tensor: torch.Tensor) -> int | None:
    with _compat.no_torch_function():
        try:
            return tensor._version
        except RuntimeError:  # an inference tensor keeps none
            return None


def _warn(violation: Violation) -> None:
    site = violation.site or violation.conversion.site
    warnings.warn_explicit(
        str(ToMutationError(violation)),
        ToMutationWarning,
        site.filename if site else "<unknown>",
        site.lineno if site else 1,
    )


# ---- decorated functions under Dynamo: a mode cannot be entered from traced code, but callbacks run while it traces


class _TracedByDynamo:
    """Runs ``start`` and ``stop`` while Dynamo traces into and out of it.

    It is a context manager so that Dynamo, where it must break the graph inside, gives the whole function up instead
    and leaves it to run as plain Python, which the modes see (torch/_dynamo/symbolic_convert.py, 2.10 to 2.15).  Dynamo
    takes only context managers that the traced code makes itself.
    """

    def __init__(self, start: Callable[[Any], None], stop: Callable[[Any], None]) -> None:
        self.start, self.stop = start, stop

    def __enter__(self) -> None:
        torch._dynamo.comptime.comptime(self.start)

    def __exit__(self, *exc_info: object) -> None:
        torch._dynamo.comptime.comptime(self.stop)


def _dynamo_callbacks(decorator: ToMutationGuard) -> tuple[Callable[[Any], None], Callable[[Any], None]]:
    """What to run when Dynamo traces into a function that ``decorator`` decorates, and out of it."""
    guards: list[ToMutationGuard] = []  # Dynamo compiles one frame at a time, under a lock of its own

    def start(context: Any) -> None:
        guard = decorator._fresh()
        guard._deferred = True
        guard.__enter__()
        guards.append(guard)

        def abandon() -> None:  # Dynamo gave up, or starts over: `stop` is not going to run
            if guard in guards:
                guards.remove(guard)
                guard.__exit__(None, None, None)

        _compat.dynamo_output(context).add_cleanup_hook(abandon)

    def stop(context: Any) -> None:
        guard = guards.pop()
        guard.__exit__(None, None, None)
        decorator.violations, decorator.conversions = guard.violations, guard.conversions
        for violation in guard.violations:
            if violation.allowed is None and guard.on_violation == "raise":
                raise _compat.dynamo_error_type(ToMutationError)(violation)
            if violation.allowed is None and guard.on_violation == "warn":
                _warn(violation)

    return start, stop


_compat.leave_to_python(ToMutationGuard.__torch_dispatch__)

ToMutationGuard.__module__ = "dispatch_guard"
