"""Tiny random models of transformers, made here: the same weights in every run."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

VOCAB = 96
LAYERS, HEADS, KV_HEADS, HEAD_DIM = 2, 4, 2, 8
PAD, EOS = 0, 2


def llama(dtype: torch.dtype = torch.float32, seed: int = 0, **overrides: Any) -> Any:
    """A Llama whose next token depends visibly on what it has seen."""
    return make(LlamaForCausalLM, LlamaConfig, dtype, seed, **overrides)


def make(
    model_class: Any, config_class: Any, dtype: torch.dtype, seed: int, **overrides: Any
) -> Any:
    sizes = {
        "vocab_size": VOCAB, "hidden_size": HEADS * HEAD_DIM, "intermediate_size": 48,
        "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM, "max_position_embeddings": 512, "pad_token_id": PAD,
        "eos_token_id": None, "bos_token_id": 1, "initializer_range": 0.4,
    } | overrides  # fmt: skip
    torch.manual_seed(seed)
    transformers.logging.set_verbosity_error()
    model = model_class(config_class(**sizes)).eval().to(dtype).requires_grad_(False)
    model.generation_config = GenerationConfig(pad_token_id=PAD, bos_token_id=1)
    return model


def prompts(*lengths: int, seed: int = 7, prefix: int = 0) -> dict[str, torch.Tensor]:
    """A batch of random prompts, padded on the left; the first `prefix` tokens are the same."""
    generator = torch.Generator().manual_seed(seed)
    common = torch.randint(3, VOCAB, (prefix,), generator=torch.Generator().manual_seed(99))
    width = max(lengths)
    ids = torch.full((len(lengths), width), PAD)
    mask = torch.zeros_like(ids)
    for i, n in enumerate(lengths):
        row = torch.randint(3, VOCAB, (n,), generator=generator)
        row[: min(n, prefix)] = common[:n]
        ids[i, width - n :] = row
        mask[i, width - n :] = 1
    return {"input_ids": ids, "attention_mask": mask}
