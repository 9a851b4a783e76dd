"""Real architectures with random weights from small configurations, as targets of ``dispatch-guard check``.

Each factory returns ``(module, args)``.  ``planted_norm`` and ``planted_cache`` hold a write after a conversion.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

Made = tuple[nn.Module, tuple[Any, ...]]


class _Positional(nn.Module):
    """A transformers model that takes named inputs in order and returns its first output."""

    def __init__(self, model: nn.Module, *names: str) -> None:
        super().__init__()
        self.model = model
        self.names = names

    def forward(self, *inputs: Tensor) -> Tensor:
        output: Tensor = self.model(**dict(zip(self.names, inputs, strict=True)), return_dict=False)[0]
        return output


def _made(model: nn.Module, **inputs: Tensor) -> Made:
    return _Positional(model.eval(), *inputs).eval(), tuple(inputs.values())


def _tokens(*size: int) -> Tensor:
    return torch.randint(1, 90, size)


def llama() -> Made:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=100,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        use_cache=False,
    )
    return _made(LlamaForCausalLM(config), input_ids=_tokens(1, 8))


def bert() -> Made:
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=100, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64
    )
    return _made(BertModel(config), input_ids=_tokens(1, 8), attention_mask=torch.ones(1, 8, dtype=torch.int64))


def t5() -> Made:
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    config = T5Config(
        vocab_size=100,
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=2,
        num_heads=4,
        use_cache=False,
    )
    return _made(T5ForConditionalGeneration(config), input_ids=_tokens(1, 8), decoder_input_ids=_tokens(1, 4))


def vit() -> Made:
    from transformers import ViTConfig, ViTModel

    torch.manual_seed(0)
    config = ViTConfig(
        image_size=32, patch_size=8, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64
    )
    return _made(ViTModel(config), pixel_values=torch.randn(1, 3, 32, 32))


def whisper() -> Made:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    torch.manual_seed(0)
    config = WhisperConfig(
        vocab_size=100,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        num_mel_bins=16,
        max_source_positions=32,
        max_target_positions=32,
        use_cache=False,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
    )
    return _made(
        WhisperForConditionalGeneration(config), input_features=torch.randn(1, 16, 64), decoder_input_ids=_tokens(1, 4)
    )


class _CarelessNorm(nn.Module):
    """RMSNorm as it is often optimized by hand: the float32 copy is scaled in place, but in float32 it is no copy."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.detach().clone())

    def forward(self, hidden_states: Tensor) -> Tensor:
        scaled = hidden_states.to(torch.float32)
        scaled.mul_(torch.rsqrt(scaled.pow(2).mean(-1, keepdim=True) + 1e-6))
        return self.weight * scaled


def planted_norm() -> Made:
    """Llama with one norm that writes to what ``to()`` returned."""
    module, args = llama()
    layer: Any = module.model.model.layers[1]  # type: ignore[union-attr,index]
    layer.post_attention_layernorm = _CarelessNorm(layer.post_attention_layernorm.weight)
    return module, args


class _StaticCache(nn.Module):
    """A key cache that follows the device of the keys, as transformers' StaticCache once did (issue 33178)."""

    key: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("key", torch.zeros(1, 2, 8, 4))

    def forward(self, position: Tensor, key: Tensor) -> Tensor:
        cache = self.key.to(device=key.device)
        cache.index_copy_(2, position, key)
        return cache.sum(2)


def planted_cache() -> Made:
    """A cache that writes to a buffer after ``to()``."""
    torch.manual_seed(0)
    return _StaticCache().eval(), (torch.tensor([1]), torch.randn(1, 2, 1, 4))
