"""Find in-place writes to tensors that have been through ``to()``, while a program is exported or run.

What is here is loaded as it is first used: pytest imports the package in every run, for the plugin in it, and must not
load torch each time.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .allowances import allow_mutation
    from .capture import CapturedProgram, capture_conversions, check_program, export
    from .guard import ToMutationGuard
    from .readings import Difference, DivergenceReport, Reading, divergence
    from .violations import Conversion, Site, TensorMeta, ToMutationError, ToMutationWarning, Violation

__all__ = [
    "CapturedProgram",
    "Conversion",
    "Difference",
    "DivergenceReport",
    "Reading",
    "Site",
    "TensorMeta",
    "ToMutationError",
    "ToMutationGuard",
    "ToMutationWarning",
    "Violation",
    "allow_mutation",
    "capture_conversions",
    "check_program",
    "divergence",
    "export",
]

_HOMES = {
    "capture": ("CapturedProgram", "capture_conversions", "check_program", "export"),
    "allowances": ("allow_mutation",),
    "guard": ("ToMutationGuard",),
    "readings": ("Difference", "DivergenceReport", "Reading", "divergence"),
    "violations": ("Conversion", "Site", "TensorMeta", "ToMutationError", "ToMutationWarning", "Violation"),
}


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            value = getattr(importlib.import_module(f"{__name__}.{home}"), name)
            globals()[name] = value
            return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
