"""The contract of the two private calls: what TorchRL's helpers read after we made them."""

from torchrl.data import LazyTensorStorage
from torchrl.data.replay_buffers.storages import Storage

from rzero.buffers.torchrl_private import note_change, note_write
from tests.buffers.responses import group, make_buffer


def test_the_calls_exist_where_we_call_them():
    assert callable(Storage._set_last_cursor)
    assert callable(Storage._bump_mutation_revision)


def test_a_write_renews_what_was_derived():
    storage = LazyTensorStorage(10)
    before = storage._mutation_revision
    note_write(storage, 4)
    assert storage._last_cursor_index == 4
    assert storage._mutation_revision == before + 1
    note_change(storage)
    assert storage._last_cursor_index == 4
    assert storage._mutation_revision == before + 2


def test_our_storage_makes_them_whenever_its_content_changes():
    buffer = make_buffer(groups_per_batch=1)
    revision = buffer.storage._mutation_revision
    index = buffer.extend(group(0))
    assert buffer.storage._last_cursor_index == index[-1]
    assert buffer.storage._mutation_revision > revision
    revision = buffer.storage._mutation_revision
    buffer.sample(timeout=0)
    assert buffer.storage._mutation_revision > revision
