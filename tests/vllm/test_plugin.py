"""The plugin in a program of its own that uses vLLM without the rest of rzero."""

import os
import subprocess
import sys

import pytest

from tests.vllm.conftest import tiny
from tests.vllm.real import pytestmark  # noqa: F401

PROGRAM = """
import sys
import torch
from vllm import LLM, SamplingParams

if __name__ == "__main__":
    llm = LLM(sys.argv[1], dtype="float32", enforce_eager=True, skip_tokenizer_init=True,
              logprobs_mode="processed_logprobs", kv_cache_memory_bytes=1 << 24)
    params = [SamplingParams(max_tokens=8, temperature=0.7, seed=i, logprobs=0, ignore_eos=True,
                             detokenize=False)
              for i in range(12)]
    prompts = [[1, *range(3, 4 + i)] for i in range(12)]
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)

    from transformers import AutoModelForCausalLM
    from rzero.kernels import align, log_softmax

    model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
    align(model)
    differing = 0
    for prompt, output in zip(prompts, outputs):
        tokens = list(output.outputs[0].token_ids)
        with torch.no_grad():
            logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        log_probs = log_softmax(logits / 0.7).gather(-1, torch.tensor(tokens)[:, None])[:, 0]
        recorded = torch.tensor([d[t].logprob for d, t in zip(output.outputs[0].logprobs, tokens)])
        differing += int((recorded != log_probs).sum())
    print("differing", differing)
"""


@pytest.mark.timeout(600)
@pytest.mark.parametrize("kernels", ["exact", ""])
def test_an_environment_variable_turns_it_on(tmp_path, kernels):
    tiny().save_pretrained(tmp_path)
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, str(program), str(tmp_path)],
        capture_output=True,
        text=True,
        env={**os.environ, "RZERO_VLLM_KERNELS": kernels, "VLLM_CPU_OMP_THREADS_BIND": "nobind"},
    )
    assert done.returncode == 0, done.stderr
    assert ("LlamaForCausalLM under vLLM 0.32.0 computes with exact-" in done.stderr) == bool(kernels)
    differing = int(done.stdout.split("differing ")[1])
    assert differing == 0 if kernels else differing > 10
