"""Parts of a batch, and learners that compute in another precision than they keep."""

import json
from itertools import pairwise

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from recipes.config import Config
from recipes.errors import RecipeError
from recipes.learners import Learners, cut_rows
from recipes.policy import load_policy
from recipes.reinforce_zero import compute_gradients
from recipes.tasks.reasoning import ReasoningTasks
from rzero.buffers import pack
from rzero.buffers.packing import offsets
from tests.buffers.responses import rollout
from tests.losses.batches import unhurried
from tests.recipes.conftest import TINY
from tests.recipes.test_reinforce_zero import only_run


@unhurried
@given(st.lists(st.integers(1, 50), min_size=1, max_size=20), st.data())
def test_parts_cover_all_rows_and_none_is_empty(lengths, data):
    parts = data.draw(st.integers(1, len(lengths)))
    ends = cut_rows(offsets(lengths), parts)
    assert len(ends) == parts
    assert ends[-1] == len(lengths)
    assert all(first < end for first, end in pairwise([0, *ends]))
    # A part has its fair share and at most the longest row more, unless other parts needed the rows.
    if parts == 2 and len(lengths) > 2:
        assert sum(lengths[: ends[0]]) <= sum(lengths) / 2 + max(lengths)


@pytest.fixture(scope="module")
def policy(cache):
    return load_policy(
        None,
        specs=["basic_arithmetic"],
        tasks=ReasoningTasks(["basic_arithmetic"], seed=0, held_out_size=8),
        temperature=1.0,
        warm_up_steps=8,
        kernels="native",
    )


@pytest.mark.parametrize("objective", ["reinforce_zero", "batch_mean"])
def test_parts_give_the_gradients_of_the_whole(policy, objective):
    batch = pack(
        [
            rollout(uid, reward=float(uid % 3 == 0), versions=(3,) * (2 + uid % 5), prompt=3)
            for uid in range(12)
        ]
    )
    batch.token_ids.remainder_(90)
    found = {}
    for tokens in (0, 1, 20, 10**6):
        config = Config(objective=objective, group_size=4, micro_batch_tokens=tokens)
        policy.model.zero_grad()
        calls = []
        counting = policy.model.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        measured = compute_gradients(config, Learners(1), policy, batch)
        counting.remove()
        gradients = torch.cat([p.grad.flatten() for p in policy.model.parameters()])
        found[tokens] = (measured, gradients, len(calls))
    whole, gradients, calls = found[0]
    assert found[1][2] > found[20][2] > calls == found[10**6][2]
    for measured, others, _ in found.values():
        torch.testing.assert_close(others, gradients, rtol=1e-4, atol=1e-7)
        for name in ("loss", "log_probs", "entropies"):
            torch.testing.assert_close(measured[name], whole[name], rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_ratios_are_one_when_all_compute_in_bfloat16(start, tmp_path):
    """Two learners keep float32 and compute in bfloat16, in parts, activations twice: as the sampler does."""
    flags = ["--learners", "2", "--compute-dtype", "bfloat16"]
    flags += ["--kernels", "exact", "--micro-batch-tokens", "100", "--recompute-activations"]
    process = start("sync.py", *TINY, *flags, "--updates", "3", "--audit-every", "3", ranks=3)
    _, stderr = process.communicate(timeout=240)
    assert process.returncode == 0, stderr
    summary = json.loads((only_run(tmp_path) / "summary.json").read_text())
    assert (summary["ratio_mean"], summary["ratio_max"]) == (1.0, 1.0)
    assert [audit["mismatching"] for audit in summary["audits"]] == [0]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"compute_dtype": "bfloat16"},
            "--compute-dtype bfloat16 needs --learners of at least 2, and",
        ),
        ({"compute_dtype": "bfloat16", "wire_dtype": "bfloat16", "learners": 2}, "got 2 and bfloat16"),
        ({"micro_batch_tokens": -1}, "--micro-batch-tokens must be at least 0"),
    ],
)
def test_what_does_not_go_together_is_refused(settings, message):
    with pytest.raises(RecipeError, match=message):
        Config(**settings)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_gpu_is_said_in_one_line(start):
    process = start("lag2.py", *TINY, "--device", "cuda")
    _, stderr = process.communicate(timeout=120)
    assert "error: --device cuda needs a GPU that torch can use, got none" in stderr
