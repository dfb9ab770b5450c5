"""A record exists only if it is evidence: complete, consistent, and what its digest says."""

import dataclasses
import pickle

import pytest
import torch

from rzero.buffers import ROW_FIELDS, TOKEN_FIELDS, FinishCode, Rollout, make_rollout, segments
from tests.buffers.responses import assert_same, fields, rollout

NAN = float("nan")


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


def test_a_valid_response_keeps_what_it_was_given():
    record = rollout(7)
    assert record.uid.item() == 7
    assert record.uid.dtype == torch.int64
    assert record.sample_index.dtype == torch.int32
    assert record.finish_code.item() == FinishCode.STOP
    assert record.behavior_log_probs[:2].isnan().all()
    for name, dtype in (TOKEN_FIELDS | ROW_FIELDS).items():
        assert getattr(record, name).dtype == dtype


@pytest.mark.parametrize("name", [*TOKEN_FIELDS, *ROW_FIELDS, "digest"])
def test_no_field_has_a_default(name):
    values = fields()
    del values[name]
    with pytest.raises(TypeError, match=name):
        make_rollout(**values)


@pytest.mark.parametrize("name", [*TOKEN_FIELDS, *ROW_FIELDS, "digest"])
def test_no_field_is_cast(name):
    values = dict(rollout().items())
    values[name] = values[name].double()
    with pytest.raises(TypeError, match=rf"Rollout: {name} must be a tensor of dtype"):
        Rollout(**values)
    values[name] = None
    with pytest.raises(TypeError, match=rf"Rollout: {name} must be a tensor of dtype .* got NoneType"):
        Rollout(**values)


@pytest.mark.parametrize("name", [*TOKEN_FIELDS, *ROW_FIELDS, "digest"])
def test_no_field_is_broadcast(name):
    values = dict(rollout().items())
    values[name] = torch.stack([values[name], values[name]])
    with pytest.raises(ValueError, match=r"must have shape"):
        Rollout(**values)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"token_ids": ints(1, 2, -3, 4, 5)}, r"token_ids must be >= 0, got -3 at token 2 of uid 0"),
        (
            {"behavior_log_probs": torch.tensor([NAN, NAN, -1.0, NAN, -1.0])},
            r"behavior_log_probs must be a number where response_mask is True .* at token 3",
        ),
        (
            {"behavior_log_probs": torch.tensor([0.0, NAN, -1.0, -1.0, -1.0])},
            r"NaN elsewhere, got 0.0 at token 0",
        ),
        (
            {"behavior_log_probs": torch.tensor([NAN, NAN, -1.0, 0.5, -1.0])},
            r"must be <= 0, got 0.5 at token 3",
        ),
        (
            {"behavior_log_probs": torch.tensor([NAN, NAN, -1.0, -float("inf"), -1.0])},
            r"must be finite, got -inf at token 3",
        ),
        ({"policy_version": ints(-1, -1, 3, -1, 4)}, r"policy_version must be >= 0 .* got -1 at token 3"),
        ({"policy_version": ints(0, -1, 3, 3, 4)}, r"-1 elsewhere, got 0 at token 0"),
        ({"policy_version": ints(-2, -1, 3, 3, 4)}, r"must be -1 where response_mask is False, got -2"),
        ({"response_mask": torch.tensor([False, False, True, False, True])}, r"at token 3"),
        ({"prompt_length": 3, "response_length": 2}, r"response_mask must be False on the prompt"),
        ({"prompt_length": 0, "response_length": 5}, r"prompt_length must be >= 1, got 0"),
        ({"response_length": 4}, r"response_length must be the number of tokens less prompt_length, got 4"),
        ({"uid": -1}, r"uid must be >= 0, got -1"),
        ({"group_id": -1}, r"group_id must be >= 0"),
        ({"prompt_id": -1}, r"prompt_id must be >= 0"),
        ({"context_id": -1}, r"context_id must be >= 0"),
        ({"sample_index": -1}, r"sample_index must be >= 0"),
        ({"reward": NAN}, r"reward must be finite"),
        ({"reward": float("inf")}, r"reward must be finite"),
        ({"finish_code": 3}, r"finish_code must be a FinishCode"),
        ({"finish_code": -1}, r"finish_code must be a FinishCode"),
        ({"t_submit_ns": -1}, r"t_submit_ns must be >= 0"),
        ({"t_first_ns": 9}, r"t_first_ns must not precede t_submit_ns, got 9"),
        ({"t_done_ns": 19}, r"t_done_ns must not precede t_first_ns, got 19"),
        ({"digest": torch.zeros(2, dtype=torch.int64)}, r"digest must be the provenance_digest"),
    ],
)
def test_what_is_no_evidence_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        rollout(**changes)


def test_a_response_without_tokens_is_refused_unless_it_was_aborted():
    nothing = {
        "versions": (-1,),
        "behavior_log_probs": torch.full((3,), NAN),
        "policy_version": ints(-1, -1, -1),
        "response_mask": torch.zeros(3, dtype=torch.bool),
    }
    with pytest.raises(ValueError, match="must be True somewhere unless aborted"):
        rollout(**nothing)
    assert rollout(finish_code=FinishCode.ABORT, **nothing).finish_code.item() == FinishCode.ABORT
    assert segments(rollout(finish_code=FinishCode.ABORT, **nothing)) == []


@pytest.mark.parametrize(
    ("name", "value"), [("uid", 2**63), ("finish_code", 128), ("uid", 1.5), ("sample_index", 2**31)]
)
def test_a_number_that_does_not_fit_is_refused(name, value):
    with pytest.raises(ValueError, match=f"make_rollout: {name} must fit"):
        rollout(**{name: value})


def test_an_unknown_field_is_refused():
    with pytest.raises(TypeError, match=r"must be those of Rollout, got .'advantage'."):
        make_rollout(**fields(), advantage=1.0)


def test_it_cannot_be_changed():
    record = rollout()
    with pytest.raises(dataclasses.FrozenInstanceError):
        record.behavior_log_probs = torch.zeros(5)
    with pytest.raises(RuntimeError, match="locked"):
        record.set("reward", torch.tensor(1.0))


def test_every_copy_is_checked_again():
    record = rollout(3)
    assert_same(record.clone(), record)
    assert_same(pickle.loads(pickle.dumps(record)), record)
    record.behavior_log_probs[3] = -0.1  # In-place writes cannot be forbidden, but they do not go unnoticed.
    with pytest.raises(ValueError, match="digest must be the provenance_digest"):
        record.clone()
    with pytest.raises(ValueError, match="digest must be the provenance_digest"):
        pickle.loads(pickle.dumps(record))


@pytest.mark.parametrize(
    ("versions", "expected"),
    [
        # Fault 1 of the field: at version 3, swapped to 4 after the second of five tokens.
        ((3, 3, 4, 4, 4), [(0, 2, 3), (2, 5, 4)]),
        ((3,), [(0, 1, 3)]),
        ((0, 1, 2), [(0, 1, 0), (1, 2, 1), (2, 3, 2)]),
        ((5, -1, -1, 5, 6), [(0, 1, 5), (3, 4, 5), (4, 5, 6)]),  # a tool's answer between sampled tokens
        ((-1, 2), [(1, 2, 2)]),
    ],
)
def test_segments_are_read_off_the_tokens(versions, expected):
    assert segments(rollout(versions=versions)) == expected
