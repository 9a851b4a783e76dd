"""Every way in which a user may run a program under the guard."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])
Run = Callable[[nn.Module, tuple[Any, ...]], Any]


def eager(module: nn.Module, args: tuple[Any, ...]) -> Any:
    return module(*args)


def no_grad(module: nn.Module, args: tuple[Any, ...]) -> Any:
    with torch.no_grad():
        return module(*args)


def inference(module: nn.Module, args: tuple[Any, ...]) -> Any:
    with torch.inference_mode():
        return module(*(arg.clone() for arg in args))


def export(module: nn.Module, args: tuple[Any, ...]) -> Any:
    return torch.export.export(module, args, strict=False)


def export_strict(module: nn.Module, args: tuple[Any, ...]) -> Any:
    return torch.export.export(module, args, strict=True)


def draft_export(module: nn.Module, args: tuple[Any, ...]) -> Any:
    return torch.export.draft_export(module, args)


def _make_fx(tracing_mode: str, pre_dispatch: bool) -> Run:
    def run(module: nn.Module, args: tuple[Any, ...]) -> Any:
        def call(*args: Any) -> Any:
            return module(*args)

        return make_fx(call, tracing_mode=tracing_mode, pre_dispatch=pre_dispatch, _allow_non_fake_inputs=True)(*args)

    return run


def _compile(backend: str, fullgraph: bool) -> Run:
    def run(module: nn.Module, args: tuple[Any, ...]) -> Any:
        torch._dynamo.reset()
        return torch.compile(module, backend=backend, fullgraph=fullgraph)(*args)

    return run


def functionalize(module: nn.Module, args: tuple[Any, ...]) -> Any:
    return torch.func.functionalize(module)(*args)


def vmap(module: nn.Module, args: tuple[Any, ...]) -> Any:
    return torch.func.vmap(module)(*(arg[None].clone() for arg in args))


EAGER: dict[str, Run] = {"eager": eager, "no_grad": no_grad, "inference": inference}
EXPORT: dict[str, Run] = {"export": export, "export_strict": export_strict, "draft_export": draft_export}
MAKE_FX: dict[str, Run] = {
    f"make_fx_{mode}{'_pre_dispatch' if pre else ''}": _make_fx(mode, pre)
    for mode in ("real", "fake", "symbolic")
    for pre in (False, True)
}
COMPILE: dict[str, Run] = {
    f"compile_{backend}{'_fullgraph' if full else ''}": _compile(backend, full)
    for backend in ("eager", "aot_eager", "inductor")
    for full in (False, True)
}
ALL: dict[str, Run] = {**EAGER, **EXPORT, **MAKE_FX, **COMPILE}


def stacks() -> tuple[list[object], list[object]]:
    """What is on this thread's two mode stacks."""
    dispatch = [torch._C._get_dispatch_stack_at(i) for i in range(torch._C._len_torch_dispatch_stack())]
    function = [torch._C._get_function_stack_at(i) for i in range(torch._C._len_torch_function_stack())]
    return dispatch, function
