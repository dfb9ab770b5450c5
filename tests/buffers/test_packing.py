"""Packing loses and alters nothing, and a batch that was altered does not pass."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from rzero.buffers import PackedBatch, pack, pack_fields, unpack, validate
from rzero.buffers.packing import digests_match, offsets
from tests.buffers.responses import assert_same, fields, rollout

shapes = st.lists(
    st.tuples(st.integers(1, 5), st.lists(st.integers(-1, 9), min_size=1, max_size=9).map(lambda v: [2, *v])),
    min_size=1,
    max_size=6,
)


@settings(max_examples=25, deadline=None)
@given(shapes)
def test_unpack_undoes_pack(sizes):
    rollouts = [
        rollout(uid, prompt=prompt, versions=versions) for uid, (prompt, versions) in enumerate(sizes)
    ]
    batch = pack(rollouts)
    assert batch.num_responses == len(sizes)
    assert batch.num_tokens == sum(prompt + len(versions) for prompt, versions in sizes)
    assert batch.cu_seqlens.dtype == torch.int32
    for before, after in zip(rollouts, unpack(batch), strict=True):
        assert_same(before, after)


def test_the_layout_is_what_it_says():
    batch = pack([rollout(4, prompt=1, versions=(2, 2)), rollout(5, prompt=3, versions=(7,))])
    assert batch.cu_seqlens.tolist() == [0, 3, 7]
    assert batch.policy_version.tolist() == [-1, 2, 2, -1, -1, -1, 7]
    assert batch.response_mask.tolist() == [False, True, True, False, False, False, True]
    assert batch.uid.tolist() == [4, 5]
    assert batch.digest.shape == (2, 2)


def test_plain_mappings_pack_to_the_same():
    assert_same(pack_fields([fields(1), fields(2)]), pack([rollout(1), rollout(2)]))


def test_extras_are_packed_beside_the_evidence():
    extras = [{"log_probs": torch.full((5,), float(uid))} for uid in (1, 2)]
    batch = pack_fields([fields(uid) | {"extras": extra} for uid, extra in zip((1, 2), extras, strict=True)])
    assert batch.extras["log_probs"].tolist() == [1.0] * 5 + [2.0] * 5


def test_a_batch_owns_its_memory():
    one = rollout(1)
    batch = pack([one])
    batch.token_ids[0] = 999
    assert one.token_ids[0] != 999


def test_offsets_grow_to_int64_where_they_must():
    assert offsets([2**31 - 1]).dtype == torch.int32
    assert offsets([2**31 - 1, 1]).dtype == torch.int64
    assert offsets(np.array([3, 4])).tolist() == [0, 3, 7]


def test_nothing_is_no_batch():
    with pytest.raises(ValueError, match="at least one response"):
        pack([])
    with pytest.raises(TypeError, match="must hold Rollouts, got dict"):
        pack([fields()])
    with pytest.raises(TypeError, match="must have the field 'reward'"):
        pack_fields([{name: value for name, value in fields().items() if name != "reward"}])


def changed(**changes):
    values = dict(pack([rollout(1), rollout(2)]).items())
    return PackedBatch(**{**values, **changes})


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"token_ids": torch.zeros(10, dtype=torch.int64)}, TypeError, "token_ids must be a tensor of dtype"),
        ({"uid": None}, TypeError, "uid must be a tensor"),
        ({"reward": torch.zeros(3)}, ValueError, r"reward must have shape \(2,\), got \(3,\)"),
        (
            {"response_mask": torch.ones(9, dtype=torch.bool)},
            ValueError,
            r"must have shape \(10,\), got \(9,\)",
        ),
        ({"cu_seqlens": torch.tensor([0.0, 5.0, 10.0])}, TypeError, "cu_seqlens must be an int32 or int64"),
        ({"cu_seqlens": torch.tensor([0, 10])}, ValueError, r"cu_seqlens must have shape \(3,\)"),
        ({"cu_seqlens": torch.tensor([0, 5, 9])}, ValueError, "must rise strictly from 0 to 10"),
        ({"cu_seqlens": torch.tensor([1, 5, 10])}, ValueError, "must rise strictly"),
        ({"cu_seqlens": torch.tensor([0, 0, 10])}, ValueError, "must rise strictly"),
        ({"cu_seqlens": torch.tensor([0, 12, 10])}, ValueError, "must rise strictly"),
        ({"extras": TensorDict({"reward": torch.zeros(10)}, [10])}, ValueError, "extras must be new names"),
        (
            {"extras": TensorDict({"a": torch.zeros(3)}, [3])},
            ValueError,
            r"extras must be .* \(10,\), got 'a'",
        ),
    ],
)
def test_a_batch_of_another_layout_is_refused(changes, error, message):
    with pytest.raises(error, match=message):
        changed(**changes)


def test_validate_names_the_token_that_is_wrong():
    batch = changed()
    assert validate(batch) is batch
    batch.behavior_log_probs[8] = 0.25
    with pytest.raises(
        ValueError, match=r"validate: behavior_log_probs must be <= 0, got 0.25 at token 3 of uid 2"
    ):
        validate(batch)


def test_an_overwritten_probability_fails_its_digest():
    batch = changed()
    batch.behavior_log_probs[8] = -0.25
    assert digests_match(batch).tolist() == [True, False]
    with pytest.raises(
        ValueError, match=r"digest must be the provenance_digest of the token fields, got .* uid 2"
    ):
        validate(batch)
    with pytest.raises(ValueError, match="digest"):
        unpack(batch)


def test_swapped_rows_fail_their_digests():
    batch = changed()
    batch.digest = batch.digest.flip(0)
    assert digests_match(batch).tolist() == [False, False]
