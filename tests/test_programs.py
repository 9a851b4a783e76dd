"""Things that real programs do around conversions: what must raise, and what must not."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

from dispatch_guard import ToMutationError, ToMutationGuard


def ones(*size: int) -> torch.Tensor:
    return torch.ones(size or (3,))


# ---- these write


def clip_gradients() -> None:
    parameter = nn.Parameter(ones())
    parameter.grad = ones()
    parameter.grad.to("cpu")
    nn.utils.clip_grad_norm_([parameter], 0.1)


def accumulate_a_converted_gradient() -> None:
    parameter = ones().requires_grad_()
    (parameter * 2).sum().backward()
    assert parameter.grad is not None
    parameter.grad.to("cpu")
    (parameter * 2).sum().backward()


def write_beside_a_converted_view() -> None:
    base = ones(4)
    base[:2].to("cpu")
    base[2:].add_(1)


def alias_by_set() -> None:
    torch.empty(3).set_(ones().to("cpu")).add_(1)


def alias_by_data() -> None:
    z = torch.empty(3)
    z.data = ones().to("cpu")
    z.add_(1)


def alias_by_storage() -> None:
    torch.tensor([]).set_(ones().to("cpu").untyped_storage()).add_(1)


def write_an_untyped_storage() -> None:
    ones().to("cpu").untyped_storage()[0] = 1


def write_a_tensor_of_numpy() -> None:
    torch.from_numpy(np.ones(3, dtype=np.float32)).to("cpu").add_(1)


def load_a_state_over_a_converted_parameter() -> None:
    linear = nn.Linear(2, 2)
    linear.weight.to("cpu")
    linear.load_state_dict(nn.Linear(2, 2).state_dict())


def assign_a_converted_state_and_write_it() -> None:
    linear = nn.Linear(2, 2)
    state = {key: value.to("cpu") for key, value in nn.Linear(2, 2).state_dict().items()}
    linear.load_state_dict(state, assign=True)
    nn.init.zeros_(linear.weight)


def renormalize_a_converted_embedding() -> None:
    embedding = nn.Embedding(5, 3, max_norm=1.0)
    embedding.weight.to("cpu")
    embedding(torch.tensor([1]))


def power_iterations_on_a_converted_buffer() -> None:
    module = nn.utils.parametrizations.spectral_norm(nn.Linear(3, 3)).train()
    module.parametrizations.weight[0]._u.to("cpu")  # type: ignore[index,union-attr,operator]
    module(ones(1, 3))


def under_another_default_device() -> None:
    with torch.device("meta"):
        ones().to("meta").add_(1)


# ---- these do not


def read_in_every_way() -> None:
    x = ones().to("cpu")
    str(x), repr(x), x.tolist(), hash(x), list(x), len(x), x.sum().item(), bool((x > 0).all()), x in [x]
    copy.deepcopy(x).add_(1)
    buffer = io.BytesIO()
    torch.save(x, buffer)
    buffer.seek(0)
    torch.load(buffer).add_(1)
    x.requires_grad_(True)
    x.grad = ones()


def gradients_of_a_converted_parameter() -> None:
    parameter = ones().requires_grad_()
    converted = parameter.to("cpu")
    (converted * 2).sum().backward()
    (converted * 3).sum().backward()
    wide = parameter.to(torch.float64)
    (wide * 2).add_(1).sum().backward()


def load_a_converted_state() -> None:
    linear = nn.Linear(2, 2)
    linear.load_state_dict({key: value.to("cpu") for key, value in nn.Linear(2, 2).state_dict().items()})


def train_with_a_scaler() -> None:
    scaler = torch.amp.GradScaler("cpu")
    linear = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(linear.parameters(), lr=0.1)
    for _ in range(2):
        with torch.autocast("cpu"):
            loss = linear(ones(1, 2)).sum()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


def average_weights() -> None:
    linear = nn.Linear(2, 2)
    average = torch.optim.swa_utils.AveragedModel(linear)
    average.update_parameters(linear)
    average.update_parameters(linear)


def load_data() -> None:
    data = torch.utils.data.TensorDataset(ones(4, 2))
    for (batch,) in torch.utils.data.DataLoader(data, batch_size=2):
        (batch.to("cpu") * 2).sum()


def sample_distributions() -> None:
    torch.distributions.Normal(torch.tensor(0.0), torch.tensor(1.0)).log_prob(torch.tensor(1.0).to("cpu"))
    torch.distributions.Categorical(ones().to("cpu")).sample()


def run_modules_that_cast_inside() -> None:
    nn.LSTM(3, 3)(ones(2, 1, 3).to("cpu"))
    nn.utils.parametrizations.weight_norm(nn.Linear(3, 3))(ones(1, 3).to("cpu"))
    nn.EmbeddingBag(5, 3)(torch.tensor([1, 2], dtype=torch.int32), torch.tensor([0]))


_ALL = [v for v in list(globals().values()) if callable(v) and getattr(v, "__module__", "") == __name__]
CLEAN = _ALL[_ALL.index(read_in_every_way) :]
WRITING = [v for v in _ALL[: _ALL.index(read_in_every_way)] if v is not ones]


@pytest.mark.parametrize("program", WRITING)
def test_it_raises(program: Callable[[], None]) -> None:
    with pytest.raises(ToMutationError), ToMutationGuard():
        program()


@pytest.mark.parametrize("program", CLEAN)
def test_it_passes(program: Callable[[], None]) -> None:
    with ToMutationGuard() as guard:
        program()
    assert guard.violations == []
