"""Which arguments an operator writes: its schema, and a short table of the schemas that do not tell."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

import torch
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket

from ._compat import defining_module

Call = Callable[[str], Any]  # the value of an argument of the call at hand, by name


class Argument(NamedTuple):
    """An argument of a schema; ``position`` is ``None`` for a keyword-only one."""

    name: str
    position: int | None


class Untold(NamedTuple):
    """Arguments that an operator writes though its schema does not say so; ``when`` tells whether a call does."""

    arguments: tuple[str, ...]
    when: Callable[[Call], bool] | None = None


class WritePlan(NamedTuple):
    """The arguments that an operator writes: those its schema tells, and those it does not."""

    told: tuple[Argument, ...]
    untold: tuple[Argument, ...]
    when: Callable[[Call], bool] | None


_STATISTICS: Final = ("running_mean", "running_var")


def _training(call: Call) -> bool:
    return bool(call("training"))


# Keys are schema names: all overloads of an operator behave alike.
UNTOLD: Final[dict[str, Untold]] = {
    # Running statistics are updated in training mode (aten/src/ATen/native/Normalization.cpp); native_functions.yaml
    # keeps the old schemas for backward compatibility, _native_batch_norm_legit has the true one.
    "aten::native_batch_norm": Untold(_STATISTICS, _training),
    "aten::cudnn_batch_norm": Untold(_STATISTICS, _training),
    "aten::miopen_batch_norm": Untold(_STATISTICS, _training),
    "aten::batch_norm": Untold(_STATISTICS, _training),
    "aten::_batch_norm_impl_index": Untold(_STATISTICS, _training),
    "aten::instance_norm": Untold(_STATISTICS, lambda call: bool(call("use_input_stats"))),
    # What SyncBatchNorm updates its statistics with (torch/nn/modules/_functions.py).
    "aten::batch_norm_update_stats": Untold(_STATISTICS),
    "aten::batch_norm_gather_stats": Untold(_STATISTICS),
    "aten::batch_norm_gather_stats_with_counts": Untold(_STATISTICS),
    # torch/_inductor and FSDP2: they free, restore or fill a tensor's memory.
    "inductor::resize_storage_bytes_": Untold(("variable",)),
    "inductor::accumulate_grad_": Untold(("variable", "variable_grad")),
}

# It changes neither values nor shape, and as a method it reaches no mode but in inference mode: no write, whatever its
# schema says.
DETACH: Final = torch.ops.aten.detach_.default

# Functions that run as others under a mode, so that no operator shows their write to ``out``: matrix_rank becomes a sum
# whose result is returned in its place (aten/src/ATen/native/LinearAlgebra.cpp; then torch leaves ``out`` unwritten).
UNTOLD_OUT: Final = frozenset({"linalg_matrix_rank", "fft_ihfft2", "fft_ihfftn"})


def hides_out(func: Any) -> bool:
    """Whether ``func``, as ``__torch_function__`` is handed it, writes an ``out`` that no operator will show."""
    return getattr(func, "__name__", "").split(".")[0] in UNTOLD_OUT


@functools.cache
def write_plan(func: OpOverload) -> WritePlan | None:
    """What ``func`` writes; ``None`` when it never writes."""
    schema = func._schema
    untold = UNTOLD.get(schema.name) or _collective(schema)
    told_arguments, untold_arguments = [], []
    for position, argument in enumerate(schema.arguments):
        place = Argument(argument.name, None if argument.kwarg_only else position)
        if argument.alias_info is not None and argument.alias_info.is_write:
            told_arguments.append(place)
        elif untold is not None and argument.name in untold.arguments:
            untold_arguments.append(place)
    if not told_arguments and not untold_arguments:
        return None
    return WritePlan(tuple(told_arguments), tuple(untold_arguments), untold.when if untold else None)


def _collective(schema: Any) -> Untold | None:
    """``c10d::allreduce_`` and its like write what they call outputs, or else ``tensors``; their schemas don't tell."""
    namespace, name = schema.name.split("::")
    if namespace != "c10d" or not (name.endswith("_") or name == "recv"):
        return None
    names = [argument.name for argument in schema.arguments]
    outputs = tuple(name for name in names if name.startswith("output"))
    return Untold(outputs or ("tensors",))


# Namespaces whose kernels are torch's own.
_TORCH_NAMESPACES: Final = frozenset(
    "_c10d_functional _c10d_functional_autograd _dtensor _native _quantized aoti_torch aten bucketing c10d "
    "c10d_functional coor debug_mode_ops debugprims device_mesh dist_autograd export flex_lib fsdp inductor "
    "inductor_prims mempool mkl mkldnn mkldnn_prepacked onednn onnx onnx_symbolic prepacked prim prims profiler "
    "quantization quantized quantized_decomposed rngprims sparse static_runtime streams symm_mem torch_attn torch_nn "
    "xnnpack".split()
)


@functools.cache
def has_user_kernel(func: Any) -> bool:
    """Whether ``func`` is an operator that a user has defined, whose kernel may be Python code of theirs."""
    if not isinstance(func, OpOverload) or func.namespace in _TORCH_NAMESPACES:
        return False
    return not defining_module(func).startswith("torch.")


def overloads_of(func: Any) -> list[Any]:
    """An operator's overloads: all of a packet's, an overload itself; of anything else none."""
    if isinstance(func, OpOverloadPacket):
        return [getattr(func, name) for name in func.overloads()]
    return [func] if isinstance(func, OpOverload) else []


def is_composite_of_user(func: Any) -> bool:
    """Whether ``func`` is a user's operator that runs as the operators it is made of, before any mode sees it."""
    overloads = overloads_of(func)
    return bool(overloads) and all(
        has_user_kernel(overload)
        and torch._C._dispatch_has_kernel_for_dispatch_key(overload.name(), "CompositeImplicitAutograd")
        for overload in overloads
    )


@functools.cache
def rebinds(func: Any) -> bool:
    """Whether ``func`` changes a tensor object (its shape, strides, or which memory it has) and no memory.

    torch tags these (aten/src/ATen/native/tags.yaml, ``inplace_view``): ``t_``, ``unsqueeze_``, ``set_``, ``resize_``.
    """
    return isinstance(func, OpOverload) and func.namespace == "aten" and torch.Tag.inplace_view in func.tags


@functools.cache
def is_plain(func: Any) -> bool:
    """Whether ``func`` only reads and is torch's own: nothing has to be looked at."""
    return isinstance(func, OpOverload) and write_plan(func) is None and not has_user_kernel(func)


def written_arguments(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[str, torch.Tensor]]:
    """The tensors that this call of ``func`` writes, each with the name of the argument it came by."""
    if isinstance(func, HigherOrderOperator):
        return _written_by_higher_order(func, args, kwargs)
    plan = write_plan(func)
    if plan is None:
        return []
    arguments = plan.told
    if plan.untold and (plan.when is None or plan.when(functools.partial(_value_of, func, args, kwargs))):
        arguments += plan.untold
    return [
        (name, tensor)
        for name, position in arguments
        for tensor in _tensors(args[position] if position is not None and position < len(args) else kwargs.get(name))
    ]


def _value_of(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], name: str) -> Any:
    for position, argument in enumerate(func._schema.arguments):
        if argument.name == name:
            if position < len(args):
                return args[position]
            return kwargs.get(name, argument.default_value if argument.has_default_value() else None)
    return None


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


def _written_by_higher_order(
    hop: HigherOrderOperator, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[tuple[str, torch.Tensor]]:
    """Operators that run another operator write what that one writes; Triton kernels, what they are said to write.

    Those with bodies (cond, while_loop, ...) are no writes by themselves: their bodies are seen as they run.
    """
    name = hop.name()
    if name in ("with_effects", "run_and_save_rng_state", "run_with_rng_state"):
        for position, arg in enumerate(args):
            if isinstance(arg, OpOverload):
                return written_arguments(arg, args[position + 1 :], kwargs)
    if name == "triton_kernel_wrapper_mutation":
        arguments = kwargs.get("kwargs", {})
        return [(key, tensor) for key, value in arguments.items() for tensor in _tensors(value)]
    return []
