"""Programs that write to converted tensors, each in its own way; tests/test_messages.py tells what the guard says."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Result(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = x.to("cpu")
        y.add_(5)
        return x.sin()


class Source(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = x.clone()
        z = y.to("cpu")
        y.sin_()
        return z


class Rebound(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x = x * 2
        x = x.float()
        x -= x.max(dim=-1, keepdim=True)[0]
        return x.exp()


class Copied(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = x.double()
        y.clamp_(min=0)
        return y + x


class Item(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = x.to(torch.float32)
        y[0] = 3.0
        return y * 2


class View(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = x.float()
        tail = y[1:]
        tail.mul_(2)
        return y


class Chain(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (
            x.to("cpu")
            .fill_(2.5)
            .sin()
        )  # fmt: skip


class OneLine(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.triu(x.float().fill_(float("-inf")).type_as(x)[None], 1)


class Lines(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        größe = "é"; y = x.to(  # noqa: E702
            "cpu",
            torch.float32,
        )  # fmt: skip
        torch.add(
            x,
            2,
            out=y,
        )
        return y if größe else x


class Functional(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = torch.as_tensor(x)
        F.relu(y, inplace=True)
        return y + 1


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Identity(), nn.ReLU(inplace=True))

    def forward(self, x: Tensor) -> Tensor:
        h = x.type_as(x)
        return self.net(h) + 1


class Block(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = x.to("cpu")
        y *= 2
        return y


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Identity(), nn.ModuleDict({"attn": Block()})])

    def forward(self, x: Tensor) -> Tensor:
        block: Any = self.layers[1]
        return block["attn"](x)


class Twice(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        h = x.to("cpu")
        y = h.float()
        y.copy_(x + 1)
        return y


class Buffer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("key", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        self.key = self.key.to(x.device)
        out = self.key
        out.add_(x)
        return out * 2


class Statistics(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(1)

    def forward(self, x: Tensor) -> Tensor:
        mean = self.norm.running_mean.float()
        return self.norm(x[:, None]) + mean


PROGRAMS: dict[str, type[nn.Module]] = {
    program.__name__: program
    for program in (
        [
            Result,
            Source,
            Rebound,
            Copied,
            Item,
            View,
            Chain,
            OneLine,
            Lines,
            Functional,
            Layers,
            Deep,
            Twice,
            Buffer,
            Statistics,
        ]
    )
}
