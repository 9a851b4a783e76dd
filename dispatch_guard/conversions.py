"""What is a conversion, and the function mode that sees each one.

A ``to()`` that returns self dispatches nothing, so a dispatch mode alone cannot see it; ``__torch_function__`` does.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from enum import Enum, auto
from types import FrameType
from typing import Any, Final

import torch
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch.compiler import is_dynamo_compiling
from torch.overrides import TorchFunctionMode

from ._compat import functionalizing, is_run_by_dynamo, note_node_of, stands_for_numpy, subclasses_enabled
from .mutations import has_user_kernel, hides_out, is_composite_of_user, overloads_of, write_plan
from .sites import Place, module_path
from .source import conversion_at
from .violations import Conversion, Role, TensorMeta

# Methods of torch.Tensor that are to() by another name.
METHODS: Final = (
    ("to", "cpu", "cuda", "xpu", "ipu", "hpu", "mtia")
    + ("float", "double", "half", "bfloat16", "int", "long", "short", "char", "byte", "bool")
    + ("cfloat", "cdouble", "chalf", "type", "type_as")
    + ("to_dense",)  # to(layout=strided), and to(dtype) of a dense tensor
)
# Functions of torch, and operators of torch.ops.aten with all their overloads.
FUNCTIONS: Final = ("as_tensor", "asarray")
CASTS: Final = tuple(f"_cast_{name}" for name in ["Byte", "Char", "Double", "Float", "Half", "Int", "Long", "Short"])
OPERATORS: Final = ("to", "type_as", "to_dense", *CASTS)

# Callers whose conversions are torch's own business: decompositions, meta functions, tracers, and what moves, shards or
# restores state that it holds itself (modules, optimizers, DTensors). The latter is a move of that state, as
# nn.Module.to() is: judged, each step after load_state_dict() would be a violation (README.md, "What it does not see").
_INTERNAL_CALLERS: Final = (
    "torch._decomp",
    "torch._dynamo",
    "torch._export",
    "torch._functorch",
    "torch._inductor",
    "torch._meta_registrations",
    "torch._numpy",  # numpy's functions, as Dynamo runs them
    "torch._prims",
    "torch._refs",
    "torch._subclasses",
    "torch.amp",
    "torch.distributed",
    "torch.nested",
    "torch.optim",
    "torch.export",
    "torch.fx.experimental",
    "torch.fx.passes",
    "torch.nn.modules.module",
)


def _named_conversions() -> dict[Any, str]:
    found: dict[Any, str] = {}
    for name in METHODS:
        if hasattr(torch.Tensor, name):
            found[getattr(torch.Tensor, name)] = f"Tensor.{name}"
    for name in FUNCTIONS + CASTS:
        if hasattr(torch, name):
            found[getattr(torch, name)] = f"torch.{name}"
    for name in OPERATORS:
        packet = getattr(torch.ops.aten, name, None)
        if packet is not None:
            found[packet] = f"aten.{name}"
            found.update({getattr(packet, overload): f"aten.{name}.{overload}" for overload in packet.overloads()})
    return found


# Every callable that converts, as __torch_function__ is handed it, with the name it goes by in messages.
CONVERSIONS: Final[dict[Any, str]] = _named_conversions()

# Writes that reach no dispatch mode: ``tensor.data = other``, and the methods that call a Python function per element.
WRITES: Final[dict[Any, str]] = {
    torch.Tensor.data.__set__: "Tensor.data",  # type: ignore[attr-defined]
    torch.Tensor.apply_: "Tensor.apply_",
    torch.Tensor.map_: "Tensor.map_",
    torch.Tensor.map2_: "Tensor.map2_",
}

# Functions of torch written in Python that run a user's code (hooks, autograd functions, callbacks): while a function
# mode handles a call it is off, so their bodies have to be run with it on.
RUN_USER_CODE: Final = frozenset(
    {
        torch.Tensor.backward,
        torch.autograd.backward,
        torch.autograd.grad,
        torch.lobpcg,
        torch.nn.functional.triplet_margin_with_distance_loss,
    }
)


# Their result is their argument where nothing is dropped, in eager; torch's decomposition of it for tracing, which goes
# before the C++ kernel, makes a copy (torch/_decomp/decompositions.py, aten/src/ATen/native/Dropout.cpp).
_DROPOUT_MODULES: Final = ("torch", "torch.nn.functional", "torch._ops.aten")


def _drops(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    p = args[1] if len(args) > 1 else kwargs.get("p", 0.5)
    training = args[2] if len(args) > 2 else kwargs.get("training", kwargs.get("train", True))
    return bool(training) and p != 0


def source_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    """The tensor that a call of one of :data:`CONVERSIONS` converts; ``None`` when it is no conversion."""
    if args:
        source = args[0]
    else:
        source = next((kwargs[name] for name in ("self", "obj", "data", "input") if name in kwargs), None)
    return source if isinstance(source, torch.Tensor) and not _asks_for_copy(args, kwargs) else None


def _asks_for_copy(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if len(args) > 2:
        # In every signature of to() the only bools that can be positional are non_blocking and then copy.
        flags = [arg for arg in args[1:] if isinstance(arg, bool)]
        if len(flags) > 1 and flags[1]:
            return True
    return bool(kwargs) and bool(kwargs.get("copy"))


def _hands_on(frame: FrameType) -> bool:
    if frame.f_code.co_name == "__torch_function__" or frame.f_globals.get("__package__") == __package__:
        return True
    return frame.f_globals.get("__name__") == "torch._ops"  # OpOverload.__call__ (2.10 to 2.15)


def is_internal_call(frame: FrameType | None, in_dynamo: bool) -> bool:
    """Whether the conversion called in ``frame`` is torch's own and not written by a user.

    While Dynamo traces, it runs the user's calls on fake tensors: they count only with ``in_dynamo``, since strict
    export runs the graph that Dynamo made again.
    """
    while frame is not None and _hands_on(frame):
        frame = frame.f_back  # another function mode, or another guard's, hands the user's call on
    if frame is None:
        return False
    name = frame.f_globals.get("__name__", "")
    if name.startswith(_INTERNAL_CALLERS) and not name.startswith("torch._export.db"):  # exportdb's are a user's
        if not is_run_by_dynamo(frame):  # Dynamo calls from there only
            return True
        of_numpy = stands_for_numpy(frame)
        note_node_of(frame, "numpy", of_numpy)
        return of_numpy or not in_dynamo
    caller = frame.f_back  # module._apply(lambda t: t.to(...)) moves a module too
    return caller is not None and caller.f_code is torch.nn.Module._apply.__code__


class Tag:
    """A conversion as the guard remembers it: cheap to make, without a tensor, turned to a record when asked for."""

    __slots__ = ("_arguments", "_depth", "_func", "_modules", "_result", "_source", "copied", "place", "via")

    def __init__(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        source: torch.Tensor,
        result: torch.Tensor,
        copied: bool,
        place: Place | None,
        via: Tag | None,
    ) -> None:
        self._func = func
        arguments = [*args[1:], *kwargs.items()] if kwargs else args[1:]
        self._arguments = [meta_of(arg) if isinstance(arg, torch.Tensor) else arg for arg in arguments]
        self._source = meta_of(source)
        self._result = self._source if result is source else meta_of(result)
        self.copied = copied
        self.place = place
        self._depth: int = 0 if via is None else via._depth + 1
        self.via = via if self._depth % 8 else None  # a loop of conversions must not make a chain that grows

    def record(self) -> Conversion:
        call = CONVERSIONS[self._func]
        site = self.place.conversion_site(_spellings(call)) if self.place else None
        found = conversion_at(site, _spellings(call)) if site else None
        if found is not None and call.startswith("aten."):  # tell what the user wrote, where a graph has the operator
            call = f"Tensor.{found.name}" if found.name in METHODS else call
            call = f"torch.{found.name}" if found.name in FUNCTIONS + CASTS else call
        return Conversion(
            call=call,
            arguments=", ".join(_text(argument) for argument in self._arguments),
            copied=self.copied,
            source=self._source,
            result=self._result,
            site=found.site if found else site,
            module=module_path(self.place),
            via=self.via.record() if self.via else None,
            expression=found.source if found else "",
            target=found.target or "" if found else "",
            text=found.call if found else "",
        )


def _spellings(call: str) -> frozenset[str]:
    """What the call may be named in the user's source: an operator of a graph can come from any."""
    names = call.split(".")
    if names[0] != "aten" or names[1] == "type_as":
        return frozenset(names[1:2])
    return frozenset((*names[1:], *METHODS, *FUNCTIONS, *CASTS)) - {"type_as"}


def is_again(side: Side | None, frame: FrameType) -> bool:
    """Whether the conversion called in ``frame`` would only be remembered as it is: made at this place before."""
    place = None if side is None else side.tag.place
    return place is not None and place.is_at(frame)


class Side:
    """What hangs on tagged memory: a conversion, and which side of it the memory is."""

    __slots__ = ("role", "tag")

    def __init__(self, tag: Tag, role: Role) -> None:
        self.tag = tag
        self.role = role


def meta_of(tensor: torch.Tensor) -> TensorMeta:
    shape: tuple[int | str, ...]
    try:
        shape = tuple(tensor.shape)
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter):  # sizes may be symbolic
            shape = tuple(size if type(size) is int else str(size) for size in shape)
    except RuntimeError:  # a nested tensor of strided layout has no shape
        shape = ()
    return TensorMeta(tensor.dtype, tensor.device, shape)


def _text(argument: Any) -> str:
    if isinstance(argument, tuple) and len(argument) == 2:
        name, value = argument
        return f"{name}={_text(value)}"
    if isinstance(argument, TensorMeta):
        return f"<{str(argument.dtype).removeprefix('torch.')} tensor on {argument.device}>"
    return repr(argument)


class Kind(Enum):
    """What the function mode has to do about a function."""

    PLAIN = auto()
    CONVERSION = auto()
    DROPOUT = auto()  # in eval mode its result is its argument
    BODIES = auto()  # it runs code of the user's, which has to be seen too
    WRITE = auto()  # it writes its first argument, and no operator shows that
    HIDES_OUT = auto()  # it writes its ``out``, and no operator shows that
    KERNEL = auto()  # it is an operator of the user's
    MAY_WRITE = auto()  # it may write arguments; functionalize() hides that from operators


_IN_PLACE_OPERATORS: Final = {
    f"__{name}__"
    for name in "setitem iadd isub imul itruediv idiv ifloordiv imod ipow iand ior ixor ilshift irshift".split()
}
_NO_WRITES: Final = ("requires_grad_", "share_memory_", "detach_")  # neither values nor shape change

_PLAIN: Final = Kind.PLAIN  # looked up for every call
_kinds: dict[Any, Kind] = dict.fromkeys(CONVERSIONS, Kind.CONVERSION)
_kinds.update(dict.fromkeys(RUN_USER_CODE, Kind.BODIES))
_kinds.update(dict.fromkeys(WRITES, Kind.WRITE))


def _kind_of(func: Any) -> Kind:
    name = getattr(func, "__name__", "")
    if isinstance(func, HigherOrderOperator) or is_composite_of_user(func):
        kind = Kind.BODIES
    elif name.split(".")[0] == "dropout" and getattr(func, "__module__", None) in _DROPOUT_MODULES:
        kind = Kind.DROPOUT
    elif any(map(has_user_kernel, overloads_of(func))):
        kind = Kind.KERNEL
    elif hides_out(func):
        kind = Kind.HIDES_OUT
    elif _is_in_place(name) or _may_write(func):
        kind = Kind.MAY_WRITE
    else:
        kind = Kind.PLAIN
    _kinds[func] = kind
    return kind


def _is_in_place(name: str) -> bool:
    return name in _IN_PLACE_OPERATORS or (name.endswith("_") and not name.endswith("__") and name not in _NO_WRITES)


def _may_write(func: Any) -> bool:
    """Whether a function of torch may write an argument though its name does not say so."""
    if isinstance(func, OpOverload):
        return write_plan(func) is not None
    if isinstance(func, OpOverloadPacket):
        return any(write_plan(getattr(func, name)) is not None for name in func.overloads())
    code = getattr(func, "__code__", None)  # F.relu(inplace=True), F.embedding(max_norm=1.0), batch_norm
    return code is not None and not {"inplace", "max_norm", "training", "use_input_stats"}.isdisjoint(code.co_varnames)


@functools.cache
def _overrides(subclass: type) -> bool:
    own, default = (getattr(cls.__torch_function__, "__func__", None) for cls in (subclass, torch.Tensor))  # type: ignore[attr-defined]
    return own is not None and own is not default


class ConversionMode(TorchFunctionMode):
    """Hands on every call that converts, every one that runs bodies, and every write that no operator shows."""

    def __init__(
        self,
        on_conversion: Callable[[Any, tuple[Any, ...], dict[str, Any], FrameType], Any],
        on_alias: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any],
        on_bodies: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any],
        on_kernel: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any],
        on_subclasses: Callable[[Any, Any, tuple[Any, ...], dict[str, Any]], Any],
        on_write: Callable[[str, str, torch.Tensor, Any], None],
        on_functionalized: Callable[[Any, tuple[Any, ...], dict[str, Any], bool], Any],
    ) -> None:
        self.on_conversion = on_conversion
        self.on_alias = on_alias
        self.on_bodies = on_bodies
        self.on_kernel = on_kernel
        self.on_subclasses = on_subclasses
        self.on_write = on_write
        self.on_functionalized = on_functionalized

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # Dynamo traces through this method when it meets it active; it must see nothing but the call itself.
        if is_dynamo_compiling():
            return func(*args, **(kwargs or {}))
        kind = _kinds.get(func) or _kind_of(func)
        if kind is not _PLAIN:
            if kind is Kind.CONVERSION:
                return self.on_conversion(func, args, kwargs or {}, sys._getframe(1))
            if kind is Kind.DROPOUT and not _drops(args, kwargs or {}):
                return self.on_alias(func, args, kwargs or {})
            if kind is Kind.BODIES:
                return self.on_bodies(func, args, kwargs or {})
            if kind is Kind.KERNEL:
                return self.on_kernel(func, args, kwargs or {})
            if kind is Kind.WRITE:
                value = args[1] if WRITES[func] == "Tensor.data" else None
                self.on_write(WRITES[func], "self", args[0], value)
            elif kind is Kind.HIDES_OUT and kwargs and "out" in kwargs:
                self.on_write(f"aten.{func.__name__.split('.')[0]}.out", "out", kwargs["out"], None)
            elif kind is Kind.MAY_WRITE and functionalizing():
                return self.on_functionalized(func, args, kwargs or {}, _is_in_place(func.__name__))
        if types and any(map(_overrides, types)) and subclasses_enabled():  # their __torch_function__ is users' code
            return self.on_subclasses(func, types, args, kwargs or {})
        if not kwargs:
            return func(*args)
        if "out" in kwargs and functionalizing():
            return self.on_functionalized(func, args, kwargs, False)
        return func(*args, **kwargs)
