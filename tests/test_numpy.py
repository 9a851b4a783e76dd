"""What a user does with numpy is no conversion, though Dynamo traces it as if it were one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dispatch_guard import ToMutationError, ToMutationGuard, check_program

np = pytest.importorskip("numpy")


def from_numpy(x: Tensor) -> Tensor:
    y = torch.from_numpy(np.linspace(0.0, 1.0, 4))
    y.add_(1)
    return x + y


def from_numpy_on_one_line(x: Tensor) -> Tensor:
    return torch.from_numpy(np.linspace(0.0, 1.0, 4)).add_(1) + x


def forced(x: Tensor) -> Tensor:
    y = torch.from_numpy(x.numpy(force=True))
    y.add_(1)
    return x * 2


def forced_astype(x: Tensor) -> Tensor:
    a = x.numpy(force=True).astype(np.float32)
    y = torch.from_numpy(a)
    y.add_(1)
    return x * 2


def astype(x: Tensor) -> Tensor:
    y = torch.from_numpy(np.ones(4).astype(np.float32))
    y.mul_(2)
    return x * y


def tensor(x: Tensor) -> Tensor:
    y = torch.tensor(np.arange(4.0))
    y.add_(1)
    return x + y


def as_tensor(x: Tensor) -> Tensor:
    y = torch.as_tensor(np.arange(4.0))
    y.add_(1)
    return x + y


def as_tensor_by_keyword(x: Tensor) -> Tensor:
    y = torch.as_tensor(data=np.arange(4.0), dtype=torch.float32)
    y.add_(1)
    return x + y


def asarray(x: Tensor) -> Tensor:
    y = torch.asarray(np.arange(4.0))
    y.add_(1)
    return x + y


def as_tensor_of_an_ndarray_of_a_tensor(x: Tensor) -> Tensor:
    y = torch.as_tensor(x.sin().numpy() + 1)
    y.add_(1)
    return x + y


def written_before(x: Tensor) -> Tensor:
    a = np.zeros(4)
    a[0] = 3
    y = torch.from_numpy(a)
    y[1] = 4
    return x + y


CLEAN: list[Callable[[Tensor], Tensor]] = [
    from_numpy,
    from_numpy_on_one_line,
    forced,
    forced_astype,
    astype,
    tensor,
    as_tensor,
    as_tensor_by_keyword,
    asarray,
    as_tensor_of_an_ndarray_of_a_tensor,
    written_before,
]


def converted_after(x: Tensor) -> Tensor:
    y = torch.from_numpy(np.arange(4.0)).to("cpu")
    y.add_(1)
    return x + y


def as_tensor_of_a_tensor(x: Tensor) -> Tensor:
    offset = torch.from_numpy(np.arange(4.0))
    y = torch.as_tensor(x)
    y.add_(offset)
    return x + y


def detached_and_moved(x: Tensor) -> Tensor:
    y = x.detach().cpu()
    y.add_(1)
    return x.sin()


def beside_numpy_on_one_line(x: Tensor) -> Tensor:
    y = x.detach().cpu().add_(torch.from_numpy(np.ones(4, dtype=np.float32)))
    return x + y


cpu = Tensor.cpu


def under_another_name(x: Tensor) -> Tensor:
    y = cpu(x).add_(torch.from_numpy(np.ones(4, dtype=np.float32)))
    return x + y


def by_attribute(x: Tensor) -> Tensor:
    y = getattr(x, "cpu")().add_(torch.from_numpy(np.ones(4, dtype=np.float32)))  # noqa: B009
    return x + y


VIOLATING: list[Callable[[Tensor], Tensor]] = [
    converted_after,
    as_tensor_of_a_tensor,
    detached_and_moved,
    beside_numpy_on_one_line,
    under_another_name,
    by_attribute,
]


class Module(nn.Module):
    def __init__(self, program: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.program = program

    def forward(self, x: Tensor) -> Tensor:
        return self.program(x)


class Decorated(Module):
    @ToMutationGuard()
    def forward(self, x: Tensor) -> Tensor:
        return self.program(x)


def example() -> tuple[Tensor]:
    return (torch.ones(4),)


def guarded(run: Callable[[nn.Module], Any]) -> Callable[[Any], None]:
    def verdict(program: Any) -> None:
        with ToMutationGuard():
            run(Module(program))

    return verdict


def of_graph(strict: bool) -> Callable[[Any], None]:
    def verdict(program: Any) -> None:
        found = check_program(torch.export.export(Module(program), example(), strict=strict))
        if found:
            raise ToMutationError(found[0])

    return verdict


def decomposed(program: Any) -> None:
    exported = torch.export.export(Module(program), example(), strict=True)
    with ToMutationGuard():
        exported.run_decompositions()


def under_dynamo(program: Any) -> None:
    torch._dynamo.reset()
    torch.compile(Decorated(program), backend="eager", fullgraph=True)(*example())


VERDICTS: dict[str, Callable[[Any], None]] = {
    "eager": guarded(lambda module: module(*example())),
    "export": guarded(lambda module: torch.export.export(module, example())),
    "export_strict": guarded(lambda module: torch.export.export(module, example(), strict=True)),
    "decorated_strict": lambda program: torch.export.export(Decorated(program), example(), strict=True) and None,
    "decorated_compiled": under_dynamo,
    "graph": of_graph(False),
    "graph_strict": of_graph(True),
    "decomposed_strict": decomposed,
}


def refused(program: Callable[[Tensor], Tensor], verdict: str) -> bool:
    """Tensors that are being traced have no numpy(), with or without a guard (torch 2.10 to 2.15)."""
    traced = verdict in ("export", "graph")
    return traced and program in (forced, forced_astype, as_tensor_of_an_ndarray_of_a_tensor)


@pytest.mark.filterwarnings("ignore:To copy construct from a tensor")
@pytest.mark.parametrize("verdict", VERDICTS)
@pytest.mark.parametrize("program", CLEAN)
def test_numpy_is_no_conversion(program: Callable[[Tensor], Tensor], verdict: str) -> None:
    if refused(program, verdict):
        pytest.skip("torch refuses it without a guard")
    VERDICTS[verdict](program)


@pytest.mark.parametrize("verdict", VERDICTS)
@pytest.mark.parametrize("program", VIOLATING)
def test_conversions_beside_it_are(program: Callable[[Tensor], Tensor], verdict: str) -> None:
    with pytest.raises(ToMutationError) as caught:
        VERDICTS[verdict](program)
    with pytest.raises(ToMutationError) as eager:
        VERDICTS["eager"](program)
    found, expected = caught.value.violation, eager.value.violation
    if program not in (under_another_name, by_attribute):  # whose text does not tell what is converted
        assert found.conversion.call == expected.conversion.call
    if verdict != "graph" and program in (
        converted_after,
        as_tensor_of_a_tensor,
        detached_and_moved,
    ):  # which tells where forward() calls `program`, and not what that is
        assert (found.conversion.site, found.site) == (expected.conversion.site, expected.site)


class Either(nn.Module):
    def __init__(self, numpy: bool) -> None:
        super().__init__()
        self.numpy = numpy

    def given(self, x: Tensor) -> Any:
        return np.arange(4.0) if self.numpy else x

    def forward(self, x: Tensor) -> Tensor:
        y = torch.as_tensor(self.given(x))
        y.add_(1)
        return x + y


def test_what_was_an_ndarray_in_one_export_is_a_tensor_in_the_next() -> None:
    with pytest.raises(ToMutationError), ToMutationGuard():
        torch.export.export(Either(True), example(), strict=True)
        torch.export.export(Either(False), example(), strict=True)


def test_in_the_body_of_control_flow() -> None:
    class Branch(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            def yes(t: Tensor) -> Tensor:
                y = torch.from_numpy(np.ones(4).astype(np.float32))
                y.add_(1)
                return t + y

            return torch.cond(x.sum() > 0, yes, torch.cos, (x,))

    for strict in (False, True):
        with ToMutationGuard() as guard:
            torch.export.export(Branch(), example(), strict=strict).run_decompositions()
        assert guard.conversions == 0
        assert check_program(torch.export.export(Branch(), example(), strict=strict)) == []


def test_a_tensor_and_its_ndarray_on_one_line() -> None:
    class Walrus(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            (y := x.detach().cpu()).numpy()
            y.add_(1)
            return x + y

    with pytest.raises(ToMutationError), ToMutationGuard():
        torch.export.export(Walrus(), example(), strict=True)
    assert len(check_program(torch.export.export(Walrus(), example(), strict=True))) == 1


def test_a_graph_has_no_notes_of_ours() -> None:
    with ToMutationGuard():
        exported = torch.export.export(Module(from_numpy), example(), strict=True)
    bare = torch.export.export(Module(from_numpy), example(), strict=True)
    keys = [[sorted(node.meta) for node in program.graph.nodes] for program in (exported, bare)]
    assert keys[0] == keys[1] and not any("dispatch_guard" in names for names in keys[0])
