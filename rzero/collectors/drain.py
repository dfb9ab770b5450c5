"""Taking all that waits in a queue at once."""

import queue
from typing import TypeVar

ItemT = TypeVar("ItemT")


def drain(source: "queue.SimpleQueue[ItemT]") -> list[ItemT]:
    """Wait for one item, then take all that are there.

    Example:
        >>> source = queue.SimpleQueue()
        >>> source.put(1); source.put(2)
        >>> drain(source)
        [1, 2]
    """
    items = [source.get()]
    while True:
        try:
            items.append(source.get_nowait())
        except queue.Empty:
            return items
