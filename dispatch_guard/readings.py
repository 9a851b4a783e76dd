"""The proof by running: does a program give something else where a conversion is read as a copy instead of an alias?"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import FrameType, MethodType
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from .conversions import Tag, is_internal_call, source_of
from .guard import ToMutationGuard
from .sites import here
from .storages import keys_of
from .violations import Conversion


@dataclass(frozen=True)
class Difference:
    """Where the results of two runs differ first, and the largest difference of a number in there.

    ``where`` is ``"output[0]"``, ``"argument x"``, ``"buffer ema"`` or the like.  ``largest`` is ``inf`` where the
    values cannot be compared: other shapes or dtypes, or an error in one run only.
    """

    where: str
    largest: float

    def __str__(self) -> str:
        return f"{self.where} differs" + ("" if self.largest == float("inf") else f" by up to {self.largest:g}")


@dataclass(frozen=True)
class Reading:
    """A conversion, and what came of reading it the other way.

    ``runnable`` is false for one that copied: as an alias it can only be run on another device or dtype.
    """

    conversion: Conversion
    runnable: bool
    difference: Difference | None

    @property
    def diverges(self) -> bool:
        return self.difference is not None

    def __str__(self) -> str:
        site = self.conversion.site
        place = f"{site.filename}:{site.lineno}" if site else "an unknown place"
        if not self.runnable:
            return f"{place}: not runnable here, as {self.conversion.call} copied"
        return f"{place}: {self.difference or 'the same results'}"


@dataclass(frozen=True)
class DivergenceReport:
    """What :func:`divergence` found: a :class:`Reading` for each conversion in the order in which they ran.

    ``all_at_once`` is the difference where every conversion that was an alias is a copy, which is what the program does
    on another device.
    """

    readings: tuple[Reading, ...]
    all_at_once: Difference | None

    @property
    def diverges(self) -> bool:
        """Whether any run differs from the program as it is written."""
        return self.all_at_once is not None or any(reading.diverges for reading in self.readings)

    def __str__(self) -> str:
        lines = [f"  {reading}" for reading in self.readings]
        verdict = "the readings differ" if self.diverges else "each reading gives the same results"
        return "\n".join([*lines, f"  all at once: {self.all_at_once or 'the same results'}", verdict])


def divergence(
    fn_or_module: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    *,
    each: bool = True,
) -> DivergenceReport:
    """Run a program as it is written, and with conversions read the other way, and compare what comes out.

    A conversion that changed nothing here, and so is an alias, is made a copy: one at a time, and then all at once.
    Compared are the values that the program returns, and its arguments, parameters, buffers and other tensors that the
    module holds as they are afterwards, bit by bit (NaN is like NaN).  That an output shares memory with an input is
    no difference by itself.

    Each run has deep copies of the module and the arguments, and random numbers as they stand now: nothing is changed.
    Of a function, what it closes over or finds in global variables is not copied.

    Args:
        fn_or_module: what to run, in eager mode.
        args: its arguments.
        kwargs: its keyword arguments.
        each: whether to read conversions one at a time, too; that takes a run for each.

    Returns:
        The report.

    Raises:
        ValueError: when two runs of the program as it is written differ, so that no difference would mean anything.
        Exception: whatever the program raises as it is written.

    Example:
        >>> import torch
        >>> from dispatch_guard import divergence
        >>> def harmful(x):
        ...     y = x.to("cpu")
        ...     _ = y.add_(5)
        ...     return x.sin()
        >>> found = divergence(harmful, (torch.zeros(3),))
        >>> found.diverges, found.all_at_once.where
        (True, 'output')
        >>> def harmless(x):
        ...     mask = (x > 0).to(torch.bool)
        ...     return mask.logical_not_()
        >>> divergence(harmless, (torch.zeros(3),)).diverges
        False
    """
    program = _Program(fn_or_module, args, dict(kwargs or {}))
    written = program.run(lambda _: False)
    if written.error is not None:
        raise written.error
    if _difference(written, program.run(lambda _: False)) is not None:
        raise ValueError("two runs of the program as it is written differ, so nothing can be told by running it")
    aliases = {number for number, (_, alias) in enumerate(written.conversions) if alias}

    def other(numbers: set[int]) -> Difference | None:
        return _difference(written, program.run(numbers.__contains__)) if numbers else None

    readings = tuple(
        Reading(tag.record(), alias, other({number}) if alias else None)
        for number, (tag, alias) in enumerate(written.conversions)
        if each
    )
    return DivergenceReport(readings, other(aliases))


class _Rerun(ToMutationGuard):
    """Sees conversions as the guard does, and makes copies of those that ``as_copy`` says, by their numbers."""

    def __init__(self, as_copy: Callable[[int], bool]) -> None:
        super().__init__(on_violation="record")
        self.as_copy = as_copy
        self.found: list[tuple[Tag, bool]] = []

    def _on_conversion(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], frame: FrameType) -> Any:
        result = func(*args, **kwargs)
        source = source_of(args, kwargs)
        if source is None or self._inside or not isinstance(result, torch.Tensor) or is_internal_call(frame, False):
            return result
        alias = result is source or bool(set(keys_of(result)) & set(keys_of(source)))
        self.found.append((Tag(func, args, kwargs, source, result, not alias, here(frame), None), alias))
        return result.clone() if alias and self.as_copy(len(self.found) - 1) else result


@dataclass
class _Outcome:
    """All that can be seen of a run."""

    values: dict[str, Any] = field(default_factory=dict)
    error: Exception | None = None
    conversions: list[tuple[Tag, bool]] = field(default_factory=list)


class _Program:
    def __init__(self, program: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.program, self.args, self.kwargs = program, args, kwargs
        self.random, self.torch_random = random.getstate(), torch.get_rng_state()

    def run(self, as_copy: Callable[[int], bool]) -> _Outcome:
        program, args, kwargs = copy.deepcopy(
            (self.program, self.args, self.kwargs)
        )  # at once: what is shared stays so
        outcome = _Outcome()
        rerun = _Rerun(as_copy)
        kept = random.getstate()
        with torch.random.fork_rng():
            torch.set_rng_state(self.torch_random)
            random.setstate(self.random)
            try:
                with rerun:
                    output = program(*args, **kwargs)
                outcome.values.update(_leaves("output", output))
            except Exception as error:
                outcome.error = error
            finally:
                random.setstate(kept)
        outcome.values.update(_leaves("argument ", args))
        outcome.values.update(_leaves("argument ", kwargs))
        owner = program.__self__ if isinstance(program, MethodType) else program
        if isinstance(owner, nn.Module):
            outcome.values.update(_state(owner))
        outcome.conversions = rerun.found
        return outcome


def _leaves(name: str, tree: Any) -> Iterator[tuple[str, Any]]:
    for path, leaf in pytree.tree_flatten_with_path(tree)[0]:
        yield name + pytree.keystr(path), leaf.detach() if isinstance(leaf, torch.Tensor) else leaf


def _state(module: nn.Module) -> Iterator[tuple[str, Any]]:
    for name, parameter in module.named_parameters(remove_duplicate=False):
        yield f"parameter {name}", parameter.detach()
        if parameter.grad is not None:
            yield f"the gradient of parameter {name}", parameter.grad
    for name, buffer in module.named_buffers(remove_duplicate=False):
        yield f"buffer {name}", buffer
    for path, owner in module.named_modules():
        for name, value in vars(owner).items():
            if isinstance(value, torch.Tensor):
                yield f"attribute {path}{'.' if path else ''}{name}", value.detach()


def _difference(one: _Outcome, other: _Outcome) -> Difference | None:
    errors = [None if outcome.error is None else f"{type(outcome.error).__name__}" for outcome in (one, other)]
    if errors[0] != errors[1]:
        return Difference(f"the run (it raises {errors[1] or 'nothing'})", float("inf"))
    for name in (*one.values, *(name for name in other.values if name not in one.values)):
        if name not in one.values or name not in other.values:
            return Difference(name, float("inf"))
        largest = _distance(one.values[name], other.values[name])
        if largest is not None:
            return Difference(name, largest)
    return None


def _distance(one: Any, other: Any) -> float | None:
    """How far two leaves are apart; ``None`` when they are the same."""
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        plain = (bool, int, float, complex, str, bytes, type(None))
        same = isinstance(one, plain) == isinstance(other, plain) and (
            one == other or one != one or not isinstance(one, plain)  # NaN; objects of a user's cannot be compared
        )
        return None if same else float("inf")
    if one.dtype != other.dtype or one.shape != other.shape or one.layout != other.layout:
        return float("inf")
    if one.layout != torch.strided:
        one, other = one.to_dense(), other.to_dense()
    if one.is_quantized:
        one, other = one.dequantize(), other.dequantize()
    if bool(((one == other) | ((one != one) & (other != other))).all()):
        return None
    wide = torch.complex128 if one.is_complex() else torch.float64
    return float((one.to(wide) - other.to(wide)).abs().nan_to_num(float("inf")).max())
