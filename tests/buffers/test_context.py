"""A sampling law is recorded whole, and has one name everywhere."""

import dataclasses
import hashlib
import json
import threading

import pytest

from rzero.buffers import ContextTable, SamplingContext
from tests.buffers.processes import CONTEXT
from tests.buffers.responses import full_disk

LAW = {
    "temperature": 0.5,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "log_prob_mode": "processed",
    "engine": "vllm",
    "engine_version": "0.32.0",
    "kernel_fingerprint": "exact-1",
    "dtype": "bfloat16",
    "tensor_parallel_size": 2,
    "model_digest": "m1",
    "tokenizer_digest": "t1",
}
# Written out by hand: sorted keys, no spaces.
TEXT = (
    '{"dtype":"bfloat16","engine":"vllm","engine_version":"0.32.0","kernel_fingerprint":"exact-1",'
    '"log_prob_mode":"processed","min_p":0.0,"model_digest":"m1","temperature":0.5,'
    '"tensor_parallel_size":2,"tokenizer_digest":"t1","top_k":0,"top_p":1.0}'
)


def test_the_id_is_63_bits_of_the_hash_of_the_text():
    context = SamplingContext(**LAW)
    assert context.to_json() == TEXT
    expected = int.from_bytes(hashlib.blake2b(TEXT.encode(), digest_size=8).digest(), "little") >> 1
    assert context.context_id == expected
    assert 0 <= expected < 2**63


def test_another_process_gives_the_same_id():
    with CONTEXT.Pool(1) as pool:
        assert pool.apply(_context_id) == SamplingContext(**LAW).context_id


def _context_id():
    return SamplingContext(**LAW).context_id


OTHER = {
    "temperature": 0.7,
    "top_p": 0.9,
    "top_k": 50,
    "min_p": 0.1,
    "engine": "transformers",
    "engine_version": "0.33.0",
    "kernel_fingerprint": "exact-2",
    "dtype": "float32",
    "tensor_parallel_size": 1,
    "model_digest": "m2",
    "tokenizer_digest": "t2",
}


@pytest.mark.parametrize("name", OTHER)
def test_every_field_counts(name):
    changed = SamplingContext(**{**LAW, name: OTHER[name]})
    assert changed.context_id != SamplingContext(**LAW).context_id


@pytest.mark.parametrize("name", LAW)
def test_no_field_has_a_default(name):
    with pytest.raises(TypeError, match=name):
        SamplingContext(**{key: value for key, value in LAW.items() if key != name})


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("temperature", 0.0, ValueError),
        ("temperature", float("inf"), ValueError),
        ("temperature", float("nan"), ValueError),
        ("temperature", "1", TypeError),
        ("top_p", 0.0, ValueError),
        ("top_p", 1.1, ValueError),
        ("top_k", -1, ValueError),
        ("top_k", 1.0, TypeError),
        ("top_k", True, TypeError),
        ("min_p", 1.0, ValueError),
        ("min_p", -0.1, ValueError),
        ("log_prob_mode", "raw", ValueError),
        ("engine", "", ValueError),
        ("kernel_fingerprint", 7, TypeError),
        ("tensor_parallel_size", 0, ValueError),
        ("model_digest", "", ValueError),
    ],
)
def test_what_is_no_law_is_refused(name, value, error):
    with pytest.raises(error, match=f"SamplingContext: {name} must"):
        SamplingContext(**{**LAW, name: value})


def test_equal_laws_are_equal_however_they_were_written():
    assert SamplingContext(**{**LAW, "top_p": 1}).context_id == SamplingContext(**LAW).context_id


def test_it_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        SamplingContext(**LAW).temperature = 1.0


def test_json_comes_back_whole_or_not_at_all():
    context = SamplingContext(**LAW)
    assert SamplingContext.from_json(context.to_json()) == context
    with pytest.raises(ValueError, match="must hold exactly"):
        SamplingContext.from_json('{"temperature": 1.0}')
    with pytest.raises(ValueError, match="must hold exactly"):
        SamplingContext.from_json(json.dumps({**LAW, "extra": 1}))


def test_a_table_interns_and_survives_on_disk(tmp_path):
    table = ContextTable(tmp_path / "contexts.json")
    first, second = SamplingContext(**LAW), SamplingContext(**{**LAW, "temperature": 1.0})
    assert table.intern(first) == table.intern(SamplingContext(**LAW)) == first.context_id
    table.intern(second)
    assert len(table) == 2

    again = ContextTable(tmp_path / "contexts.json")
    assert list(again) == [first, second]
    assert again[first.context_id] == first
    assert second.context_id in again
    assert 0 not in again
    assert [path.name for path in tmp_path.iterdir()] == ["contexts.json"]


def test_threads_may_intern_at_once(tmp_path):
    laws = [SamplingContext(**{**LAW, "temperature": 1.0 + step}) for step in range(40)]
    table, failures = ContextTable(tmp_path / "contexts.json"), []

    def intern(portion):
        try:
            for law in portion:
                table.intern(law)
        except OSError as error:
            failures.append(error)

    threads = [
        threading.Thread(target=intern, args=(laws[start:] + laws[:start],)) for start in (0, 10, 20, 30)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert failures == []
    assert set(ContextTable(tmp_path / "contexts.json")) == set(table) == set(laws)


def test_a_law_that_the_disk_refused_is_not_in_the_table(tmp_path):
    table = ContextTable(tmp_path / "contexts.json")
    table.intern(SamplingContext(**LAW))
    other = SamplingContext(**{**LAW, "temperature": 9.0})
    with full_disk(300), pytest.raises(OSError, match="File too large"):
        table.intern(other)
    assert list(table) == list(ContextTable(tmp_path / "contexts.json")) == [SamplingContext(**LAW)]
    table.intern(other)
    assert other in list(ContextTable(tmp_path / "contexts.json"))


def test_a_table_that_was_tampered_with_is_refused(tmp_path):
    path = tmp_path / "contexts.json"
    ContextTable(path).intern(SamplingContext(**LAW))
    path.write_text(path.read_text().replace("0.5", "0.7"))
    with pytest.raises(ValueError, match="id must be"):
        ContextTable(path)
