"""Control flow: bodies are guarded, and the exported graph stays what it is without the guard."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
from torch import nn
from torch._export.db.examples import all_examples
from torch._higher_order_ops.associative_scan import associative_scan
from torch._higher_order_ops.map import map as torch_map
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from ways import ALL

from dispatch_guard import ToMutationError, ToMutationGuard

Tensor = torch.Tensor


def bad(x: Tensor) -> Tensor:
    y = x.to("cpu")
    y.add_(5)
    return x.sin()


def bad_local(x: Tensor) -> Tensor:
    """A write to a tensor of the body's own: functional operators accept it."""
    z = x.clone()
    y = z.to("cpu")
    y.add_(5)
    return z.sin()


def good(x: Tensor) -> Tensor:
    y = x.float() + 1
    y.add_(5)
    return y.to("cpu").sin()


def make(kind: str, body: Any) -> nn.Module:
    class Program(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("closed_over", torch.ones(3))

        def forward(self, x: Tensor) -> Any:
            outer = x * 2
            closed = self.closed_over

            def run(t: Tensor) -> Tensor:
                return body(t + closed * outer)

            if kind == "cond":
                return torch.cond(x.sum() > 0, run, torch.cos, (x,))
            if kind == "cond_false":
                return torch.cond(x.sum() > 100, torch.cos, run, (x,))
            if kind == "nested_cond":
                return torch.cond(x.sum() > 0, lambda t: torch.cond(t.max() > 0, run, torch.cos, (t,)), torch.cos, (x,))
            if kind == "while_loop":
                return while_loop(
                    lambda i, t: i < 3, lambda i, t: (i + 1, run(t)), (torch.zeros((), dtype=torch.int64), x)
                )
            if kind == "map":
                return torch_map(lambda t: run(t), torch.stack([x, x]))
            if kind == "scan":
                return scan(lambda c, t: (c + 1, run(t)), x, torch.stack([x, x]))
            if kind == "associative_scan":
                return associative_scan(lambda a, b: body(a + b), torch.stack([x, x, x]), dim=0, combine_mode="generic")
            raise AssertionError(kind)

    return Program()


KINDS = ["cond", "cond_false", "nested_cond", "while_loop", "map", "scan", "associative_scan"]
WAYS = ["eager", "no_grad", "export", "export_strict"]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_violation_in_a_body_raises(kind: str, way: str) -> None:
    torch._dynamo.reset()
    if kind == "cond_false" and way in ("eager", "no_grad"):
        x = -torch.rand(3)  # eager runs one branch only
    else:
        x = torch.rand(3)
    with pytest.raises(ToMutationError) as caught, ToMutationGuard():
        ALL[way](make(kind, bad_local), (x,))
    site, conversion = caught.value.violation.site, caught.value.violation.conversion
    assert site is not None and site.line.strip() == "y.add_(5)"
    assert conversion.site is not None and conversion.site.line.strip() == 'y = z.to("cpu")'


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_clean_body_exports_to_the_same_graph_and_computes_the_same(kind: str, way: str) -> None:
    x = torch.rand(3)
    torch._dynamo.reset()
    plain = ALL[way](make(kind, good), (x,))
    torch._dynamo.reset()
    with ToMutationGuard() as guard:
        guarded = ALL[way](make(kind, good), (x,))
    assert guard.conversions > 0
    if isinstance(plain, torch.export.ExportedProgram):
        assert text(plain) == text(guarded)
        assert metadata(plain) == metadata(guarded)
    else:
        torch.testing.assert_close(plain, guarded, rtol=0, atol=0)


@pytest.mark.parametrize("way", ["make_fx_real", "make_fx_fake", "make_fx_symbolic", "make_fx_symbolic_pre_dispatch"])
@pytest.mark.parametrize("kind", ["cond", "while_loop"])
def test_bodies_under_make_fx(kind: str, way: str) -> None:
    x = torch.rand(3)
    torch._dynamo.reset()
    plain = ALL[way](make(kind, good), (x,))
    torch._dynamo.reset()
    with ToMutationGuard() as guard:
        guarded = ALL[way](make(kind, good), (x,))
    assert guard.conversions > 0
    assert plain.print_readable(False) == guarded.print_readable(False)
    with pytest.raises(ToMutationError), ToMutationGuard():
        ALL[way](make(kind, bad_local), (x,))


@pytest.mark.parametrize("where", ["before", "after"])
@pytest.mark.parametrize("way", WAYS)
def test_a_violation_beside_an_operator_raises(way: str, where: str) -> None:
    class Program(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if where == "before":
                bad(x.clone())
            result = torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))
            return bad(result.clone())

    with pytest.raises(ToMutationError), ToMutationGuard():
        ALL[way](Program(), (torch.rand(3),))


def test_a_conversion_in_a_body_and_a_write_after_it() -> None:
    class Program(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            z = x.clone()
            w = torch.cond(x.sum() > 0, lambda t: t.to("cpu") + 1, torch.cos, (z,))
            z.add_(1)
            return w

    for way in ("export", "export_strict"):
        with pytest.raises(ToMutationError), ToMutationGuard():
            ALL[way](Program(), (torch.rand(3),))


@pytest.mark.parametrize("kind", KINDS)
def test_decompositions_under_the_guard(kind: str) -> None:
    exported = torch.export.export(make(kind, good), (torch.rand(3),))
    plain = exported.run_decompositions()
    with ToMutationGuard() as guard:
        guarded = exported.run_decompositions()
    assert guard.violations == []
    assert text(plain) == text(guarded)


def text(program: torch.export.ExportedProgram) -> str:
    return re.sub(r"<eval_with_key>\.\d+", "", program.graph_module.print_readable(False)) + str(
        program.graph_signature
    )


def metadata(program: torch.export.ExportedProgram) -> list[tuple[str, str]]:
    """All node metadata of a program and its subgraphs as text, without the counters that number every export."""
    graphs = [m for m in program.graph_module.modules() if isinstance(m, torch.fx.GraphModule)]
    return [
        (node.name, re.sub(r"<eval_with_key>\.\d+|0x[0-9a-f]+|\b\d{9,}\b", "", str(node.meta.get(key))))
        for graph in graphs
        for node in graph.graph.nodes
        for key in ("val", "stack_trace", "nn_module_stack", "torch_fn", "source_fn_stack", "custom")
    ]


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("name", all_examples())
def test_exportdb_exports_the_same_under_the_guard(name: str, strict: bool) -> None:
    example = all_examples()[name]

    def export() -> Any:
        torch._dynamo.reset()
        try:
            return torch.export.export(
                copy.deepcopy(example.model),
                example.example_args,
                example.example_kwargs,
                dynamic_shapes=example.dynamic_shapes,
                strict=strict,
            )
        except Exception as error:
            return type(error)

    plain = export()
    with ToMutationGuard() as guard:
        guarded = export()
    assert guard.violations == []
    if isinstance(plain, type):
        assert guarded is plain
    else:
        assert text(plain) == text(guarded)
        assert metadata(plain) == metadata(guarded)


def double(x: Tensor) -> Tensor:
    return x.double()


RESULTS: dict[str, Any] = {
    "cond": lambda x: torch.cond(x.sum() > 0, lambda t: t.cos().to("cpu"), torch.sin, (x,)),
    "other branch": lambda x: torch.cond(x.sum() < 0, torch.sin, lambda t: t.cos().to("cpu"), (x,)),
    "copy": lambda x: torch.cond(x.sum() > 0, lambda t: double(t.cos()), lambda t: double(t.sin()), (x,)),
    "view": lambda x: torch.cond(x.sum() > 0, lambda t: t.cos().to("cpu")[:2], lambda t: t[:2] + 1, (x,)),
    "several": lambda x: torch.cond(x.sum() > 0, lambda t: (t + 1, t.cos().float()), lambda t: (t + 2, t.sin()), (x,))[
        1
    ],
    "nested": lambda x: torch.cond(
        x.sum() > 0, lambda t: torch.cond(t.max() > 0, lambda u: u.cos().cpu(), torch.sin, (t,)), torch.sin, (x,)
    ),
    "while_loop": lambda x: while_loop(
        lambda i, t: i < 3, lambda i, t: (i + 1, t.sin().to("cpu")), (torch.zeros((), dtype=torch.int64), x)
    )[1],
    "scan": lambda x: scan(lambda c, t: ((c + t).to("cpu"), t + 1), x, torch.stack([x, x]))[0],
}


def source_in_body(t: Tensor) -> Tensor:
    z = t.cos()
    z.double()
    return z


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", [*RESULTS, "source"])
def test_a_write_to_the_result_that_a_body_converted_raises(name: str, way: str) -> None:
    class Program(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if name == "source":
                result = torch.cond(x.sum() > 0, source_in_body, torch.sin, (x,))
            else:
                result = RESULTS[name](x)
            result.add_(1)
            return result.sin()

    torch._dynamo.reset()
    x = torch.rand(3)
    branches = {"other branch"}
    if way in ("eager", "no_grad") and name in branches:
        pytest.skip("eager runs one branch, and it is this one")
    with pytest.raises(ToMutationError), ToMutationGuard():
        ALL[way](Program(), (x,))


@pytest.mark.parametrize("way", WAYS)
def test_a_conversion_that_stays_in_a_body_does_not_mark_its_result(way: str) -> None:
    class Program(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            result = torch.cond(x.sum() > 0, lambda t: t.cos().to("cpu") + 1, torch.sin, (x,))
            result.add_(1)
            return result

    torch._dynamo.reset()
    with ToMutationGuard():
        ALL[way](Program(), (torch.rand(3),))
