"""Functions that programs of tests/test_names_and_places.py call."""

from __future__ import annotations

from torch import Tensor


def moved(x: Tensor) -> Tensor:
    return x.to("cpu")


def scaled_(y: Tensor) -> None:
    y.mul_(3)
