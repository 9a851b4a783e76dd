"""Every operator: by enumeration instead of by example."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._ops import OpOverload
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from dispatch_guard import ToMutationError, ToMutationGuard
from dispatch_guard.mutations import UNTOLD, written_arguments

Tensor = torch.Tensor

# ---- the registry


def overloads(namespace: str) -> Iterator[OpOverload]:
    names = {
        name.split("::")[1].split(".")[0]
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith(namespace + "::")
    }
    for name in sorted(names):
        packet = getattr(getattr(torch.ops, namespace), name)
        for overload in packet.overloads():
            yield getattr(packet, overload)


def dummy(argument: Any, tensor: Tensor) -> Any:
    """A value of the right kind; the guard looks before anything runs, so it need not make sense."""
    kind = str(argument.type)
    if "List[Tensor]" in kind or "List[Optional[Tensor]]" in kind:
        return [torch.zeros(1), tensor]
    if "Tensor" in kind:
        return tensor
    if argument.has_default_value():
        return argument.default_value
    for name, value in {"List": [1], "int": 1, "float": 1.0, "bool": True, "str": "", "number": 1}.items():
        if name in kind:
            return value
    return None


@pytest.mark.parametrize(
    "namespace", ["aten", "prims", "quantized", "_c10d_functional", "symm_mem", "mkldnn", "inductor"]
)
def test_every_written_argument_of_every_overload_raises(namespace: str) -> None:
    tried, missed = 0, []
    for overload in overloads(namespace):
        arguments = overload._schema.arguments
        for place, argument in enumerate(arguments):
            if argument.alias_info is None or not argument.alias_info.is_write or "Tensor" not in str(argument.type):
                continue
            for by_keyword in (True, False):
                if by_keyword is False and argument.kwarg_only:
                    continue
                tried += 1
                with ToMutationGuard(on_violation="record") as guard:
                    tagged = torch.zeros(1)
                    tagged.to("cpu")
                    values = {
                        a.name: dummy(a, tagged if i == place else torch.zeros(1)) for i, a in enumerate(arguments)
                    }
                    positional = [] if by_keyword else [values.pop(a.name) for a in arguments if not a.kwarg_only]
                    guard.on_violation = "raise"
                    ran = []
                    try:
                        guard._check_writes(overload, tuple(positional), values)
                        ran.append(overload)
                    except ToMutationError as error:
                        if error.violation.argument != argument.name or error.violation.op != str(overload):
                            missed.append((str(overload), argument.name, error.violation))
                    guard._error = None
                    if ran:
                        missed.append((str(overload), argument.name, "not raised"))
    print(f"\n{namespace}: {tried} written arguments tried, {tried - len(missed)} caught, {len(missed)} missed")
    assert missed == [], missed
    assert tried > 0 or namespace in ("inductor", "quantized", "prims", "symm_mem", "mkldnn", "_c10d_functional")


# ---- the operator samples that PyTorch tests itself with

DTYPES = (torch.float32, torch.int64, torch.bool, torch.complex64, torch.float64)


def samples(op: Any, limit: int = 3) -> Iterator[Any]:
    dtype = next((d for d in DTYPES if d in op.supported_dtypes("cpu")), None)
    if dtype is None:
        return
    for count, sample in enumerate(op.sample_inputs("cpu", dtype, requires_grad=False)):
        if count == limit:
            return
        yield sample


def parts(sample: Any) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    return sample.input, tuple(sample.args), dict(sample.kwargs)


def bytes_of(tensor: Tensor) -> Any:
    if tensor.layout != torch.strided or tensor.is_nested:
        return None
    return tensor.detach().clone().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8).tolist()


class Watch(TorchDispatchMode):
    """Compares each argument before and after each operator with what is said to be written."""

    def __init__(self) -> None:
        super().__init__()
        self.untold: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        before = [(t._version, bytes_of(t), t.shape) for t in tensors]
        result = func(*args, **kwargs)
        written = {id(t) for _, t in written_arguments(func, args, kwargs)}
        storages = {
            t.untyped_storage()._cdata for _, t in written_arguments(func, args, kwargs) if t.layout == torch.strided
        }
        for tensor, (version, content, shape) in zip(tensors, before):
            same = tensor._version == version and bytes_of(tensor) == content and tensor.shape == shape
            shares = tensor.layout == torch.strided and tensor.untyped_storage()._cdata in storages
            if not same and id(tensor) not in written and not shares:
                self.untold.add(str(func))
        return result


def test_no_operator_writes_what_it_does_not_tell() -> None:
    untold: set[str] = set()
    tried = 0
    for op in op_db:
        for sample in samples(op):
            first, args, kwargs = parts(sample)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                try:
                    with Watch() as watch:
                        op(first, *args, **kwargs)
                except Exception:
                    continue
                finally:
                    untold |= watch.untold
            tried += 1
    print(f"\n{tried} samples of {len(op_db)} operators watched, {len(untold)} write untold")
    assert untold == set(), untold
    assert tried > 1000


def clone(value: Any) -> Any:
    return tree_map_only(Tensor, lambda t: t.clone(), value)


def test_every_inplace_variant_raises_through_either_side() -> None:
    tried, missed, skipped = 0, [], []
    for op in op_db:
        inplace = op.get_inplace()
        if inplace is None:
            continue
        for sample in samples(op, 1):
            first, args, kwargs = parts(sample)
            if not isinstance(first, Tensor) or sample.broadcasts_input:
                continue
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    written = clone(first)
                    version = written._version
                    inplace(written, *clone(args), **kwargs)
            except Exception as error:
                skipped.append((op.name, str(error)[:60]))  # the sample is not for the in-place variant
                continue
            if written._version == version:  # dropout with p=0 and its like return their input
                skipped.append((op.name, "writes nothing"))
                continue
            for side in ("source", "result"):
                for copied in (False, True):
                    tried += 1
                    try:
                        with ToMutationGuard():
                            if copied and side == "source":
                                target = clone(first)
                                other = torch.float16 if first.dtype != torch.float16 else torch.float32
                                target.to(other)
                            elif copied:
                                wide = {torch.float32: torch.float64, torch.int64: torch.int32}
                                target = clone(first).to(wide.get(first.dtype, torch.int16)).to(first.dtype)
                            else:
                                target = clone(first)
                                target = target.to("cpu")
                            inplace(target, *clone(args), **kwargs)
                    except ToMutationError:
                        continue
                    missed.append((op.name, side, copied))
    print(f"\nin-place: {tried} tried, {tried - len(missed)} caught, {len(missed)} missed; {len(skipped)} not run")
    assert missed == [], missed
    assert tried > 500


def test_every_out_raises() -> None:
    tried, missed, skipped = 0, [], []
    for op in op_db:
        if not op.supports_out:
            continue
        for sample in samples(op, 6):
            first, args, kwargs = parts(sample)
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    expected = op(first, *args, **kwargs)
                    out = tree_map_only(Tensor, torch.empty_like, expected)
                    out = tuple(out) if isinstance(out, (tuple, list)) else out
                    op(first, *args, **kwargs, out=out)
            except Exception as error:
                skipped.append((op.name, str(error)[:80]))
                continue
            for place in range(len(tree_leaves(out))):
                tried += 1
                fresh = tree_map_only(Tensor, torch.empty_like, expected)
                fresh = tuple(fresh) if isinstance(fresh, (tuple, list)) else fresh
                try:
                    with ToMutationGuard():
                        tree_leaves(fresh)[place].to("cpu")
                        op(first, *args, **kwargs, out=fresh)
                except ToMutationError:
                    continue
                except Exception as error:
                    missed.append((op.name, str(error)[:80]))
                    continue
                missed.append((op.name, place))
    print(f"\nout=: {tried} tried, {tried - len(missed)} caught, {len(missed)} missed; not run: {skipped}")
    assert missed == [], missed
    assert tried > 300


# Running statistics in training mode: written with no move of a version counter.
TRULY_WRITE = {
    "_batch_norm_with_update",
    "_native_batch_norm_legit",
    "native_batch_norm",
    "nn.functional.batch_norm",
    "nn.functional.instance_norm",
}


def test_reading_a_converted_tensor_is_no_violation() -> None:
    tried, alarms = 0, []
    for op in op_db:
        for sample in samples(op, 2):
            first, args, kwargs = parts(sample)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                try:
                    plain = clone((first, args, kwargs))
                    tensors = [t for t in tree_leaves(plain) if isinstance(t, Tensor)]
                    versions = [t._version for t in tensors]
                    op(plain[0], *plain[1], **plain[2])
                except Exception:
                    continue
                if versions != [t._version for t in tensors] or op.name in TRULY_WRITE:
                    continue
                with ToMutationGuard(on_violation="record") as guard:
                    first, args, kwargs = clone(first), clone(args), clone(kwargs)
                    for tensor in tree_leaves((first, args, kwargs)):
                        if isinstance(tensor, Tensor):
                            tensor.to("cpu")
                    op(first, *args, **kwargs)
            tried += 1
            if guard.violations:
                alarms.append((op.name, str(guard.violations[0])[:300]))
    print(f"\nreading: {tried} tried, {len(alarms)} false alarms")
    assert alarms == [], alarms
    assert tried > 1000


def test_the_table_of_untold_writes_names_real_arguments() -> None:
    for name, untold in UNTOLD.items():
        namespace, operator = name.split("::")
        if not hasattr(getattr(torch.ops, namespace), operator):
            continue
        packet = getattr(getattr(torch.ops, namespace), operator)
        for overload in packet.overloads():
            names = {argument.name for argument in getattr(packet, overload)._schema.arguments}
            assert set(untold.arguments) & names, name
