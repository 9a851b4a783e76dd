"""The records the guard hands out: sites, conversions, violations, and the error and warning that carry them.

Everything here is frozen, picklable and free of tensors: a record never keeps memory alive.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

Role = Literal["result", "source"]
Kind = Literal["operator", "rebind", "unseen"]


@dataclass(frozen=True, slots=True)
class Site:
    """A place in the user's code.

    ``col`` and ``end_col`` are 0-based character offsets; they and ``end_lineno`` are ``None`` where the tracer or
    the Python version (before 3.11) does not tell.  ``line`` is the source text of ``lineno`` as it was when the site
    was resolved, ``""`` when the source is gone.  ``caller`` is the nearest place in the user's own code when the site
    itself is inside an installed library.  ``lines`` is the source text from ``lineno`` to ``end_lineno`` where that
    is known.
    """

    filename: str
    lineno: int
    end_lineno: int | None
    col: int | None
    end_col: int | None
    function: str
    line: str
    caller: Site | None = None
    lines: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """dtype, device and shape of a tensor; a symbolic size is kept as its text."""

    dtype: torch.dtype
    device: torch.device
    shape: tuple[int | str, ...]


@dataclass(frozen=True, slots=True)
class Conversion:
    """One call of ``to()``, or of a function that is ``to()`` by another name.

    ``call`` is the spelling (``"Tensor.to"``), ``arguments`` the text of the arguments after the source, ``copied``
    what happened on this device: ``False`` when the result is the source itself (an alias).  ``module`` is the path
    of the innermost ``nn.Module`` from the root one (``""`` for the root or outside any module).  ``via`` is the
    earlier conversion whose result (or a view of it) this one converted, if any.  ``expression``, ``target`` and
    ``text`` are what the user's source says, as in ``target = text`` with the text ``expression.to(...)``; ``""`` where
    it does not tell.
    """

    call: str
    arguments: str
    copied: bool
    source: TensorMeta
    result: TensorMeta
    site: Site | None
    module: str
    via: Conversion | None = None
    expression: str = ""
    target: str = ""
    text: str = ""


@dataclass(frozen=True, slots=True)
class Violation:
    """One in-place write to a tensor that has been through a conversion.

    ``kind`` is ``"operator"`` for a write by an operator of torch or by a method that runs none (``apply_``);
    ``"rebind"`` where the tensor object is given other memory by what is no operator (``tensor.data = other``,
    ``torch.utils.swap_tensors``); ``"unseen"`` for a write that no mode saw but that moved a version counter, which
    has no site.  ``op`` is the operator's name (``"aten.add_.Tensor"``), ``None`` where none ran, and ``call`` what the
    write goes by in messages: that name, or ``"Tensor.data"``, ``"Tensor.apply_"``, ``"unseen write"``.

    ``argument`` is the written argument of the operator's schema, ``role`` the side of the conversion that it shares
    memory with, ``version`` the tensor's version counter at the time (``None`` for inference tensors).  ``allowed`` is
    the reason given to :func:`~dispatch_guard.allow_mutation`, or ``None``.

    ``expression`` is the user's text for the written tensor (``""`` where the source does not tell), ``written`` its
    dtype, device and shape, and ``help`` what to do, a line each.
    """

    op: str | None
    argument: str
    role: Role
    version: int | None
    site: Site | None
    module: str
    conversion: Conversion
    allowed: str | None = None
    expression: str = ""
    written: TensorMeta | None = None
    help: tuple[str, ...] = ()
    kind: Kind = "operator"
    call: str = ""


class ToMutationError(RuntimeError):
    """Raised before an in-place write to a tensor that has been through a conversion.

    Attributes:
        violation: the :class:`Violation`.
    """

    violation: Violation

    def __init__(self, violation: Violation) -> None:
        from .report import render  # the text is made here, once: a log handler may print it much later

        self._message = render(violation)
        super().__init__(self._message)
        self.violation = violation

    def __str__(self) -> str:
        return self._message  # not args, to which torch.fx.Interpreter adds torch's own frames on the way

    def __reduce__(self) -> tuple[type[ToMutationError], tuple[Violation]]:
        return (ToMutationError, (self.violation,))


class ToMutationWarning(UserWarning):
    """What a guard with ``on_violation="warn"`` issues, at the user's line."""


for _public in (Site, TensorMeta, Conversion, Violation, ToMutationError, ToMutationWarning):
    _public.__module__ = "dispatch_guard"
