"""Every architecture of transformers that builds from a small random configuration, exported and run under the guard.

``python -m benchmarks.architectures --records FILE`` adds one line of JSON per architecture to FILE (those that are
there already are not tried again) and writes the table into ``benchmarks/RESULTS.md``.  An architecture is one entry
of transformers' ``MODEL_MAPPING``.  It is made small, run, exported bare, exported under the guard and run under it.
The two exports have to agree in the code of the graph, its signature and the metadata of its nodes.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import select
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from dispatch_guard import Site, ToMutationGuard, Violation

RESULTS = Path(__file__).with_name("RESULTS.md")
HEADING = "## Architectures of transformers"
COMMAND = "python -m benchmarks.architectures --records architectures.jsonl"
Record = dict[str, Any]
NOTES = {  # read by hand: who else holds the written tensor
    "modeling_fsmt.py": "a new `torch.zeros` that is passed on nowhere else, so harmless",
    "modeling_kosmos2_5.py": "the positions are a new tensor from `index_select` that is not read again, so harmless",
}

LAYERS = """num_hidden_layers num_layers n_layer n_layers encoder_layers decoder_layers num_decoder_layers depth
    num_encoder_layers decoder_num_hidden_layers decoder_num_layers max_window_layers num_blocks encoder_num_layers
    num_hidden_groups memory_attention_num_layers speech_decoder_postnet_layers resampler_depth""".split()
WIDTHS = """hidden_size d_model n_embd embed_dim hidden_dim dim attention_hidden_size decoder_hidden_size
    encoder_hidden_size out_hidden_size embedding_size embedding_dim d_inner text_hidden_size word_embed_proj_dim
    projection_dim rnn_hidden_size emb_dim lstm_hidden_size entity_emb_size""".split()
INNER = """intermediate_size ffn_dim encoder_ffn_dim decoder_ffn_dim d_ff mlp_dim moe_intermediate_size n_inner
    shared_expert_intermediate_size ffn_hidden_size shared_intermediate_size decoder_intermediate_size
    decoder_encoder_ffn_dim""".split()
HEADS = """num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads
    attention_heads decoder_num_attention_heads encoder_num_attention_heads""".split()
SIZES: dict[str, int] = (
    {name: 2 for name in LAYERS}
    | {name: 64 for name in WIDTHS + INNER}
    | {name: 4 for name in HEADS}
    | {
        "vocab_size": 256,
        "input_vocab_size": 256,
        "output_vocab_size": 256,
        "vocab_size_per_layer_input": 256,
        "hidden_size_per_layer_input": 16,
        "rotary_dim": 8,
        "rope_head_dim": 8,
        "moe_k": 2,
        "moe_topk": 2,
        "moe_num_active_experts": 2,
        "top_k_experts": 2,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "d_kv": 16,
        "kv_lora_rank": 16,
        "q_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 16,
        "qk_head_dim": 16,
        "index_head_dim": 16,
        "index_n_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "num_experts": 4,
        "num_local_experts": 4,
        "n_routed_experts": 4,
        "moe_num_experts": 4,
        "n_group": 1,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 128,
        "n_positions": 128,
        "image_size": 64,
        "patch_size": 16,
        "num_queries": 10,
        "num_mel_bins": 16,
        "max_source_positions": 32,
        "max_target_positions": 32,
        "max_length": 64,
        "attention_window": 8,
        "mamba_n_heads": 8,
        "mamba_d_head": 16,
        "mamba_d_state": 16,
        "state_size": 16,
    }
)
LISTS = {"depths": 1, "stage_num_blocks": 1, "num_blocks_per_stage": 1, "encoder_layers_per_stage": 1}
LEVELS = ("small", "narrow", "shallow")  # what shrinks: all; not the widths and heads; depth and vocabulary only
LIMIT = 200_000_000  # parameters


# Small configurations


def shrunk(name: str, value: Any, level: str) -> Any:
    """The small value of one attribute, ``None`` to leave it."""
    if isinstance(value, bool) or value is None:
        return None
    if isinstance(value, int) and name in SIZES:
        depth = name in LAYERS or "vocab_size" in name
        if level == "small" or depth or (level == "narrow" and (name in INNER or "expert" in name)):
            return min(value, SIZES[name])
    if isinstance(value, list | tuple) and name in LISTS:
        return type(value)(LISTS[name] for _ in value)
    return None


def small(config: Any, level: str) -> Any:
    """A configuration of the same class with small sizes, its parts made small likewise."""
    from transformers import PreTrainedConfig, ResNetConfig

    old = vars(config)
    changes: dict[str, Any] = {}
    for name, value in old.items():
        if isinstance(value, PreTrainedConfig) and value.model_type.startswith("timm"):
            changes[name] = small(ResNetConfig(out_features=["stage2", "stage3", "stage4"]), level)
        elif isinstance(value, PreTrainedConfig):
            changes[name] = small(value, level)
        elif (new := shrunk(name, value, level)) is not None:
            changes[name] = new
    if "use_cache" in old:
        changes["use_cache"] = False
    if "vocab_size" in changes:
        changes |= tokens(old, changes["vocab_size"])
    fit(old, changes)
    return type(config)(**changes)


def fit(old: dict[str, Any], changes: dict[str, Any]) -> None:
    """Adapts what depends on other attributes: lists with an entry per layer, the parts of rotary embeddings."""
    layers = next((n for n in LAYERS if n in changes), None)
    per_layer = [n for n, v in old.items() if layers and isinstance(v, list | tuple) and len(v) == old[layers] > 2]
    for name in per_layer:
        kinds = list(dict.fromkeys(map(str, old[name])))
        first = [next(v for v in old[name] if str(v) == kind) for kind in kinds[:2]]
        changes[name] = type(old[name])((first * 2)[:2]) if name not in LISTS else changes[name]
    if "qk_rope_head_dim" in changes and old.get("head_dim") == old["qk_rope_head_dim"]:
        changes["head_dim"] = changes["qk_rope_head_dim"]
    if "num_key_value_heads" in changes and old["num_key_value_heads"] == old.get("num_attention_heads"):
        changes["num_key_value_heads"] = changes.get("num_attention_heads", old["num_key_value_heads"])
    rope = old.get("rope_parameters")
    if isinstance(rope, dict) and rope.get("mrope_section"):
        before, after = head_dim(old), head_dim(old | changes)
        section = [n * after // before for n in rope["mrope_section"]]
        section[-1] += sum(rope["mrope_section"]) * after // before - sum(section)
        changes["rope_parameters"] = rope | {"mrope_section": section}


def head_dim(attributes: dict[str, Any]) -> int:
    return int(attributes.get("head_dim") or attributes["hidden_size"] // attributes["num_attention_heads"])


def tokens(attributes: dict[str, Any], vocabulary: int) -> dict[str, int]:
    """Ids of special tokens that the small vocabulary has: distinct, from its end."""
    large = [
        name
        for name, value in attributes.items()
        if re.search("_token_(id|index)$", name) and isinstance(value, int) and value >= vocabulary
    ]
    return {name: vocabulary - 1 - index for index, name in enumerate(large)}


def build(name: str, level: str) -> nn.Module:
    """The model of one entry of ``MODEL_MAPPING`` with random weights."""
    from transformers import CONFIG_MAPPING, MODEL_MAPPING

    config = small(CONFIG_MAPPING[name](), level)
    kind = MODEL_MAPPING[type(config)]
    if isinstance(kind, list | tuple):
        kind = kind[0]
    with torch.device("meta"):
        size = sum(p.numel() for p in kind(config).parameters())
    if size > LIMIT:
        raise ValueError(f"too large: {size} parameters")
    torch.manual_seed(0)
    model: nn.Module = kind(small(CONFIG_MAPPING[name](), level))
    return model.eval()


# Inputs


def find(config: Any, name: str, default: int) -> int:
    """An attribute of a configuration or of one of its parts."""
    values = [vars(config).get(name)] + [vars(v).get(name) for v in vars(config).values() if hasattr(v, "to_dict")]
    value = next((v for v in values if isinstance(v, int | list | tuple) and v), default)
    return int(value if isinstance(value, int) else value[0])


def candidates(name: str, config: Any) -> list[Tensor]:
    """Values to try for one argument of ``forward``, the likeliest first."""
    ids = torch.arange(3, 11)[None]
    side, channels = find(config, "image_size", 64), find(config, "num_channels", 3)
    bins, frames = find(config, "num_mel_bins", 80), 2 * find(config, "max_source_positions", 32)
    wide = find(config, "hidden_size", 64)
    hidden = torch.randn(1, 8, wide)
    patch = find(config, "patch_size", 16)
    known: dict[str, list[Tensor]] = {
        "input_ids": [ids, torch.arange(3, 35)[None], ids[..., None].expand(1, 8, find(config, "num_codebooks", 8))],
        "decoder_input_ids": [ids[:, :4]],
        "attention_mask": [torch.ones(1, 8, dtype=torch.int64)],
        "bbox": [torch.tensor([[[1, 2, 3, 4]]]).expand(1, 8, 4).contiguous()],
        "pixel_values": [
            torch.randn(1, channels, side, side),
            torch.randn(1, 3, 64, 64),
            torch.randn(1, 3, 224, 224),
            torch.randn(1, 1, channels, side, side),
            torch.randn(16, channels * patch * patch),
            torch.randn(1, 16, channels * patch * patch),
            torch.randn(16, 2 * channels * patch * patch),
        ],
        "pixel_values_videos": [
            torch.randn(1, n, channels, side, side) for n in (find(config, "num_frames", 8), 8, 16)
        ],
        "pixel_position_ids": [torch.stack(torch.meshgrid(torch.arange(4), torch.arange(4)), -1).reshape(1, 16, 2)],
        "input_values": [
            torch.randn(1, 1, 3200),
            torch.randn(1, 3200),
            torch.randn(1, find(config, "max_length", 64), bins),
        ],
        "input_features": [torch.randn(1, bins, frames), torch.randn(1, 64, bins), torch.randn(1, 160, 80)],
        "hidden_states": [torch.randn(16, channels * 2 * patch * patch), torch.randn(16, channels * patch * patch)],
        "grid_thw": [torch.tensor([[1, 4, 4]])],
        "image_grid_thw": [torch.tensor([[1, 4, 4]])],
        "inputs_embeds": [hidden],
        "encoder_hidden_states": [hidden],
        "query_embeds": [hidden],
        "past_values": [torch.randn(1, find(config, "context_length", 32), find(config, "num_input_channels", 1))],
        "spatial_shapes": [torch.tensor([[4, 4]])],
        "pixel_attention_mask": [torch.ones(1, 16, dtype=torch.int64)],
        "input_features_mask": [torch.ones(1, 64, dtype=torch.bool)],
        "feature_lens": [torch.tensor([64])],
        "visual_feats": [torch.randn(1, 4, find(config, "visual_feat_dim", 2048))],
        "visual_pos": [torch.randn(1, 4, find(config, "visual_pos_dim", 4))],
        "audio_codes": [torch.zeros(1, find(config, "num_quantizers", 8), 8, dtype=torch.int64)],
        "inputs": [torch.randn(1, 8, find(config, "d_model", 768))],
        "states": [torch.randn(1, 8, find(config, "state_dim", 17))],
        "actions": [torch.randn(1, 8, find(config, "act_dim", 4))],
        "rewards": [torch.randn(1, 8, 1)],
        "returns_to_go": [torch.randn(1, 8, 1)],
        "timesteps": [torch.arange(8)[None]],
        "input_embeds": [hidden],
        "token_type_ids": [torch.zeros(1, 8, dtype=torch.int64)],
    }
    return known.get(name, [])


def combinations(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Sets of named inputs to try, the likeliest first."""
    import inspect

    config: Any = model.config
    parameters = inspect.signature(model.forward).parameters
    required = [n for n, p in parameters.items() if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
    first: Any = getattr(model, "main_input_name", "input_ids")
    main = list(first) if isinstance(first, list) else [first]
    decoder = [n for n in ("decoder_input_ids",) if n in parameters]
    extra = ["pixel_position_ids", "grid_thw", "spatial_shapes", "bbox", "feature_lens", "image_grid_thw"]
    decision = ["states", "actions", "rewards", "returns_to_go", "timesteps"]
    text = [n for n in ("input_ids", "attention_mask") if n in parameters]
    both = [n for n in ("input_ids", "pixel_values", "input_features", "input_values") if n in parameters]
    wholes = [required + main, required + main + decoder, text[:1], text, text[:1] + decoder, both, both + decoder]
    wholes += [required + main + [n for n in extra if n in parameters], required]
    wholes += [[*required, "encoder_hidden_states"], [n for n in decision if n in parameters]]
    seen: set[tuple[str, ...]] = set()
    for whole in wholes:
        names = tuple(dict.fromkeys(n for n in whole if n in parameters))
        if not names or names in seen:
            continue
        seen.add(names)
        values = [candidates(name, config) for name in names]
        for chosen in itertools.islice(itertools.product(*values), 12):
            yield dict(zip(names, chosen))


class Tensors(nn.Module):
    """A model that takes its inputs by name and returns all tensors of its output."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **inputs: Tensor) -> tuple[Tensor, ...]:
        output = self.model(**inputs)
        flat = pytree.tree_leaves(dict(output) if hasattr(output, "keys") else output)
        return tuple(v for v in flat if isinstance(v, Tensor))


def runnable(name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """A small model and inputs that it runs on."""
    errors: list[str] = []
    for level in LEVELS:
        try:
            model = build(name, level)
        except Exception as error:
            errors.append(f"build: {brief(error)}")
            continue
        for inputs in combinations(model):
            try:
                with torch.no_grad():
                    if Tensors(model)(**inputs):
                        return Tensors(model).eval(), inputs
            except Exception as error:
                errors.append(f"run with {', '.join(inputs)}: {brief(error)}")
    raise ValueError(" / ".join(dict.fromkeys(errors)) or "no inputs known")


# One architecture


def brief(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def export(module: nn.Module, inputs: dict[str, Tensor]) -> torch.export.ExportedProgram:
    torch.manual_seed(0)
    return torch.export.export(module, (), inputs, strict=False)


def text(program: torch.export.ExportedProgram) -> str:
    """The code of the graph and its signature."""
    code = program.graph_module.print_readable(False)
    return re.sub(r"<eval_with_key>\.\d+", "", code) + str(program.graph_signature)


def metadata(program: torch.export.ExportedProgram) -> list[tuple[str, str]]:
    """The metadata of all nodes, without the counters that number every export."""
    keys = ("val", "stack_trace", "nn_module_stack", "torch_fn", "source_fn_stack", "custom")
    counters = r"<eval_with_key>\.\d+|0x[0-9a-f]+|\b\d{9,}\b"
    graphs = [m for m in program.graph_module.modules() if isinstance(m, torch.fx.GraphModule)]
    nodes = [node for graph in graphs for node in graph.graph.nodes]
    return [(node.name, re.sub(counters, "", str(node.meta.get(key)))) for node in nodes for key in keys]


def place(site: Site | None) -> str:
    """``file:line `source` `` of a site, the file from its package on."""
    if site is None:
        return "(no place)"
    file = re.sub(r".*/(site-packages|lib/python[^/]*)/", "", site.filename)
    return f"{file}:{site.lineno} `{site.line.strip()}`"


def record(violation: Violation) -> Record:
    made = violation.conversion
    return {
        "op": violation.op,
        "role": violation.role,
        "copied": made.copied,
        "conversion": place(made.site),
        "write": place(violation.site),
        "module": violation.module,
    }


def compared(module: nn.Module, inputs: dict[str, Tensor], plain: torch.export.ExportedProgram) -> Record:
    """The export under the guard, compared with the bare one, and with another bare one when they differ."""
    found: Record = {}
    guard = ToMutationGuard(on_violation="record")
    try:
        with guard:
            guarded = export(module, inputs)
    except Exception as error:
        return {"guarded": brief(error), "again": again(module, inputs, plain)}
    found["guarded"] = "ok"
    found["same"] = text(plain) == text(guarded)
    found["same_metadata"] = metadata(plain) == metadata(guarded)
    if not (found["same"] and found["same_metadata"]):
        found["again"] = again(module, inputs, plain)
    found["conversions"] = guard.conversions
    found["violations"] = [record(v) for v in guard.violations]
    return found


def again(module: nn.Module, inputs: dict[str, Tensor], plain: torch.export.ExportedProgram) -> str:
    """What a second bare export does: a model that changes as it is exported is not the guard's doing."""
    try:
        other = export(module, inputs)
    except Exception as error:
        return brief(error)
    return "same" if text(plain) == text(other) and metadata(plain) == metadata(other) else "differs"


def eager(module: nn.Module, inputs: dict[str, Tensor]) -> Record:
    """A run under the guard, compared with one without."""
    guard = ToMutationGuard(on_violation="record")
    with torch.no_grad():
        torch.manual_seed(0)
        expected = module(**inputs)
        torch.manual_seed(0)
        try:
            with guard:
                actual = module(**inputs)
        except Exception as error:
            return {"eager": brief(error)}
    same = len(actual) == len(expected) and all(
        torch.allclose(a, e, equal_nan=True) if a.dtype == e.dtype and a.shape == e.shape else False
        for a, e in zip(actual, expected)
    )
    return {
        "eager": "ok" if same else "differs",
        "eager_conversions": guard.conversions,
        "eager_violations": [record(v) for v in guard.violations],
    }


def examine(name: str) -> Iterator[Record]:
    """What is known of one architecture, step by step: a step that never ends leaves those before it."""
    found: Record = {"name": name, "state": "not built"}
    try:
        module, inputs = runnable(name)
    except Exception as error:
        yield found | {"error": str(error)[:600]}
        return
    found |= {"state": "built", "inputs": list(inputs)} | eager(module, inputs)
    yield found
    try:
        plain = export(module, inputs)
    except Exception as error:
        yield found | {"bare": brief(error)}
        return
    found |= {"bare": "ok"}
    yield found
    yield found | compared(module, inputs, plain)


# Many of them


def work() -> None:
    """Reads names, one a line, and writes what is found of each: ``STEP`` and JSON, then ``DONE``."""
    import logging
    import warnings

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    output, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        torch._dynamo.reset()
        for found in examine(line.strip()):
            print("STEP", json.dumps(found), file=output, flush=True)
        print("DONE", file=output, flush=True)


class Worker:
    """A process that examines architectures, started again when it crashes or does not end in time."""

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "benchmarks.architectures", "--worker"]
        pipe = subprocess.PIPE
        return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, bufsize=0)

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
        self.process = None

    def examine(self, name: str) -> Record:
        began = time.monotonic()
        self.process = self.process or self.start()
        assert self.process.stdin is not None and self.process.stdout is not None
        found: Record = {"name": name, "state": "not built"}
        self.process.stdin.write(f"{name}\n".encode())
        while select.select([self.process.stdout], [], [], max(0.0, began + self.limit - time.monotonic()))[0]:
            line = self.process.stdout.readline().decode()
            if not line:
                self.stop()
                return found | {"ended": "crashed"}
            if line.startswith("DONE"):
                return found | {"seconds": round(time.monotonic() - began, 1)}
            found = json.loads(line.removeprefix("STEP "))
        self.stop()
        return found | {"ended": "timed out"}


def names() -> list[str]:
    """All architectures, every third first: what is there when it is stopped early is of all kinds."""
    from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

    every = list(MODEL_MAPPING_NAMES)
    return every[::3] + every[1::3] + every[2::3]


def read(path: Path) -> list[Record]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def sweep(path: Path, wanted: list[str], limit: float, seconds: float) -> None:
    """Examines what ``path`` does not hold yet."""
    worker, end = Worker(limit), time.monotonic() + seconds
    known = {found["name"] for found in read(path)}
    for name in wanted:
        if time.monotonic() > end:
            break
        if name not in known:
            with path.open("a") as file:
                file.write(json.dumps(worker.examine(name)) + "\n")
            publish(read(path))
    worker.stop()


# The table


def differs(found: Record) -> bool:
    """Whether the guard changed what a second bare export does not."""
    if found.get("bare") != "ok" or "guarded" not in found:
        return False
    same = found["guarded"] == "ok" and found["same"] and found["same_metadata"]
    return not same and found.get("again") == "same"


def summary(records: list[Record]) -> str:
    built = [r for r in records if r["state"] == "built"]
    done = [r for r in built if r.get("bare") == "ok" and "guarded" in r]
    same = [r for r in done if r["guarded"] == "ok" and r["same"] and r["same_metadata"]]
    unsteady = [r for r in done if r not in same and not differs(r)]
    changed = [r for r in done if differs(r)]
    unexported = [r for r in built if r not in done]
    violates = [r for r in records if r.get("violations") or r.get("eager_violations")]
    eager_changed = [r for r in built if r.get("eager") != "ok"]
    conversions = sum(r.get("conversions", 0) for r in done)
    return (
        f"{len(records)} of {len(names())} architectures tried, {len(built)} built and ran. "
        f"{len(done)} of them export without the guard: "
        f"{len(same)} to the same program under it ({conversions} conversions), {len(unsteady)} to another "
        f"one at each export with or without it, {len(changed)} fail or change only under it; "
        f"{len(unexported)} do not export without it either, so were only run. "
        f"{len(eager_changed)} of the runs under the guard fail or give another result. "
        f"{len(violates)} architectures write after a conversion."
    )


def rows(records: list[Record]) -> list[str]:
    """One row per architecture and pair of places."""
    table = []
    for found in sorted(records, key=lambda r: str(r["name"])):
        where = {"violations": "export", "eager_violations": "run"}
        pairs: Counter[tuple[str, str, str, bool]] = Counter()
        modes: dict[tuple[str, str, str, bool], set[str]] = {}
        for key, mode in where.items():
            for v in found.get(key, []):
                pair = (v["conversion"], v["write"], v["role"], v["copied"])
                pairs[pair] += 1
                modes.setdefault(pair, set()).add(mode)
        for pair in pairs:
            conversion, write, role, copied = (str(p).replace("|", "\\|") for p in pair)
            table.append(
                f"| {found['name']} | {'+'.join(sorted(modes[pair]))} | {conversion} | {write} | "
                f"{reason(write, role, copied == 'True')} |"
            )
    return table


def reason(write: str, role: str, copied: bool) -> str:
    """Why the write means something else where the conversion does the other thing, and who would see it."""
    other = "source" if role == "result" else "result"
    if copied:
        why = f"the {role} is written; the conversion copied here, where it need not the {other} changes too"
    else:
        why = f"the {role} is written, which is the {other} too; where the conversion copies, that does not change"
    note = next((note for file, note in NOTES.items() if file in write), "")
    return f"{why}: {note}" if note else why


def section(records: list[Record]) -> str:
    import transformers

    head = [
        HEADING,
        "",
        f"transformers {transformers.__version__}, torch {torch.__version__.split('+')[0]}, CPU, non-strict export. "
        + summary(records),
        "",
        f"    {COMMAND}",
        "",
    ]
    titles = ["| architecture | seen in | conversion | write | reason |", "|---|---|---|---|---|"]
    return "\n".join(head + titles + rows(records)) + "\n"


def publish(records: list[Record]) -> None:
    """Puts the section into RESULTS.md in place of the old one."""
    old = RESULTS.read_text() if RESULTS.exists() else "# Results\n"
    before, _, rest = old.partition(HEADING)
    after = re.search(r"^## ", rest, re.MULTILINE)
    tail = "\n" + rest[after.start() :] if after else ""
    RESULTS.write_text(before.rstrip() + "\n\n" + section(records) + tail)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="architectures; all without any")
    parser.add_argument("--records", type=Path, default=Path("architectures.jsonl"))
    parser.add_argument("--limit", type=float, default=60, help="seconds for one architecture")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start none after this long")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work()
        return
    sweep(options.records, options.names or names(), options.limit, options.seconds)
    publish(read(options.records))
    print(summary(read(options.records)))


if __name__ == "__main__":
    main()
