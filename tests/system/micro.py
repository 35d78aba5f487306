"""A model so small that a bad link carries its gradients in a moment, for tests of what lies around the training."""

from pathlib import Path

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from learner.warmup.main import BOS, EOS, PAD, VOCAB_SIZE, build_tokenizer, save


def save_micro_model(folder: Path) -> Path:
    """One layer with random weights, about 40,000 parameters, as a Hugging Face folder; returns it."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        pad_token_id=PAD,
        bos_token_id=BOS,
        eos_token_id=EOS,
    )
    save(Qwen2ForCausalLM(config), build_tokenizer(), folder)
    return folder
