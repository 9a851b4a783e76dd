"""What a type checker says about the public functions: read by tests/test_typing.py; ``cases`` is called by nothing.

Each ``reveal_type`` is followed by what it reveals.
"""

from __future__ import annotations

import torch
from typing_extensions import assert_type, reveal_type

from dispatch_guard import ToMutationError, ToMutationGuard, Violation, allow_mutation


@ToMutationGuard()
def scale(x: torch.Tensor, factor: float = 2.0, *, name: str = "") -> torch.Tensor:
    return x.float() * factor


@allow_mutation("a reason")
def count(times: int) -> list[int]:
    return [times]


class Model(torch.nn.Module):
    @ToMutationGuard(when="tracing")
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, int]:
        return x, 3


def cases() -> None:
    reveal_type(scale)  # def (x: torch._tensor.Tensor, factor: float =, *, name: str =) -> torch._tensor.Tensor
    reveal_type(count)  # def (times: int) -> list[int]
    reveal_type(Model.forward)  # def (self: Model, x: torch._tensor.Tensor) -> tuple[torch._tensor.Tensor, int]

    with ToMutationGuard(on_violation="record") as guard:
        assert_type(guard, ToMutationGuard)
        assert_type(guard.violations, list[Violation])
        assert_type(guard.conversions, int)
        assert_type(guard.report("json"), str)

    try:
        scale(torch.zeros(2))
    except ToMutationError as error:
        assert_type(error.violation, Violation)

    scale("text")  # error: arg-type
    scale(torch.zeros(2), nam="x")  # error: call-arg
    ToMutationGuard(on_violation="shout")  # error: arg-type
    ToMutationGuard(policy="every")  # error: arg-type
    guard.report("xml")  # error: arg-type
    allow_mutation(3)  # error: arg-type
