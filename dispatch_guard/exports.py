"""Guards every export that is made meanwhile, wherever it is called from."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

from . import _compat
from .guard import OnViolation, ToMutationGuard


class _Running(threading.local):
    """Whether this thread is in an export that is guarded already."""

    now = False


@contextlib.contextmanager
def guarding_exports(
    seen: Callable[[ToMutationGuard], object], *, on_violation: OnViolation = "raise"
) -> Iterator[None]:
    """Guard each ``torch.export.export``, and what calls it (``draft_export``, ``torch.onnx.export``), by itself.

    It makes no difference whether ``export`` was imported before.

    Args:
        seen: is called with the guard after each export, whether or not it came to an end.
        on_violation: as for :class:`ToMutationGuard`.

    Raises:
        ToMutationError: from the export, with ``on_violation="raise"``.

    Example:
        >>> import torch
        >>> from dispatch_guard.exports import guarding_exports
        >>> with guarding_exports(lambda guard: print(guard.report())):
        ...     _ = torch.export.export(torch.nn.Linear(2, 2), (torch.zeros(2),))
        0 conversions, 0 violations
    """
    running = _Running()

    @contextlib.contextmanager
    def guarded() -> Iterator[None]:
        if running.now:
            yield
            return
        guard = ToMutationGuard(on_violation=on_violation)
        running.now = True
        try:
            with guard:
                yield
        finally:
            running.now = False
            seen(guard)

    with _compat.every_export(guarded):
        yield
