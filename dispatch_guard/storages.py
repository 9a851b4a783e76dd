"""A tensor's memory as keys that die with it.

A key is an address; what makes it safe to keep is the :class:`Life` beside it, which tells when the memory behind the
address is gone and, for a storage, keeps the address from being given to another one.  Neither keeps memory alive.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ._compat import functorch_unwrap, no_torch_dispatch, no_torch_function, storage_address

_PLAIN: frozenset[type] = frozenset({torch.Tensor, torch.nn.Parameter, FakeTensor})

Life = Callable[[], bool]  # says whether the memory behind a key is gone


def components(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors that hold ``tensor``'s values: itself, what a transform or subclass wraps, or a sparse one's."""
    tensor = functorch_unwrap(tensor)
    if type(tensor) in _PLAIN:
        return [tensor] if _has_storage(tensor) else _parts(tensor)
    if isinstance(tensor, FunctionalTensor):
        return [tensor.elem]  # the C++ wrapper's storage is shared by its views; the Python wrapper's is not
    if is_traceable_wrapper_subclass(tensor):
        names = tensor.__tensor_flatten__()[0]
        if getattr(tensor, "is_nested", False):
            names = [n for n in names if n == "_values"]  # offsets are shared by unrelated tensors of one raggedness
        parts = [getattr(tensor, name) for name in names]  # a DTensor's hold its mesh as well
        return [component for part in parts if isinstance(part, torch.Tensor) for component in components(part)]
    return [tensor] if _has_storage(tensor) else _parts(tensor)


def keys_of(tensor: torch.Tensor) -> list[int]:
    """The keys of all memory that ``tensor``'s values live in."""
    if type(tensor) in _PLAIN and not torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        try:
            return [storage_address(tensor)]
        except (RuntimeError, NotImplementedError):
            pass
    return [_key(component) for component in components(tensor)]


def same_geometry(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have the same shape and strides, and of one memory the same part."""
    with no_torch_function():
        return _geometry(one) == _geometry(other) and (
            keys_of(one) != keys_of(other) or str(one.storage_offset()) == str(other.storage_offset())
        )


def _geometry(tensor: torch.Tensor) -> str:
    """As text: to compare symbolic sizes would tell their environment something."""
    strides = tuple(tensor.stride()) if tensor.layout == torch.strided else tensor.layout
    return f"{tuple(tensor.shape)} {strides}"


def lives_of(tensor: torch.Tensor) -> list[tuple[int, Life]]:
    """:func:`keys_of`, each with the :class:`Life` of what it names."""
    return [(_key(component), _life(component)) for component in components(tensor)]


def _has_storage(tensor: torch.Tensor) -> bool:
    try:
        storage_address(tensor)
    except (RuntimeError, NotImplementedError):
        return False
    return True


def _parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """What a tensor without a storage is made of; the tensor itself when that can't be reached (mkldnn)."""
    # Only their values: indices are shared by unrelated tensors of one pattern (``y + y`` of a CSR tensor).
    names = dict.fromkeys((torch.sparse_csr, torch.sparse_bsr, torch.sparse_csc, torch.sparse_bsc), ("values",))
    names[torch.sparse_coo] = ("_values",)
    try:
        with no_torch_dispatch(), torch.no_grad():
            parts = [getattr(tensor, name)() for name in names.get(tensor.layout, ())]
    except (RuntimeError, NotImplementedError):
        parts = []
    return [part for part in parts if _has_storage(part)] or [tensor]


def _key(component: torch.Tensor) -> int:
    try:
        return int(storage_address(component))
    except (RuntimeError, NotImplementedError):
        return int(component._cdata)  # the TensorImpl: no storage to speak of


def _life(component: torch.Tensor) -> Life:
    try:
        storage: Any = component.untyped_storage()
    except (RuntimeError, NotImplementedError):
        reference = weakref.ref(component)
        return lambda: reference() is None
    return StorageWeakRef(storage).expired
