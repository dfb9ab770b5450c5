"""How fast vLLM samples on a CPU with rzero's exact kernels under it, beside vLLM as it is.

Usage: python benchmarks/vllm_cpu.py [--rounds 5]

Two engines in processes of their own, warmed up, take turns on the same requests, so that both see the same
machine: 64 concurrent responses of 96 tokens to prompts of 16, from a Llama of 2 layers of 64.
"""

import argparse
import statistics
import tempfile
import time

import torch
import transformers

from rzero.collectors import GenerationRequest, VLLMEngine

CONCURRENT, TOKENS, PROMPT, VOCABULARY = 64, 96, 16, 104


def save_model(folder: str) -> None:
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=1024,
    )
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)


def tokens_per_second(engine: VLLMEngine, first_uid: int) -> float:
    started = time.perf_counter()
    futures = [
        engine.submit(
            GenerationRequest(
                uid=first_uid + i,
                group_id=i,
                prompt_id=i,
                sample_index=0,
                prompt=tuple((1 + i * 7 + j * j) % VOCABULARY for j in range(PROMPT)),
                max_new_tokens=TOKENS,
                seed=first_uid + i,
            )
        )
        for i in range(CONCURRENT)
    ]
    sampled = sum(len(future.result().response) for future in futures)
    return sampled / (time.perf_counter() - started)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as folder:
        save_model(folder)
        engines = {
            kernels: VLLMEngine(folder, eos_token_ids=(), kernels=kernels, max_slots=CONCURRENT)
            for kernels in ("native", "exact")
        }
    speeds = {kernels: [] for kernels in engines}
    for turn in range(rounds):
        for kernels, engine in engines.items():
            speeds[kernels].append(tokens_per_second(engine, turn * CONCURRENT))
    for engine in engines.values():
        engine.close()
    medians = {kernels: statistics.median(values) for kernels, values in speeds.items()}
    for kernels, median in medians.items():
        print(f"{kernels:7} {median:8.0f} tokens/s, median of {rounds}")
    ratios = [exact / native for exact, native in zip(speeds["exact"], speeds["native"], strict=True)]
    print(f"exact / native {statistics.median(ratios):.2f}, median of the rounds")


if __name__ == "__main__":
    main()
