"""Find in-place writes to tensors that have been through ``to()``, while a program is exported or run."""

from .capture import CapturedProgram, capture_conversions, check_program, export
from .guard import ToMutationGuard, allow_mutation
from .violations import Conversion, Site, TensorMeta, ToMutationError, ToMutationWarning, Violation

__all__ = [
    "CapturedProgram",
    "Conversion",
    "Site",
    "TensorMeta",
    "ToMutationError",
    "ToMutationGuard",
    "ToMutationWarning",
    "Violation",
    "allow_mutation",
    "capture_conversions",
    "check_program",
    "export",
]
