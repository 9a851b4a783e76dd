"""Captured conversions: each one is an ``aten._to_copy`` that stays, says what was asked for, and changes no value."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import ways
from hypothesis import HealthCheck, given, settings
from reported_cases import CLEAN, RAISES
from test_control_flow import KINDS, bad_local, good, make
from test_properties import Step, programs, run
from torch import fx, nn
from torch._decomp import core_aten_decompositions, decomposition_table
from torch._export.db.examples import all_examples
from torch._higher_order_ops.associative_scan import associative_scan
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import Dim, ExportedProgram
from torch.export.passes import move_to_device_pass
from torch.utils import _pytree as pytree

import dispatch_guard
from dispatch_guard import ToMutationError, ToMutationGuard, Violation, allow_mutation
from dispatch_guard.capture import CapturedProgram, capture_conversions, check_program, export

Tensor = torch.Tensor
TO_COPY = torch.ops.aten._to_copy.default


def exported(mod: nn.Module, *args: Any, **options: Any) -> ExportedProgram:
    torch._dynamo.reset()
    return torch.export.export(mod, args, **options)


def nodes(program: ExportedProgram, target: Any = TO_COPY) -> list[fx.Node]:
    graphs = [module.graph for module in program.graph_module.modules() if isinstance(module, fx.GraphModule)]
    return [node for graph in graphs for node in graph.nodes if node.target is target]


def note(node: fx.Node) -> dict[str, Any]:
    found: dict[str, Any] = node.meta.get("custom", {}).get("dispatch_guard", {})
    return found


def same(one: Any, other: Any) -> bool:
    leaves, others = pytree.tree_leaves(one), pytree.tree_leaves(other)
    return len(leaves) == len(others) and all(
        torch.equal(a, b) and a.dtype == b.dtype if isinstance(a, Tensor) else a == b for a, b in zip(leaves, others)
    )


class Many(nn.Module):
    """Conversions of every kind: aliases and copies, in a chain, unused, by torch itself, and asked-for copies."""

    def forward(self, x: Tensor, i: Tensor) -> tuple[Tensor, ...]:
        a = x.to("cpu")
        b = a.float()
        c = b.double()
        d = i.type_as(x)
        e = i.to(x)
        f = torch.as_tensor(x) + 1
        x.to(torch.float16)  # nobody uses it
        g = torch.softmax(x, -1, dtype=torch.float64)
        h = x.to("cpu", copy=True)
        return a + 1, b.sin(), c + 1, d + 1, e + 1, f, g, h


MANY = (torch.randn(3), torch.arange(3))
WRITTEN_IN_MANY = 7
DROPPED_IN_MANY = 4  # by run_decompositions() without capture: three that change nothing, one that nobody uses


class Bodies(nn.Module):
    def forward(self, x: Tensor) -> Any:
        with torch.no_grad():
            y = x.to("cpu").half()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            z = x.reshape(1, -1) @ x.float().reshape(-1, 1)
        w = torch.cond(x.sum() > 0, lambda t: t.to("cpu").sin(), lambda t: t.double().float(), (x,))
        return y + 1, z, w


WRITTEN_IN_BODIES = 6
DROPPED_IN_BODIES = 3


# ---- one node for each written conversion, and it stays


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(
    "module, args, written", [(Many(), MANY, WRITTEN_IN_MANY), (Bodies(), MANY[:1], WRITTEN_IN_BODIES)]
)
def test_every_written_conversion_is_one_node(
    module: nn.Module, args: tuple[Tensor, ...], written: int, strict: bool
) -> None:
    ep = exported(module, *args, strict=strict)
    captured = capture_conversions(ep)
    assert captured.captured == written == sum(bool(note(node)) for node in nodes(captured))
    assert same(captured.module()(*args), module(*args))


def tables() -> dict[str, Callable[[], Any]]:
    return {
        "default": lambda: None,
        "empty": dict,
        "exports": torch.export.default_decompositions,
        "core": core_aten_decompositions,
        "all": lambda: dict(decomposition_table),
    }


@pytest.mark.parametrize("table", tables())
@pytest.mark.parametrize(
    "module, args, written, dropped",
    [(Many(), MANY, WRITTEN_IN_MANY, DROPPED_IN_MANY), (Bodies(), MANY[:1], WRITTEN_IN_BODIES, DROPPED_IN_BODIES)],
)
def test_nodes_survive_any_decomposition_table(
    module: nn.Module, args: tuple[Tensor, ...], written: int, dropped: int, table: str
) -> None:
    ep = exported(module, *args)
    captured = capture_conversions(ep)
    decomposed = captured.run_decompositions(tables()[table]())
    assert isinstance(decomposed, CapturedProgram) and decomposed.captured == written
    if isinstance(module, Many):  # bodies that are inlined, as those of no_grad, lose their notes but not their nodes
        assert sum(bool(note(node)) for node in nodes(decomposed)) == written
    rules = tables()[table]()
    if table == "all":
        rules = {op: rule for op, rule in rules.items() if op is not TO_COPY}
    plain = ep.run_decompositions(rules)
    if table in ("empty", "all"):  # these leave type_as as it is
        assert len(nodes(plain, torch.ops.aten.type_as.default)) == isinstance(module, Many)
        dropped += isinstance(module, Many)
    assert len(nodes(decomposed)) == len(nodes(plain)) + dropped
    assert same(decomposed.module()(*args), plain.module()(*args))


def test_torch_alone_keeps_only_those_that_copy() -> None:
    """What all this is for: if it fails, torch has changed."""
    assert len(nodes(exported(Many(), *MANY).run_decompositions())) == 5  # double, type_as, to(x), softmax's, copy=True
    assert len(nodes(capture_conversions(exported(Many(), *MANY)).run_decompositions())) == WRITTEN_IN_MANY + 2


def test_a_conversion_that_leads_nowhere_stays() -> None:
    class Dead(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            x.double().sin().cos()
            scratch = torch.zeros(3)
            scratch.add_(x.to("cpu"))
            return x + 1

    captured = capture_conversions(exported(Dead(), torch.randn(3)))
    assert len(nodes(captured)) == len(nodes(captured.run_decompositions())) == 2


def test_a_program_saved_and_loaded_is_still_captured() -> None:
    buffer = io.BytesIO()
    torch.export.save(capture_conversions(exported(Bodies(), MANY[0])), buffer)
    buffer.seek(0)
    loaded = torch.export.load(buffer)
    assert sum(bool(note(node)) for node in nodes(loaded)) == WRITTEN_IN_BODIES
    assert {note(node)["call"] for node in nodes(loaded)} == {"Tensor." + n for n in ("to", "half", "float", "double")}
    assert len(nodes(loaded.run_decompositions())) >= WRITTEN_IN_BODIES
    again = capture_conversions(loaded)
    assert isinstance(again, CapturedProgram) and again.captured == WRITTEN_IN_BODIES
    assert same(again.module()(MANY[0]), Bodies()(MANY[0]))


def test_a_loaded_program_is_captured_and_checked() -> None:
    buffer = io.BytesIO()
    torch.export.save(exported(Many(), *MANY), buffer)
    buffer.seek(0)
    assert capture_conversions(torch.export.load(buffer)).captured == WRITTEN_IN_MANY
    buffer = io.BytesIO()
    torch.export.save(exported(RAISES[0][2](), *RAISES[0][3]()), buffer)
    buffer.seek(0)
    (violation,) = check_program(torch.export.load(buffer))
    assert violation.op == "aten.add_.Tensor" and violation.site is not None and "y.add_(5)" in violation.site.line


def test_unflattened_and_exported_again_the_nodes_are_there() -> None:
    captured = capture_conversions(exported(Many(), *MANY))
    unflattened = torch.export.unflatten(captured)
    graphs = [module.graph for module in unflattened.modules() if hasattr(module, "graph")]
    assert sum(node.target is TO_COPY for graph in graphs for node in graph.nodes) == WRITTEN_IN_MANY
    assert same(unflattened(*MANY), Many()(*MANY))
    again = exported(captured.module(), *MANY)
    assert len(nodes(again)) == WRITTEN_IN_MANY
    assert len(nodes(again.run_decompositions())) == WRITTEN_IN_MANY + 2


@pytest.mark.parametrize("first", ["move", "decompose"])
def test_moved_to_another_device_every_conversion_goes_there(first: str) -> None:
    captured = capture_conversions(exported(Many(), *MANY))
    if first == "decompose":
        moved = move_to_device_pass(captured.run_decompositions(), "meta")
    else:
        moved = move_to_device_pass(captured, "meta").run_decompositions()
    copies = nodes(moved)
    assert len(copies) == WRITTEN_IN_MANY + 2
    assert {str(node.kwargs["device"]) for node in copies if "device" in node.kwargs} == {"meta"}
    outputs = moved.module()(*(arg.to("meta") for arg in MANY))
    assert {output.device.type for output in outputs} == {"meta"}


def test_moving_the_captured_program_leaves_the_given_one() -> None:
    class Buffered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("b", torch.ones(3))

        def forward(self, x: Tensor) -> Tensor:
            return x.to("cpu") + self.b  # type: ignore[operator]

    ep = exported(Buffered(), torch.randn(3))
    move_to_device_pass(capture_conversions(ep), "meta")
    assert ep.state_dict["b"].device.type == "cpu"


@pytest.mark.filterwarnings("ignore")
def test_inductor_compiles_it_ahead_of_time(tmp_path: Any) -> None:
    captured = capture_conversions(exported(Many(), *MANY))
    try:
        path = torch._inductor.aoti_compile_and_package(captured, package_path=str(tmp_path / "model.pt2"))
    except Exception as error:  # no C++ compiler, or none that works
        if "compiler" in str(error).lower():
            pytest.skip(str(error))
        raise
    loaded = torch._inductor.aoti_load_package(path)
    for got, want in zip(loaded(*MANY), Many()(*MANY)):
        torch.testing.assert_close(got, want)


@pytest.mark.filterwarnings("ignore")
def test_onnx_exports_it() -> None:
    pytest.importorskip("onnxscript")
    captured = capture_conversions(exported(Many(), *MANY))
    program = torch.onnx.export(captured, dynamo=True, verbose=False)
    assert program is not None
    casts = [node for node in program.model.graph if node.op_type in ("Cast", "Identity")]
    assert casts


# ---- values, strides, shapes, signature, metadata


class Gaps(nn.Module):
    """Conversions of memory with gaps and overlaps: a copy is laid out in its own way."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        a = x[:, ::2].to("cpu")
        b = x[:1].expand(3, -1).float()
        with torch.no_grad():
            c = a.t()
            d = x[:, 1::2].to("cpu")
        e = torch.cond(x.sum() > 0, lambda t: t * 2, lambda t: t * 3, (a,))
        return a.transpose(0, 1).sin(), b * 2, a.reshape(-1), b.t().contiguous(), c + 1, d.t(), e


@pytest.mark.parametrize("dynamic", [False, True])
def test_metadata_tells_the_strides_of_the_copies(dynamic: bool) -> None:
    x = torch.randn(4, 6)
    ep = exported(Gaps(), x, dynamic_shapes=({0: Dim("n", min=2)},) if dynamic else None)
    captured = capture_conversions(ep)
    assert captured.captured == 3
    checked = []

    class Check(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            result = super().run_node(n)
            expected = n.meta.get("val")
            if isinstance(result, Tensor) and n.op == "call_function":
                assert [str(s) for s in expected.stride()] == [str(s) for s in result.stride()], n.format_node()
                checked.append(n)
            return result

    if not dynamic:
        Check(captured.graph_module).run(x)
        assert len(checked) > 6
    assert same(captured.module()(x), Gaps()(x))
    for size in (4, 7) if dynamic else (4,):
        x = torch.randn(size, 6)
        assert same(captured.module()(x), Gaps()(x))
        assert same(captured.run_decompositions().module()(x), Gaps()(x))
    assert captured.range_constraints == ep.range_constraints


def test_the_given_program_is_untouched_and_the_rest_is_equal() -> None:
    ep = exported(Bodies(), MANY[0])
    before = (str(ep), [dict(node.meta) for node in _all(ep)], copy.deepcopy(ep.graph_signature))
    captured = capture_conversions(ep)
    assert (str(ep), [dict(node.meta) for node in _all(ep)], ep.graph_signature) == before
    assert captured.graph_signature == ep.graph_signature
    assert str(captured.call_spec) == str(ep.call_spec)
    for old, new in zip(_all(ep), _all(captured)):
        assert (old.name, old.op) == (new.name, new.op)
        for key in ("stack_trace", "nn_module_stack", "torch_fn"):
            assert old.meta.get(key) == new.meta.get(key)
        if new.target is TO_COPY:  # a tensor of its own, for whoever looks at values for memory
            source, value = new.args[0].meta["val"], new.meta["val"]  # type: ignore[union-attr]
            assert source.untyped_storage()._cdata != value.untyped_storage()._cdata
            assert (old.meta["val"].shape, old.meta["val"].dtype) == (value.shape, value.dtype)
        else:
            assert old.target == new.target
    captured.validate()


def _all(program: ExportedProgram) -> list[fx.Node]:
    graphs = [module.graph for module in program.graph_module.modules() if isinstance(module, fx.GraphModule)]
    return [node for graph in graphs for node in graph.nodes]


@pytest.mark.parametrize("assigns", [False, True])
def test_mutations_of_inputs_and_buffers_stay(assigns: bool) -> None:
    class Mutating(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.assigns = assigns
            self.register_buffer("count", torch.zeros(3))
            self.register_buffer("seen", torch.zeros(3))

        def forward(self, x: Tensor) -> Tensor:
            self.count.add_(1)  # type: ignore[operator]
            if self.assigns:
                self.seen = self.count.to("cpu")  # type: ignore[operator]  # an assignment is no write
            else:  # both at once are too much for torch: "User output mul is not in the correct order" (2.13, 2.14)
                x.mul_(2)
            return x.to(torch.float32) + self.count.double()  # type: ignore[operator]

    assert check_program(exported(Mutating(), torch.ones(3), strict=True)) == []
    ep = exported(Mutating(), torch.ones(3))
    assert check_program(ep) == []
    captured = capture_conversions(ep)
    assert captured.captured == 2 + assigns
    decomposed = captured.run_decompositions()
    signature = decomposed.graph_signature
    assert set(signature.buffers_to_mutate.values()) == ({"count", "seen"} if assigns else {"count"})
    assert list(signature.user_inputs_to_mutate.values()) == ([] if assigns else ["x"])
    for program in (captured, decomposed):
        module, reference = copy.deepcopy(program).module(), Mutating()
        x, y = torch.ones(3), torch.ones(3)
        assert torch.equal(module(x), reference(y)) and torch.equal(x, y)
        assert torch.equal(module.seen, reference.seen) and torch.equal(module.count, reference.count)


def test_unbacked_sizes_stay_what_they_are() -> None:
    class Unbacked(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x[:, ::2].to("cpu")
            return y.nonzero().float() + y[y > 0].sum()

    x = torch.randn(4, 6)
    ep = exported(Unbacked(), x)
    captured = capture_conversions(ep)
    assert captured.captured == 2
    sizes = [[str(node.meta["val"].shape) for node in nodes(p, torch.ops.aten.nonzero.default)] for p in (ep, captured)]
    assert sizes[0] == sizes[1] and "u0" in sizes[0][0]
    assert same(captured.run_decompositions().module()(x), Unbacked()(x))


# ---- what the user asked for


def asked(call: Callable[[Tensor, Tensor], Tensor]) -> dict[str, Any]:
    class Program(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return call(x, y) + 1

    ep = exported(Program(), torch.randn(1, 2, 3, 4), torch.arange(3.0, dtype=torch.float64))
    (node,) = nodes(capture_conversions(ep))
    return dict(node.kwargs)


CPU = torch.device("cpu")
LAID_OUT = {"memory_format": torch.preserve_format}  # the default; fake tensors need to be told


@pytest.mark.parametrize(
    "call, arguments",
    [
        (lambda x, y: x.to("cpu"), {"device": CPU, **LAID_OUT}),
        (lambda x, y: x.cpu(), {"device": CPU, **LAID_OUT}),
        (lambda x, y: x.to(device="cpu", non_blocking=True), {"device": CPU, "non_blocking": True, **LAID_OUT}),
        (lambda x, y: x.float(), {"dtype": torch.float32}),
        (lambda x, y: x.double(), {"dtype": torch.float64}),
        (lambda x, y: x.to(torch.float16), {"dtype": torch.float16}),
        (lambda x, y: x.type(torch.float32), {"dtype": torch.float32}),
        (lambda x, y: x.to("cpu", torch.float32), {"device": CPU, "dtype": torch.float32}),
        (lambda x, y: x.to(memory_format=torch.channels_last), {"memory_format": torch.channels_last}),
        (lambda x, y: x.to(y), {"device": CPU, "dtype": torch.float64}),
        (lambda x, y: x.type_as(y), {"device": CPU, "dtype": torch.float64}),
        (lambda x, y: torch.as_tensor(x), LAID_OUT),
        (lambda x, y: torch.as_tensor(x, dtype=torch.float64), {"dtype": torch.float64}),
        (lambda x, y: torch.ops.aten.to(x, torch.float16), {"dtype": torch.float16}),
        (lambda x, y: torch.ops.aten.to.other(x, y), {"device": CPU, "dtype": torch.float64}),
        (lambda x, y: torch.ops.aten._cast_Float(x), {"dtype": torch.float32}),
        (lambda x, y: x.to_dense(), LAID_OUT),
    ],
)
def test_the_node_has_the_arguments_that_were_given(
    call: Callable[[Tensor, Tensor], Tensor], arguments: dict[str, Any]
) -> None:
    assert asked(call) == arguments


def test_a_note_says_the_call_and_what_is_followed() -> None:
    class Follow(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return x.type_as(y) + 1

    (node,) = nodes(capture_conversions(exported(Follow(), torch.randn(3), torch.arange(3))))
    assert note(node) == {
        "call": "Tensor.type_as",
        "alias": False,
        "asked": {"dtype": "int64", "device": "cpu"},
        "follows": "y",
    }


@pytest.mark.parametrize("strict", [False, True])
def test_conversions_hang_on_what_was_converted(strict: bool) -> None:
    class Chain(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            a = x.to("cpu")
            b = x.float()
            c = b.to("cpu")
            d = x.double()
            return a + 1, b + 1, c + 1, d

    a, b, c, d = nodes(capture_conversions(exported(Chain(), torch.randn(3), strict=strict)))
    assert [node.args[0] for node in (b, c, d)] == [a.args[0], b, a.args[0]]
    assert str(a.args[0]) == "x"


# ---- unsafe conversions, returned results


@pytest.mark.parametrize("name, _, module, args", RAISES)
def test_unsafe_conversions_are_refused_or_kept(name: str, _: str, module: Any, args: Any) -> None:
    ep = exported(module(), *args())
    with pytest.raises(ToMutationError) as caught:
        capture_conversions(ep)
    violation = caught.value.violation
    assert violation.site is not None and violation.conversion.site is not None
    captured = capture_conversions(ep, on_unsafe="keep")
    assert captured.kept[0] == violation
    inputs = args()
    assert same(captured.module()(*copy.deepcopy(inputs)), ep.module()(*copy.deepcopy(inputs)))


def test_only_the_unsafe_ones_are_kept() -> None:
    class Both(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            a = x.to("cpu")
            a.add_(1)
            return x.sin(), y.to("cpu").sin()

    captured = capture_conversions(exported(Both(), torch.ones(3), torch.ones(3)), on_unsafe="keep")
    assert captured.captured == 1 and str(nodes(captured)[0].args[0]) == "y"
    assert len(nodes(captured, torch.ops.aten.to.dtype_layout)) == 1
    assert [violation.op for violation in captured.kept] == ["aten.add_.Tensor"]
    assert [violation.op for violation in captured.run_decompositions().kept] == ["aten.add_.Tensor"]


class Returns(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return x.to("cpu")[:1], x.double(), x.sin().float() + 1


def test_a_returned_alias_is_captured_and_noted() -> None:
    captured = capture_conversions(exported(Returns(), torch.randn(3)))
    assert [conversion.text for conversion in captured.returned] == ['x.to("cpu")']
    assert ["returned" in note(node) for node in nodes(captured)] == [True, False, False]
    x = torch.randn(3)
    output = captured.module()(x)[0]
    assert output.untyped_storage()._cdata != x.untyped_storage()._cdata


def test_a_returned_alias_is_left_on_request() -> None:
    captured = capture_conversions(exported(Returns(), torch.randn(3)), returned="keep")
    assert captured.captured == 2 and len(captured.returned) == 1
    x = torch.randn(3)
    output = captured.module()(x)[0]
    assert output.untyped_storage()._cdata == x.untyped_storage()._cdata


# ---- bad input


def test_capturing_twice_changes_nothing() -> None:
    captured = capture_conversions(exported(Bodies(), MANY[0]))
    again = capture_conversions(captured)
    assert str(again) == str(captured) and again.captured == captured.captured
    decomposed = captured.run_decompositions()
    assert str(capture_conversions(decomposed)) == str(decomposed)


@pytest.mark.parametrize("function", [capture_conversions, check_program])
def test_bad_programs_are_named(function: Callable[[Any], Any]) -> None:
    with pytest.raises(TypeError, match=r"takes a torch\.export\.ExportedProgram, not Many"):
        function(Many())
    with pytest.raises(ValueError, match=r"this one has been through run_decompositions\(\) \(its dialect is ATEN\)"):
        function(exported(Many(), *MANY).run_decompositions())


@pytest.mark.parametrize("options", [{"on_unsafe": "warn"}, {"returned": "drop"}, {"on_unsafe": None}])
def test_bad_choices_are_named(options: Any) -> None:
    name, value = next(iter(options.items()))
    with pytest.raises(ValueError, match=f"{name} must be one of '.*', not {value!r}"):
        capture_conversions(exported(Many(), *MANY), **options)
    with pytest.raises(ValueError, match=f"{name} must be one of '.*', not {value!r}"):
        export(Many(), MANY, **options)


def test_a_body_that_is_called_in_an_unknown_way_is_refused() -> None:
    ep = exported(make("scan", good), torch.randn(3))
    body = next(m for m in ep.graph_module.modules() if isinstance(m, fx.GraphModule) and m is not ep.graph_module)
    first = next(iter(body.graph.nodes))
    with body.graph.inserting_before(first):
        body.graph.placeholder("one_more")
    before = str(ep)
    with pytest.raises(ValueError, match="in the body of an operator that is not known"):
        capture_conversions(ep)
    assert str(ep) == before


# ---- in one step


def test_export_guards_and_captures() -> None:
    program = export(Many(), MANY)
    assert isinstance(program, ExportedProgram) and program.captured == WRITTEN_IN_MANY
    with pytest.raises(ToMutationError):
        export(RAISES[0][2](), RAISES[0][3]())
    assert len(export(RAISES[0][2](), RAISES[0][3](), on_unsafe="keep").kept) == 1


def test_export_takes_the_options_of_torch_export() -> None:
    class Named(nn.Module):
        def forward(self, x: Tensor, *, y: Tensor) -> Tensor:
            return x.float() + y

    shapes = {"x": {0: Dim("n")}, "y": {0: Dim("n")}}
    program = export(Named(), (torch.randn(4),), {"y": torch.randn(4)}, dynamic_shapes=shapes, strict=True)
    assert program.module()(torch.randn(9), y=torch.randn(9)).shape == (9,)


def test_export_keeps_what_is_allowed() -> None:
    class Allowed(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            y = x.to("cpu")
            with allow_mutation("x is not used again"):
                y.add_(1)
            return y * 2, y.double()

    program = export(Allowed(), (torch.ones(3),))
    assert len(program.kept) == 1 and program.captured == 1


# ---- the verdict from the graph alone


def verdicts(violations: Any, places: bool = True) -> list[Any]:
    """Each different violation, as the guard and the graph both can tell it."""
    found = []
    for violation in violations:
        conversion = violation.conversion
        found.append(
            (violation.op, violation.argument, violation.role, conversion.call, conversion.copied)
            + ((violation.site, conversion.site, violation.module, violation.help) if places else ())
        )
    return list(dict.fromkeys(found))


def guarded(module: nn.Module, args: tuple[Any, ...], **options: Any) -> tuple[ExportedProgram, list[Violation]]:
    torch._dynamo.reset()
    with ToMutationGuard(on_violation="record") as guard:
        program = torch.export.export(module, args, **options)
    return program, guard.violations


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("name, _, module, args", RAISES + CLEAN)
def test_a_reported_case_is_judged_as_the_guard_does(name: str, _: str, module: Any, args: Any, strict: bool) -> None:
    program, violations = guarded(module(), args(), strict=strict)
    found = check_program(program)
    assert verdicts(found) == verdicts(violations)
    assert bool(found) == ((name, _, module, args) in RAISES)
    assert pickle.loads(pickle.dumps(found)) == found


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("body", [good, bad_local])
@pytest.mark.parametrize("kind", KINDS)
def test_bodies_are_judged_as_the_guard_does(kind: str, body: Any, strict: bool) -> None:
    program, violations = guarded(make(kind, body), (torch.randn(3),), strict=strict)
    found = check_program(program)
    if strict:
        assert verdicts(found) == verdicts(violations)
    else:  # it keeps no places inside bodies: those of Dynamo's code for them lead nowhere
        assert {(v.op, v.argument) for v in found} == {(v.op, v.argument) for v in violations}


@pytest.mark.parametrize("name", all_examples())
def test_an_example_of_export_is_judged_as_the_guard_does(name: str) -> None:
    case = all_examples()[name]
    if name == "assume_constant_result":  # a conversion that the guard takes for torch's, as the example lies in torch
        pytest.skip("converts within torch")
    torch._dynamo.reset()
    try:
        with ToMutationGuard(on_violation="record") as guard:
            program = torch.export.export(
                case.model, case.example_args, case.example_kwargs, dynamic_shapes=case.dynamic_shapes
            )
    except Exception as error:
        pytest.skip(f"does not export: {type(error).__name__}")
    assert verdicts(check_program(program)) == verdicts(guard.violations)
    captured = capture_conversions(program)
    assert captured.captured == guard.conversions
    assert str(captured.graph_signature) == str(program.graph_signature)
    captured.run_decompositions()


class OutOfABody(nn.Module):
    """The write is outside of the body that converts."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone()
        if self.kind == "cond":
            y = torch.cond(x.sum() > 0, lambda t: t.double(), lambda t: t.double() + 1, (x,))
        elif self.kind == "no_grad":
            with torch.no_grad():
                y = x.to("cpu")
        else:
            y = x.to("cpu")
            with torch.no_grad():
                return x.add_(1) + y
        y.add_(1)
        return y


@pytest.mark.parametrize("kind", ["cond", "no_grad", "into no_grad"])
def test_memory_is_followed_through_bodies(kind: str) -> None:
    (violation,) = check_program(exported(OutOfABody(kind), torch.randn(3)))
    assert violation.op == "aten.add_.Tensor"


def test_the_body_of_a_scan_on_another_device_is_followed() -> None:
    class Scan(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return associative_scan(lambda a, b: (a + b).float(), x, dim=0, combine_mode="pointwise")

    with FakeTensorMode(allow_non_fake_inputs=True):
        x = torch.empty(4, 3, device="cuda")
    ep = exported(Scan(), x)
    assert nodes(ep, torch.ops.higher_order.associative_scan)
    assert check_program(ep) == []
    assert capture_conversions(ep).captured == 1


def aliasing(name: str) -> Callable[[Tensor], Tensor]:
    through: dict[str, Callable[[Tensor], Tensor]] = {
        "view": lambda t: t.view(-1),
        "reshape": lambda t: t.reshape(-1),
        "reshape that copies": lambda t: t.t().reshape(-1),
        "contiguous": lambda t: t.contiguous(),
        "contiguous that copies": lambda t: t.t().contiguous(),
        "dropout": lambda t: nn.functional.dropout(t, 0.5, False),
        "dropout that copies": lambda t: nn.functional.dropout(t, 0.5, True),
        "split": lambda t: t.split(1)[0],
        "unsafe_split": lambda t: torch.unsafe_split(t, 1)[0],
        "unsafe_chunk": lambda t: torch.unsafe_chunk(t, 2)[0],
        "atleast_1d": lambda t: torch.atleast_1d(t),
        "expand_as": lambda t: t.expand_as(t),
        "topk": lambda t: t.topk(1)[0],
        "meshgrid": lambda t: torch.meshgrid(t[0], t[1], indexing="ij")[0],
        "unbind": lambda t: t.unbind()[1],
        "detach": lambda t: t.detach(),
        "real": lambda t: torch.view_as_complex(t).real,
        "einsum": lambda t: torch.einsum("ij->ji", t),
    }
    return through[name]


COPYING = ["reshape that copies", "contiguous that copies", "dropout that copies", "topk"]
ALIASING = ["view", "reshape", "contiguous", "dropout", "split", "unsafe_split", "unsafe_chunk", "atleast_1d"] + [
    "expand_as",
    "unbind",
    "detach",
    "real",
    "einsum",
]


@pytest.mark.parametrize("name", ALIASING + COPYING)
def test_views_are_followed_whatever_the_schema_says(name: str) -> None:
    class Through(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = (x + 1).to("cpu")
            aliasing(name)(y).mul_(2)
            return y.sum()

    x = torch.randn(2, 2)
    with ToMutationGuard(on_violation="record") as guard:
        Through()(x)
    assert bool(guard.violations) == (name in ALIASING)
    assert verdicts(check_program(exported(Through(), x))) == verdicts(guard.violations)


def test_writes_that_no_schema_tells_are_seen() -> None:
    class Norm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(3)

        def forward(self, x: Tensor) -> Any:
            before = self.norm.running_mean.to("cpu")  # type: ignore[union-attr]
            return self.norm(x), before + 1

    program, violations = guarded(Norm().train(), (torch.randn(4, 3),))
    (violation,), (found,) = violations, check_program(program)  # the guard sees the operator that this one is made of
    assert (found.argument, found.role, found.module) == (violation.argument, violation.role, violation.module)
    assert found.site is not None and violation.site is not None and found.site.lineno == violation.site.lineno
    assert found.conversion.site == violation.conversion.site
    program, violations = guarded(Norm().eval(), (torch.randn(4, 3),))
    assert check_program(program) == violations == []


def test_tied_parameters_are_one_memory() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("a", torch.ones(3))
            self.register_buffer("b", self.a[:2])  # type: ignore[index]

        def forward(self, x: Tensor) -> Tensor:
            y = self.a.to("cpu") + x  # type: ignore[operator]
            self.b.add_(1)  # type: ignore[operator]
            return y

    program, violations = guarded(Tied(), (torch.randn(3),), strict=False)
    assert len(check_program(program)) == len(violations) == 1


def test_conversions_by_torch_are_none() -> None:
    class Inside(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = torch.softmax(x, -1, dtype=torch.float64)
            y.add_(1)
            return y

    ep = exported(Inside(), torch.randn(3))
    assert check_program(ep) == []
    assert capture_conversions(ep).captured == 0


def test_conversions_within_functions_of_torch_are_none() -> None:
    class Inside(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.double() + 1

    ep = exported(Inside(), torch.randn(3))
    (node,) = nodes(ep, torch.ops.aten.to.dtype)
    node.meta["torch_fn"] = ("multi_head_attention_forward_1", "function.multi_head_attention_forward")
    assert capture_conversions(ep).captured == 0


class Random(nn.Module):
    def __init__(self, program: list[Step]) -> None:
        super().__init__()
        self.program = program

    def forward(self, x: Tensor) -> Tensor:
        return run(self.program, x)


@settings(max_examples=25, derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow], database=None)
@given(programs())
def test_random_programs_are_judged_as_the_guard_does(program: list[Step]) -> None:
    x = torch.arange(6.0).reshape(2, 3)
    with ToMutationGuard(on_violation="record") as guard:
        ep = torch.export.export(Random(program), (x,), strict=False)
    found = check_program(ep)
    # Non-strict export remembers the lines of functions named forward only (torch/fx/experimental/proxy_tensor.py).
    assert [(v.op, v.argument) for v in found] == [(v.op, v.argument) for v in guard.violations]
    captured = capture_conversions(ep, on_unsafe="keep")
    assert found or captured.captured == guard.conversions
    assert torch.equal(captured.module()(x.clone()), run(program, x))


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("name", ["planted_norm", "planted_cache", "llama"])
def test_a_real_model_is_judged_as_the_guard_does(name: str, strict: bool) -> None:
    from benchmarks import models

    module, args = getattr(models, name)()
    program, violations = guarded(module, args, strict=strict)
    assert verdicts(check_program(program)) == verdicts(violations)
    assert bool(violations) == name.startswith("planted")


def test_the_message_is_the_guards() -> None:
    _, _, module, args = RAISES[0]
    with pytest.raises(ToMutationError) as by_guard, ToMutationGuard():
        torch.export.export(module(), args(), strict=False)
    with pytest.raises(ToMutationError) as by_graph:
        capture_conversions(exported(module(), *args()))
    assert str(by_graph.value) == str(by_guard.value)


def test_off_means_off() -> None:
    plain = str(exported(Many(), *MANY))
    capture_conversions(exported(Many(), *MANY))
    assert str(exported(Many(), *MANY)) == plain
    assert ways.stacks() == ([], []) and dispatch_guard.__name__ == "dispatch_guard"


class Rebound(nn.Module):
    """The name of what was converted stands for its result later, in ways that only the whole function tells."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def forward(self, x: Tensor, m: Tensor) -> Tensor:
        if self.how == "tuple":
            x, m = x.to("cpu"), m.to("cpu")
        elif self.how == "conditional":
            x = x.to("cpu") if self.how else x
        elif self.how == "alias":
            y = x.to("cpu")
            x = y
        elif self.how == "call":
            x = nn.Identity()(x.to("cpu"))
        return x.double() + m


@pytest.mark.parametrize("how", ["tuple", "conditional", "alias", "call"])
def test_a_name_that_is_bound_again_is_taken_as_traced(how: str) -> None:
    captured = capture_conversions(exported(Rebound(how), torch.ones(3), torch.ones(3)))
    (last,) = (node for node in nodes(captured) if node.kwargs.get("dtype") is torch.float64)
    assert last.args[0] in nodes(captured)


def test_a_function_that_is_called_again_with_what_it_converted() -> None:
    def step(x: Tensor) -> Tensor:
        return x.to("cpu")

    class Loop(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            for _ in range(3):
                x = step(x)
            return x.sin()

    one, two, three = nodes(capture_conversions(exported(Loop(), torch.ones(3))))
    assert [str(one.args[0]), two.args[0], three.args[0]] == ["x", one, two]


def test_an_assignment_to_data_is_a_write() -> None:
    class Program(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            z = x * 1
            y = z.float()
            z.data = y * 2
            return y + z

    (violation,) = check_program(exported(Program(), torch.ones(3)))
    assert (violation.kind, violation.op, violation.call) == ("rebind", None, "Tensor.data")
    assert violation.role == "source"


def test_a_copy_whose_surroundings_are_read_is_refused() -> None:
    class Around(nn.Module):
        def __init__(self, part: Any, reach: int) -> None:
            super().__init__()
            self.part, self.reach = part, reach

        def forward(self, x: Tensor) -> Tensor:
            return x[self.part].to("cpu").as_strided((self.reach,), (1,), 0)

    x = torch.arange(16.0).view(4, 4)
    for part, reach in (((slice(None), slice(1, None)), 2), (slice(1, None), 2), (slice(None, 2), 9)):
        with pytest.raises(ValueError, match="reads memory beside what was converted"):
            capture_conversions(exported(Around(part, reach), x))
    for part, reach in ((slice(None), 16), (slice(None, 2), 8)):
        captured = capture_conversions(exported(Around(part, reach), x))
        assert same(captured.module()(x), x.view(-1)[:reach]) and captured.captured == 1
