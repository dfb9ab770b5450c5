"""The profile for GPUs: resolved and planned without one, and trained on a small model and a small file."""

import json
import subprocess
import sys
from typing import Any

import pytest
import torch

from recipes.config import Config, default_config, saved_config
from recipes.errors import RecipeError
from recipes.plan import learner_memory, model_shape, plan, sampler_memory
from recipes.policy import new_policy
from recipes.profiles import PROFILES
from recipes.reinforce_zero import new_scheduler
from recipes.tiny_model import cached_tiny_model
from tests.recipes.conftest import ROOT
from tests.recipes.test_math_problems import ROWS, published
from tests.recipes.test_reinforce_zero import only_run


@pytest.fixture
def files(tmp_path):
    paths = tmp_path / "train.jsonl", tmp_path / "test.jsonl"
    paths[0].write_text("\n".join(map(json.dumps, ROWS)))
    paths[1].write_text(json.dumps(published("1 + 1?", "2")))
    return paths


def of_profile(**changes: Any) -> Config:
    settings: dict[str, Any] = {**PROFILES["r1d-1.5b"], "profile": "r1d-1.5b", **changes}
    return Config(**settings)


def resolved(monkeypatch, preset, *flags):
    monkeypatch.setattr("sys.argv", ["recipe", *flags])
    return default_config(preset)


def test_the_published_setting(monkeypatch):
    config = resolved(monkeypatch, Config(nominal_lag=8), "--profile", "r1d-1.5b")
    assert config.prompts_per_update * config.group_size == 128
    assert (config.lr, config.weight_decay, config.max_new_tokens) == (1e-6, 0.1, 8192)
    assert (config.engine, config.kernels, config.device) == ("vllm", "exact", "cuda")
    assert config.nominal_lag == 8
    assert config.learners > 1


def test_a_preset_changes_a_profile_and_other_flags_change_none(monkeypatch):
    preset = Config(objective="flash_reinforce", group_size=1, prompts_per_update=256)
    config = resolved(monkeypatch, preset, "--profile", "r1d-1.5b", "--lr", "1")
    assert (config.objective, config.group_size, config.nominal_lag) == ("flash_reinforce", 1, 2)
    assert config.max_new_tokens == 8192
    assert resolved(monkeypatch, None) == Config()
    assert resolved(monkeypatch, None, "--profile", "none") == Config()  # and the flags are refused for it


def test_the_shape_is_the_model_s():
    """1,777,088,000 parameters, as the model's card says."""
    config = of_profile()
    assert sum(parameter.numel() for parameter in model_shape(config).parameters()) == 1_777_088_000


def test_memory_by_hand():
    config = of_profile()
    shape = model_shape(config).config
    of_learner = learner_memory(config, shape, 1_777_088_000)
    assert of_learner["weights, float32"] == 1_777_088_000  # 4 bytes by 4 learners
    assert of_learner["AdamW's moments, float32"] == 2 * 1_777_088_000
    assert of_learner["logits of 9,216 tokens"] == 9216 * 151_936 * 18
    # Inputs of 28 layers, and one layer's 8 x 1,536 + 3 x 8,960 numbers a token, 2 bytes each.
    assert of_learner["activations of 9,216 tokens"] == 2 * 9216 * (28 * 1536 + 8 * 1536 + 3 * 8960)
    of_sampler = sampler_memory(config, shape, 1_777_088_000)
    # 28 layers, keys and values of 2 heads of 128, 2 bytes: 28,672 bytes a token.
    assert of_sampler["keys and values of 128 slots"] == 28_672 * 128 * 9216


def test_the_plan_needs_no_gpu(files):
    config = of_profile(problems=files[0], held_out_problems=files[1], nominal_lag=2)
    text = "\n".join(plan(config, new_scheduler(config), ranks=16))
    assert "ranks      16: 4 learn by FSDP2, 12 sample by vllm; one GPU each" in text
    assert f"7 of {files[0]}, 1 held out of {files[1]}" in text
    assert "16 groups of 8 = 128 responses of up to 8,192 new tokens" in text
    assert "predicted per token: mean" in text
    assert "1.777B parameters" in text
    with pytest.raises(RecipeError, match="needs 4 rank"):
        plan(config, new_scheduler(config), ranks=4)


def test_what_a_profile_cannot_know_must_be_given(files, tmp_path):
    with pytest.raises(RecipeError, match="--model must name a folder"):
        new_policy(of_profile())
    with pytest.raises(RecipeError, match="--problems must name a file"):
        new_policy(of_profile(model=tmp_path))
    with pytest.raises(RecipeError, match="--model must name a folder"):
        new_policy(Config(problems=files[0]))
    with pytest.raises(RecipeError, match="--held-out-problems needs --problems"):
        Config(held_out_problems=files[1])


def test_the_profile_trains_a_small_model_on_a_small_file(start, tmp_path, cache, files):
    """All of the profile but its sizes, vLLM and the GPUs."""
    model = cached_tiny_model(["basic_arithmetic"], warm_up_steps=8, cache_dir=cache)
    flags = ["--profile", "r1d-1.5b", "--model", str(model), "--device", "cpu", "--engine", "transformers"]
    flags += ["--problems", str(files[0]), "--held-out-problems", str(files[1])]
    flags += ["--learners", "2", "--updates", "2", "--max-new-tokens", "6", "--micro-batch-tokens", "300"]
    process = start("sync.py", *flags, "--prompts-per-update", "4", ranks=3)
    _, stderr = process.communicate(timeout=400)
    assert process.returncode == 0, stderr
    run = only_run(tmp_path)
    assert saved_config(run).problems == files[0]
    assert saved_config(run).compute == torch.bfloat16
    summary = json.loads((run / "summary.json").read_text())
    assert summary["updates"] == 2
    assert summary["ratio_max"] == 1.0  # synchronous, exact kernels, bfloat16


def test_a_dry_run_ends_without_a_run(tmp_path):
    command = [sys.executable, str(ROOT / "recipes" / "lag8.py"), "--profile", "r1d-1.5b", "--dry-run"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=400, check=True)
    assert "20,000 updates by reinforce_zero, nominal lag 8" in done.stdout
    assert "8: 4 learn by FSDP2, 4 sample by vllm" in done.stdout
    assert not list(tmp_path.iterdir())
