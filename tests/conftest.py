from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import torch
from ways import stacks


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Every test, however it ends, leaves both mode stacks as it found them."""
    before = stacks()
    hooks = torch.nn.modules.module._global_buffer_registration_hooks
    flags = torch.utils._python_dispatch.is_in_torch_dispatch_mode()
    yield
    hooks.clear()  # up to torch 2.12 an export that raises leaves one behind, with or without a guard
    assert stacks() == before
    assert torch._C._functorch.get_dynamic_layer_stack_depth() == 0
    assert torch.utils._python_dispatch.is_in_torch_dispatch_mode() == flags


@pytest.fixture(autouse=True, scope="session")
def quiet() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    logging.getLogger("torch.export").setLevel(logging.CRITICAL)
    logging.getLogger("torch._guards").setLevel(logging.CRITICAL)
