"""Real architectures: the guard changes nothing in what is exported, and finds what is planted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_control_flow import metadata, text

from benchmarks import models
from dispatch_guard import ToMutationError, ToMutationGuard

CLEAN = ["llama", "bert", "t5", "vit", "whisper"]


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("name", CLEAN)
def test_a_real_model_exports_to_the_same_program(name: str, strict: bool) -> None:
    module, args = getattr(models, name)()
    torch._dynamo.reset()
    plain = torch.export.export(module, args, strict=strict)
    torch._dynamo.reset()
    with ToMutationGuard() as guard:
        guarded = torch.export.export(module, args, strict=strict)
    assert guard.violations == []
    assert text(plain) == text(guarded)
    assert metadata(plain) == metadata(guarded)
    torch.testing.assert_close(guarded.module()(*args), module(*args))


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(
    "name, conversion, write, path",
    [
        ("planted_norm", "hidden_states.to(torch.float32)", "scaled.mul_(", "layers.1.post_attention_layernorm"),
        ("planted_cache", "self.key.to(device=key.device)", "cache.index_copy_(", ""),
    ],
)
def test_a_planted_violation_is_found(name: str, conversion: str, write: str, path: str, strict: bool) -> None:
    module, args = getattr(models, name)()
    before: dict[str, Any] = {key: value.clone() for key, value in module.state_dict().items()}
    with pytest.raises(ToMutationError) as caught, ToMutationGuard():
        torch.export.export(module, args, strict=strict)
    violation = caught.value.violation
    assert violation.site is not None and violation.conversion.site is not None
    assert violation.site.filename == violation.conversion.site.filename == models.__file__
    assert write in violation.site.line
    assert conversion in violation.conversion.site.line
    assert violation.module.endswith(path)
    for key, value in module.state_dict().items():
        assert torch.equal(value, before[key])
