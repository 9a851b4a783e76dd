"""The guard with what people export to, and from: ONNX, draft export, transformers, AOTInductor, IPython."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from torch import nn

from dispatch_guard import ToMutationError, ToMutationGuard, capture_conversions, check_program
from dispatch_guard.exports import guarding_exports


class Bad(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.to("cpu")
        y.add_(5)
        return x.sin()


class Good(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.to(torch.float64).sin()


def test_an_export_to_onnx_stops_at_the_write() -> None:
    pytest.importorskip("onnxscript")
    with pytest.raises(ToMutationError), ToMutationGuard():
        torch.onnx.export(Bad(), (torch.zeros(3),), dynamo=True, verbose=False)
    guards: list[ToMutationGuard] = []
    with guarding_exports(guards.append):
        program = torch.onnx.export(Good(), (torch.zeros(3),), dynamo=True, verbose=False)
    assert program is not None
    assert [(guard.conversions, guard.violations) for guard in guards] == [(1, [])]


def test_a_draft_export_stops_at_the_write() -> None:
    with pytest.raises(ToMutationError), ToMutationGuard():
        torch.export.draft_export(Bad(), (torch.zeros(3),))
    guards: list[ToMutationGuard] = []
    with guarding_exports(guards.append, on_violation="record"):
        torch.export.draft_export(Bad(), (torch.zeros(3),))
    assert [len(guard.violations) for guard in guards] == [1]


def test_a_language_model_with_a_static_cache_has_one_write_and_it_is_real() -> None:
    transformers = pytest.importorskip("transformers")
    from transformers.integrations.executorch import TorchExportableModuleForDecoderOnlyLM

    config = transformers.LlamaConfig(
        vocab_size=50,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=16,
        attn_implementation="sdpa",
    )
    model = transformers.LlamaForCausalLM(config).eval()
    model.generation_config = transformers.GenerationConfig(
        use_cache=True, cache_implementation="static", max_length=8, cache_config={"batch_size": 1, "max_cache_len": 8}
    )
    with torch.no_grad(), ToMutationGuard(on_violation="record") as guard:
        exportable = TorchExportableModuleForDecoderOnlyLM(model, batch_size=1, max_cache_len=8)
        program = exportable.export(input_ids=torch.tensor([[1]]), cache_position=torch.tensor([0]))
    assert guard.conversions > 0
    # transformers 5.24 makes its mask of the cache's counter, which goes through to() on the way, and then counts on:
    # in the exported graph the write is to the result of the conversion, so that a copy would not reach the counter.
    lines = {violation.site.line.strip() for violation in guard.violations if violation.site}
    assert lines <= {"self.cumulative_length.add_(kv_length)"}
    assert {check.op for check in check_program(program)} == {violation.op for violation in guard.violations}


@pytest.mark.skipif(shutil.which("g++") is None, reason="AOTInductor needs a C++ compiler")
def test_a_captured_program_is_compiled_ahead_of_time(tmp_path: Path) -> None:
    x = torch.randn(3)
    with ToMutationGuard():
        program = capture_conversions(torch.export.export(Good(), (x,)))
        package = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "good.pt2"))
    torch.testing.assert_close(torch._inductor.aoti_load_package(package)(x), x.double().sin())


def test_an_error_in_a_notebook_cell_shows_both_places() -> None:
    pytest.importorskip("IPython")
    cell = """
import torch
from dispatch_guard import ToMutationGuard
x = torch.zeros(3)
with ToMutationGuard():
    y = x.to("cpu")
    y.add_(5)
"""
    program = f"""
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance(colors="nocolor")
shell.run_cell({cell!r})
"""
    with tempfile.TemporaryDirectory() as home:
        ran = subprocess.run(
            [sys.executable, "-c", program],
            capture_output=True,
            text=True,
            check=True,
            timeout=100,
            env={"HOME": home, "IPYTHONDIR": home, "PYTHONPATH": str(Path(__file__).parents[1])},
        )
    shown = ran.stdout + ran.stderr
    assert "ToMutationError: in-place aten.add_.Tensor on the result of Tensor.to" in shown
    assert 'y = x.to("cpu")\n          ^^^^^^^^^^^ converted here' in shown
    assert "y.add_(5)\n      ^^^^^^^^^ written in place here" in shown
