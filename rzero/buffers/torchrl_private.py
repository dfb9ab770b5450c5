"""The two private calls of TorchRL's Storage that a storage of one's own cannot avoid.

`tests/buffers/test_torchrl_private.py` holds their contract, so that a TorchRL release that changes them is
noticed there and repaired here.
"""

from typing import Any

from torchrl.data.replay_buffers.storages import Storage


def note_write(storage: Storage, cursor: Any) -> None:
    """Tell TorchRL's helpers that ``cursor`` was written, so that they renew what they derived."""
    storage._set_last_cursor(cursor)
    storage._bump_mutation_revision()


def note_change(storage: Storage) -> None:
    """Tell TorchRL's helpers that the content changed, so that they renew what they derived."""
    storage._bump_mutation_revision()
