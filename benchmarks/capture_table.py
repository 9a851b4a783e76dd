"""Captures the conversions of real architectures and writes the table in RESULTS.md.

    python -m benchmarks.capture_table            # all of them, about twenty minutes on one core
    python -m benchmarks.capture_table llama t5   # these only, printed

Every architecture is exported under the guard, captured and decomposed.  ``aten._to_copy`` nodes after decomposition
must be the conversions that the guard counted plus those that torch makes by itself; the outputs must be bit-equal to
eager's.  Weights are random, from small configurations.
"""

from __future__ import annotations

import logging
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram

from benchmarks import models
from dispatch_guard import ToMutationGuard
from dispatch_guard.capture import capture_conversions

RESULTS = Path(__file__).parent / "RESULTS.md"
BEGIN, END = "<!-- capture table: begin -->", "<!-- capture table: end -->"

# What makes a configuration small, under every name that transformers has for it.
SMALL: dict[str, Any] = {
    "vocab_size": 100,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "use_cache": False,
    "max_position_embeddings": 64,
    "n_positions": 64,
    "n_ctx": 64,
    **dict.fromkeys(["hidden_size", "d_model", "n_embd", "embedding_size", "emb_dim", "dim", "hidden_dim"], 32),
    **dict.fromkeys(["intermediate_size", "d_ff", "d_inner", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim"], 64),
    **dict.fromkeys(["num_hidden_layers", "num_layers", "n_layer", "n_layers", "encoder_layers", "decoder_layers"], 2),
    **dict.fromkeys(["num_attention_heads", "num_heads", "n_head", "n_heads", "encoder_attention_heads"], 4),
    **dict.fromkeys(["decoder_attention_heads", "num_decoder_layers_heads"], 4),
    **dict.fromkeys(["num_key_value_heads", "num_kv_heads"], 2),
    "d_kv": 8,
    "head_dim": 8,
    "rotary_dim": 4,
    "num_decoder_layers": 2,
    "image_size": 32,
    "patch_size": 8,
    "type_vocab_size": 2,
}

# Architectures by what they take: (module of transformers, class, more of the configuration).
TOKENS = [
    ("albert", "AlbertModel", {}),
    ("bert", "BertModel", {}),
    ("big_bird", "BigBirdModel", {"attention_type": "original_full"}),
    ("biogpt", "BioGptModel", {}),
    ("bloom", "BloomModel", {}),
    ("camembert", "CamembertModel", {}),
    ("codegen", "CodeGenModel", {}),
    ("cohere", "CohereModel", {}),
    ("convbert", "ConvBertModel", {}),
    ("ctrl", "CTRLModel", {"dff": 64}),
    ("deberta_v2", "DebertaV2Model", {}),
    ("distilbert", "DistilBertModel", {}),
    ("electra", "ElectraModel", {}),
    ("ernie", "ErnieModel", {}),
    ("falcon", "FalconModel", {}),
    ("gemma", "GemmaModel", {}),
    ("gemma2", "Gemma2Model", {}),
    ("glm", "GlmModel", {}),
    ("gpt2", "GPT2Model", {}),
    ("gpt_bigcode", "GPTBigCodeModel", {}),
    ("gpt_neo", "GPTNeoModel", {"attention_types": [[["global", "local"], 1]]}),
    ("gpt_neox", "GPTNeoXModel", {}),
    ("gptj", "GPTJModel", {}),
    ("granite", "GraniteModel", {}),
    ("ibert", "IBertModel", {}),
    ("llama", "LlamaModel", {}),
    ("mistral", "MistralModel", {}),
    ("mobilebert", "MobileBertModel", {}),
    ("modernbert", "ModernBertModel", {}),
    ("mpnet", "MPNetModel", {}),
    ("mpt", "MptModel", {}),
    ("nemotron", "NemotronModel", {}),
    ("olmo", "OlmoModel", {}),
    ("olmo2", "Olmo2Model", {}),
    ("openai", "OpenAIGPTModel", {}),
    ("opt", "OPTModel", {"word_embed_proj_dim": 32}),
    ("persimmon", "PersimmonModel", {}),
    ("phi", "PhiModel", {}),
    ("phi3", "Phi3Model", {}),
    ("qwen2", "Qwen2Model", {}),
    ("qwen3", "Qwen3Model", {}),
    ("rembert", "RemBertModel", {"input_embedding_size": 32, "output_embedding_size": 32}),
    ("roberta", "RobertaModel", {}),
    ("roformer", "RoFormerModel", {}),
    ("smollm3", "SmolLM3Model", {}),
    ("squeezebert", "SqueezeBertModel", {"q_groups": 1, "k_groups": 1, "v_groups": 1}),
    ("stablelm", "StableLmModel", {}),
    ("starcoder2", "Starcoder2Model", {}),
    ("xglm", "XGLMModel", {"attention_heads": 4}),
    ("xlm_roberta", "XLMRobertaModel", {}),
]
PAIRS = [
    ("bart", "BartModel", {}),
    ("blenderbot", "BlenderbotModel", {}),
    ("m2m_100", "M2M100Model", {}),
    ("marian", "MarianModel", {}),
    ("mbart", "MBartModel", {}),
    ("mt5", "MT5Model", {}),
    ("pegasus", "PegasusModel", {}),
    ("t5", "T5Model", {}),
]
IMAGES = [
    ("beit", "BeitModel", {}),
    ("convnext", "ConvNextModel", {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2}),
    ("deit", "DeiTModel", {}),
    ("dinov2", "Dinov2Model", {}),
    ("resnet", "ResNetModel", {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1]}),
    ("siglip", "SiglipVisionModel", {}),
    ("vit", "ViTModel", {}),
    ("vit_mae", "ViTMAEModel", {"mask_ratio": 0.0}),
]


class Row(NamedTuple):
    name: str
    guard: int  # conversions that the guard counted during the export
    captured: int  # those that are _to_copy nodes of the captured program
    unchanged: int  # of those, the ones that changed nothing, which run_decompositions() drops
    plain: int  # _to_copy nodes after decomposition, not captured
    after: int  # and captured
    equal: bool  # bit-equal outputs: captured and eager; decomposed, with and without capture
    seconds: float

    @property
    def by_torch(self) -> int:
        """The ``_to_copy`` nodes that torch makes by itself: those not captured, but for the user's that do copy."""
        return self.plain - (self.captured - self.unchanged)

    @property
    def right(self) -> bool:
        return self.equal and self.after == self.guard + self.by_torch


def made_of_transformers(folder: str, name: str, more: dict[str, Any], kind: str) -> models.Made:
    import importlib
    import inspect

    module = importlib.import_module(f"transformers.models.{folder}.modeling_{folder}")
    model_class = getattr(module, name)
    config_class = model_class.config_class
    known = set(inspect.signature(config_class.__init__).parameters) | set(getattr(config_class, "__annotations__", {}))
    config = config_class(**{key: value for key, value in SMALL.items() if key in known} | more)
    torch.manual_seed(0)
    model = model_class(config)
    if kind == "images":
        return models._made(model, pixel_values=torch.randn(1, 3, 32, 32))
    tokens = {"input_ids": torch.randint(3, 90, (1, 8))}
    if kind == "pairs":
        tokens["decoder_input_ids"] = torch.randint(3, 90, (1, 4))
    return models._made(model, **tokens)


def factories() -> Iterator[tuple[str, Callable[[], models.Made]]]:
    for factory in (models.llama, models.bert, models.t5, models.vit, models.whisper):
        yield f"models.{factory.__name__}", factory
    for kind, rows in (("tokens", TOKENS), ("pairs", PAIRS), ("images", IMAGES)):
        for folder, name, more in rows:
            yield (
                folder,
                lambda folder=folder, name=name, more=more, kind=kind: made_of_transformers(folder, name, more, kind),
            )


def copies(program: ExportedProgram) -> int:
    graphs = [module.graph for module in program.graph_module.modules() if isinstance(module, fx.GraphModule)]
    return sum(node.target is torch.ops.aten._to_copy.default for graph in graphs for node in graph.nodes)


def measure(name: str, module: nn.Module, args: tuple[Tensor, ...]) -> Row:
    start = time.perf_counter()
    expected = _run(module, args)
    with ToMutationGuard() as guard:
        program = torch.export.export(module, args, strict=False)
    captured = capture_conversions(program)
    unchanged = sum(bool(note.get("alias")) for note in notes(captured))
    decomposed, plain = captured.run_decompositions(), program.run_decompositions()
    # Decompositions round in their own ways, so that a decomposed program need not be bit-equal to eager.
    equal = torch.equal(_run(captured.module(), args), expected)
    equal &= torch.equal(_run(decomposed.module(), args), _run(plain.module(), args))
    seconds = time.perf_counter() - start
    return Row(name, guard.conversions, captured.captured, unchanged, copies(plain), copies(decomposed), equal, seconds)


@torch.no_grad()
def _run(module: nn.Module, args: tuple[Tensor, ...]) -> Tensor:
    torch.manual_seed(0)  # some draw random masks
    output: Tensor = module(*args)
    return output


def notes(program: ExportedProgram) -> Iterator[dict[str, Any]]:
    for module in program.graph_module.modules():
        if isinstance(module, fx.GraphModule):
            for node in module.graph.nodes:
                if node.target is torch.ops.aten._to_copy.default:
                    yield (node.meta.get("custom") or {}).get("dispatch_guard") or {}


def table(rows: list[Row]) -> str:
    import transformers

    lines = [
        f"torch {torch.__version__.split('+')[0]}, transformers {transformers.__version__}, CPU, non-strict export, "
        "small random configurations.",
        "",
        "- guard: conversions that the guard counted during the export",
        "- captured: `aten._to_copy` nodes of the captured program; unchanged: those of them that changed nothing",
        "  here, which `run_decompositions()` drops from a program that is not captured",
        "- plain, after: `aten._to_copy` nodes after `run_decompositions()`, without and with capture",
        "- by torch: those of its own making, plain - (captured - unchanged); after = guard + by torch",
        "- equal: outputs of the captured program are bit-equal to eager's, and after decomposition to those of the",
        "  plain program after decomposition (which rounds in its own ways: ViT, with no conversion, is off by 4e-7)",
        "",
        "| architecture | guard | captured | unchanged | plain | by torch | after | equal |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        equal = "yes" if row.equal else "**no**"
        after = str(row.after) if row.right else f"**{row.after}**"
        lines.append(
            f"| {row.name} | {row.guard} | {row.captured} | {row.unchanged} | {row.plain} | {row.by_torch} | {after} "
            f"| {equal} |"
        )
    total = [sum(getattr(row, name) for row in rows) for name in ("guard", "captured", "unchanged", "plain")]
    lines += [
        f"| {len(rows)} architectures | {' | '.join(map(str, total))} | {sum(row.by_torch for row in rows)} "
        f"| {sum(row.after for row in rows)} | {sum(row.equal for row in rows)} |",
    ]
    return "\n".join(lines)


def main(names: list[str]) -> int:
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    rows = []
    for name, factory in factories():
        if names and name not in names:
            continue
        row = measure(name, *factory())
        print(f"{row} {'' if row.right else 'WRONG'}", flush=True)
        rows.append(row)
    text = table(rows)
    if names:
        print(text)
    else:
        old = RESULTS.read_text() if RESULTS.exists() else f"# Results\n\n## Capture\n\n{BEGIN}\n{END}\n"
        if BEGIN not in old:
            old += f"\n## Capture\n\n{BEGIN}\n{END}\n"
        before, _, rest = old.partition(BEGIN)
        RESULTS.write_text(f"{before}{BEGIN}\n{text}\n{END}{rest.partition(END)[2]}")
    return 0 if all(row.right for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
