"""A checkpoint holds everything, as tensors alone, and resumes as if nothing had happened."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torchrl.checkpoint import Checkpoint

from rzero.buffers import (
    FifoGroupSampler,
    OldestVersionFirstSampler,
    RandomGroupSampler,
    prefix_rank,
    strip_rank,
)
from rzero.buffers.codec import decode, encode
from tests.buffers.processes import CONTEXT
from tests.buffers.responses import assert_balanced, assert_same, group, make_buffer
from tests.buffers.test_context import LAW, SamplingContext

SAMPLERS = [FifoGroupSampler, OldestVersionFirstSampler, lambda: RandomGroupSampler(seed=3)]


def busy_buffer(**options):
    """A buffer in the middle of its work."""
    buffer = make_buffer(extra_fields={"log_probs": torch.float32}, **options)
    law = {"context_id": buffer.contexts.intern(SamplingContext(**LAW))}
    for number in range(11):
        buffer.extend(group(number, versions=(20 - number, 20), **law))
    buffer.reserve(77, 4)
    buffer.extend(group(78, **law)[1:3])
    buffer.sample(timeout=0)
    buffer.evict(buffer.stale_groups(2**31 - 1)[-1:], "stale")
    buffer.storage.annotate(torch.tensor([78 * 4 + 1]), "log_probs", torch.arange(5.0))
    return buffer


def empty_buffer(**options):
    return make_buffer(extra_fields={"log_probs": torch.float32}, **options)


def drain(buffer):
    batches = []
    while buffer.can_sample():
        batches.append(buffer.sample(timeout=0))
    return batches


def by_state_dict(buffer, other, folder):
    other.load_state_dict(dict(buffer.state_dict().items()))


def by_dumps(buffer, other, folder):
    buffer.dumps(folder / "dump")
    other.loads(folder / "dump")


def by_torch_save(buffer, other, folder):
    torch.save(buffer.state_dict(), folder / "state.pt")
    other.load_state_dict(torch.load(folder / "state.pt", weights_only=True))


def by_torchrl_checkpoint(buffer, other, folder):
    Checkpoint(buffer=buffer).save(folder / "checkpoint")
    Checkpoint(buffer=other).load(folder / "checkpoint")


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("way", [by_state_dict, by_dumps, by_torch_save, by_torchrl_checkpoint])
def test_a_restored_buffer_goes_on_the_same(tmp_path, way, sampler, prefetch):
    buffer = busy_buffer(sampler=sampler(), prefetch=prefetch)
    other = empty_buffer(sampler=sampler(), prefetch=prefetch)
    other.extend(group(500))  # whatever was there goes
    way(buffer, other, tmp_path)
    stats = assert_balanced(other)
    assert {**stats, "bytes": 0} == {**buffer.stats(), "bytes": 0}
    assert other.storage.verify() == []
    assert other.incomplete() == buffer.incomplete() == {77: [0, 1, 2, 3], 78: [0, 3]}
    assert list(other.contexts) == [SamplingContext(**LAW)]  # strings, which TorchRL's ListStorage loses
    with pytest.raises(ValueError, match="a second time"):
        other.extend(group(0))
    expected, found = drain(buffer), drain(other)
    assert len(expected) == len(found) == 4
    for before, after in zip(expected, found, strict=True):
        assert_same(before, after)
    buffer.shutdown()
    other.shutdown()


def test_prepared_batches_go_on_without_prefetching_too(tmp_path):
    buffer, other = busy_buffer(prefetch=2), empty_buffer()
    other.load_state_dict(buffer.state_dict())
    for before, after in zip(drain(buffer), drain(other), strict=True):
        assert_same(before, after)
    buffer.shutdown()


def test_a_state_is_tensors_and_owns_them():
    buffer = busy_buffer()
    state = buffer.state_dict()
    leaves = list(prefix_rank(state, rank=0).values())
    assert leaves
    assert all(isinstance(leaf, torch.Tensor) for leaf in leaves)
    before = buffer[:]
    for leaf in leaves:
        leaf.zero_()
    assert_same(buffer[:], before)


def test_an_empty_buffer_can_be_saved_and_loaded(tmp_path):
    for way in (by_state_dict, by_dumps, by_torch_save):
        buffer, other = empty_buffer(), busy_buffer()
        way(buffer, other, tmp_path)
        assert len(other) == 0
        other.extend(group(0, context_id=SamplingContext(**LAW).context_id))


def test_a_state_that_does_not_fit_changes_nothing():
    buffer = busy_buffer()
    state, before = buffer.state_dict(), buffer[:]
    with pytest.raises(ValueError, match="state must have layout"):
        make_buffer().load_state_dict(state)
    random = empty_buffer(sampler=RandomGroupSampler(seed=0))
    with pytest.raises(ValueError, match=r"sampler state must hold \['generator', 'order'\], got \[\]"):
        random.load_state_dict(state)
    assert len(random) == 0
    with pytest.raises(ValueError, match="state must hold 'book'"):
        buffer.load_state_dict({**state, "storage": {}})
    with pytest.raises(ValueError, match="responses must fit into chunk_tokens 3, got 5"):
        empty_buffer(chunk_tokens=3).load_state_dict(state)
    state["storage"]["token_ids"][4] += 1
    with pytest.raises(ValueError, match="every response must match its checksums, got Fault"):
        buffer.load_state_dict(state)
    assert_same(buffer[:], before)
    assert_balanced(buffer)
    assert len(drain(buffer)) == 4


def test_a_dump_that_was_damaged_is_refused(tmp_path):
    buffer = busy_buffer()
    buffer.dumps(tmp_path)
    content, note = decode((tmp_path / "buffer.bin").read_bytes())
    book = content["book"].copy()
    book[len(book) // 2] ^= 1
    (tmp_path / "buffer.bin").write_bytes(b"".join(encode({**content, "book": book}, note)))
    with pytest.raises(ValueError, match=r"the book of .* is damaged"):
        empty_buffer().loads(tmp_path)


def test_a_dump_takes_the_place_of_an_older_one(tmp_path):
    buffer = busy_buffer()
    buffer.dumps(tmp_path)
    drain(buffer)
    buffer.dumps(tmp_path)
    other = empty_buffer()
    other.loads(tmp_path)
    assert len(other) == len(buffer)
    assert [path.name for path in tmp_path.iterdir()] == ["buffer.bin"]


def test_a_store_on_disk_can_be_restored_to_a_checkpoint(tmp_path):
    buffer = busy_buffer(path=tmp_path / "store")
    state, expected = buffer.state_dict(), buffer[:]
    drain(buffer)
    buffer.load_state_dict(state)
    buffer.shutdown()
    again = empty_buffer(path=tmp_path / "store")
    assert {name: again[:].get(name).tolist() for name in ("uid", "reward")} == {
        name: expected.get(name).tolist() for name in ("uid", "reward")
    }
    assert again.storage.verify() == []
    assert len(drain(again)) == 4
    again.shutdown()


def test_the_storage_alone_can_be_saved(tmp_path):
    buffer, other = busy_buffer(), empty_buffer()
    buffer.storage.dumps(tmp_path / "storage.bin")
    other.storage.loads(tmp_path / "storage.bin")
    assert_same(buffer[:], other[:])


def test_ranks_have_names_of_their_own():
    state = {"storage": {"book": 1, "token_ids": 2}, "sampler": {}}
    named = prefix_rank(state, rank=3)
    assert named == {"rank3.storage.book": 1, "rank3.storage.token_ids": 2}
    assert strip_rank({**named, "rank30.storage.book": 9}, rank=3) == {"storage": {"book": 1, "token_ids": 2}}


# Under torch.distributed.checkpoint.


def template(path):
    """Tensors of the shapes that a checkpoint holds, to load it into."""
    metadata = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    return {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in metadata.items()}


def _rank(rank, folder, prefixed, results):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    buffer = make_buffer()
    for number in range(2):
        buffer.extend(group(10 * rank + number))
    state = prefix_rank(buffer.state_dict(), rank=rank if prefixed else 0)
    dcp.save(state, checkpoint_id=folder / "dcp")
    loaded = template(folder / "dcp")
    dcp.load(loaded, checkpoint_id=folder / "dcp")
    other = make_buffer()
    try:
        other.load_state_dict(strip_rank(loaded, rank=rank if prefixed else 0))
        results.put((rank, other[:].group_id.unique().tolist()))
    except ValueError as error:
        results.put((rank, str(error)))
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize("prefixed", [True, False])
def test_ranks_that_save_together_keep_their_own(tmp_path, prefixed):
    results = CONTEXT.Queue()
    ranks = [CONTEXT.Process(target=_rank, args=(rank, tmp_path, prefixed, results)) for rank in range(2)]
    for process in ranks:
        process.start()
    found = dict(results.get(timeout=120) for _ in ranks)
    for process in ranks:
        process.join()
        assert process.exitcode == 0
    if prefixed:
        assert found == {0: [0, 1], 1: [10, 11]}
    else:
        # The trap: equal names are taken for copies of one tensor, and each is kept from whichever rank. What
        # comes back is one rank's buffer twice, or a mixture, which the digests then refuse.
        assert found != {0: [0, 1], 1: [10, 11]}
