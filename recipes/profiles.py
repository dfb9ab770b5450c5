"""Settings that belong together; the flags change them."""

from __future__ import annotations

from typing import Any

PROFILES: dict[str, dict[str, Any]] = {
    "tiny": {},
    # DeepSeek-R1-Distill-Qwen-1.5B on the sanity set of 1,460 problems of MATH, as published for the method:
    # 128 responses an update, AdamW 1e-6 with weight decay 0.1, up to 8,192 new tokens at temperature 1. Of
    # our own are the 16 groups of 8 that make 128, the constant learning rate, and the division of GPUs.
    "r1d-1.5b": {
        "prompts_per_update": 16,
        "group_size": 8,
        "max_new_tokens": 8192,
        "lr": 1e-6,
        "weight_decay": 0.1,
        "updates": 20_000,
        "engine": "vllm",
        "kernels": "exact",  # on GPUs, that is rzero's Triton kernels
        "device": "cuda",
        "compute_dtype": "bfloat16",
        "learners": 4,
        "micro_batch_tokens": 9_216,
        "recompute_activations": True,
        "max_slots": 128,
        "held_out": 60,  # AIME 2024 and 2025
        "held_out_samples": 32,
        "eval_every": 128,
    },
}

# The shape of the model that a profile is for, as in its config.json; of the tiny one it is made on the spot.
MODELS: dict[str, dict[str, Any]] = {
    "r1d-1.5b": {
        "model_type": "qwen2",
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "vocab_size": 151_936,
        "tie_word_embeddings": False,
    },
}
