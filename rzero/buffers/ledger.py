"""The book of groups: what was submitted, and what became of every single response."""

from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rzero.buffers.interval_set import IntervalSet
from rzero.buffers.samplers import ReadyGroup

_NO_VERSION = int(np.iinfo(np.int32).max)


class Group:
    """A group in the store: its rows, and what the next row must agree with."""

    __slots__ = ("indices", "opened_at", "places", "prompt_id", "sequence", "version")

    def __init__(self, opened_at: float):
        """Open an empty group."""
        self.opened_at = opened_at
        self.places: list[int] = []
        self.indices: set[int] = set()
        self.prompt_id: int | None = None
        self.version = _NO_VERSION
        self.sequence = -1


class Ledger:
    """Counts responses in whole groups and loses none.

    A group is opened by a reservation or by its first response. It becomes ready when all its responses are
    there, is leased while a batch is made of it, and is closed when it is consumed, evicted or failed::

        open --> ready <--> leased --> consumed
          |        |          |
        failed  evicted    evicted

    After every call ``submitted = running + stored + consumed + evicted + failed``, in responses; running
    are those that were reserved and neither arrived nor failed. A closed group never opens again, and a uid
    is admitted once in a lifetime.

    Args:
        group_size: responses in each group.
    """

    def __init__(self, group_size: int):
        """Start empty."""
        self.group_size = group_size
        self.open: OrderedDict[int, Group] = OrderedDict()
        self.ready: OrderedDict[int, Group] = OrderedDict()
        self.leased: dict[int, Group] = {}
        self.submitted = self.stored = self.consumed = 0
        self.evicted: Counter[str] = Counter()
        self.failed: Counter[str] = Counter()
        self._closed = IntervalSet()
        self._uids = IntervalSet()
        self._sequence = 0

    @property
    def admitted(self) -> int:
        """Responses that ever arrived."""
        return self.stored + self.consumed + self.evicted.total()

    @property
    def running(self) -> int:
        """Responses that were reserved and neither arrived nor failed."""
        return sum(self.group_size - len(group.places) for group in self.open.values())

    def stats(self) -> dict[str, int]:
        """Count everything, in responses unless the name says otherwise."""
        return {
            "submitted": self.submitted,
            "running": self.running,
            "stored": self.stored,
            "consumed": self.consumed,
            "evicted": self.evicted.total(),
            "failed": self.failed.total(),
            "groups_ready": len(self.ready) + len(self.leased),
            "groups_incomplete": len(self.open),
            **{f"evicted/{reason}": count for reason, count in self.evicted.items()},
            **{f"failed/{reason}": count for reason, count in self.failed.items()},
        }

    def check_reserve(self, group_id: int, size: int) -> None:
        """Raise ValueError unless the group may be opened."""
        if size != self.group_size:
            raise ValueError(f"reserve: size must be group_size {self.group_size}, got {size}")
        if group_id < 0 or self._known(group_id):
            raise ValueError(f"reserve: group_id must be new and >= 0, got {group_id}")

    def reserve(self, group_id: int, *, now: float) -> None:
        """Open a group; all its responses count as running from here on."""
        self.open[group_id] = Group(now)
        self.submitted += self.group_size

    def check_admit(self, rows: np.ndarray) -> None:
        """Raise ValueError, naming the response, unless all rows may come in together."""
        uids = rows["uid"]
        repeated = self._uids.find(uids)
        if repeated.any():
            raise ValueError(f"extend: uid must be new, got {uids[repeated][0]} a second time")
        if len(set(uids.tolist())) < len(uids):
            raise ValueError(f"extend: uids must differ, got {uids.tolist()}")
        coming: dict[int, tuple[int, set[int]]] = {}
        columns = (rows[name].tolist() for name in ("group_id", "prompt_id", "sample_index"))
        for group_id, prompt_id, index in zip(*columns, strict=True):
            if group_id not in coming:
                coming[group_id] = self._expected(group_id, prompt_id)
            prompt, indices = coming[group_id]
            if prompt_id != prompt:
                raise ValueError(
                    f"extend: group {group_id} must be of prompt {prompt}, got prompt {prompt_id}"
                )
            if index >= self.group_size or index in indices:
                raise ValueError(
                    f"extend: group {group_id} must have each sample_index below {self.group_size} once, "
                    f"got {index}"
                )
            indices.add(index)

    def admit(self, rows: np.ndarray, places: Sequence[int], *, now: float) -> list[ReadyGroup]:
        """Enter checked rows, and return the groups that they complete."""
        completed = []
        columns = (rows[name].tolist() for name in ("group_id", "prompt_id", "sample_index", "version"))
        for place, group_id, prompt_id, index, version in zip(places, *columns, strict=True):
            if group_id not in self.open:
                self.reserve(group_id, now=now)
            group = self.open[group_id]
            group.prompt_id = prompt_id
            group.places.append(place)
            group.indices.add(index)
            group.version = min(group.version, version)
            if len(group.places) == self.group_size:
                group.sequence = self._sequence
                self._sequence += 1
                self.ready[group_id] = self.open.pop(group_id)
                completed.append(ReadyGroup(group_id, group.version, group.sequence))
        self._uids.add(rows["uid"].tolist())
        self.stored += len(rows)
        return completed

    def check_close(self, kind: str, group_ids: Sequence[int]) -> None:
        """Raise ValueError unless each group is where ``consume``, ``evict`` or ``fail`` takes it from."""
        sources = {"consume": [self.leased], "evict": [self.ready, self.leased], "fail": [self.open]}[kind]
        for group_id in group_ids:
            if not any(group_id in source for source in sources):
                raise ValueError(f"{kind}: group_id must name a group that can be closed so, got {group_id}")
        if len(set(group_ids)) < len(group_ids):
            raise ValueError(f"{kind}: group_ids must be distinct, got {list(group_ids)}")

    def lease(self, group_ids: Sequence[int]) -> list[int]:
        """Take ready groups aside while a batch is made of them, and return the places of their rows."""
        self.leased |= {group_id: self.ready.pop(group_id) for group_id in group_ids}
        return [place for group_id in group_ids for place in self.leased[group_id].places]

    def give_back(self, group_ids: Sequence[int]) -> list[ReadyGroup]:
        """Make leased groups ready again."""
        self.ready |= {group_id: self.leased.pop(group_id) for group_id in group_ids}
        return [self._ready_group(group_id) for group_id in group_ids]

    def consume(self, group_ids: Sequence[int]) -> list[int]:
        """Close leased groups as used, and return the places of their rows."""
        places = self._close([self.leased.pop(group_id) for group_id in group_ids], group_ids)
        self.consumed += len(places)
        return places

    def evict(self, group_ids: Sequence[int], reason: str) -> list[int]:
        """Close ready or leased groups unused, and return the places of their rows."""
        groups = [
            self.ready.pop(group_id) if group_id in self.ready else self.leased.pop(group_id)
            for group_id in group_ids
        ]
        places = self._close(groups, group_ids)
        self.evicted[reason] += len(places)
        return places

    def fail(self, group_id: int, reason: str) -> list[int]:
        """Close an incomplete group: its rows count as evicted, the missing ones as failed."""
        places = self._close([self.open.pop(group_id)], [group_id])
        self.failed[reason] += self.group_size - len(places)
        if places:
            self.evicted[reason] += len(places)
        return places

    def ready_groups(self) -> list[ReadyGroup]:
        """The groups that can be sampled, in the order of completion."""
        return sorted(map(self._ready_group, self.ready), key=lambda group: group.sequence)

    def to_arrays(self) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """All that the rows do not say, as arrays and as a note for JSON. Leased groups count as ready."""
        ready = [(group_id, group.sequence) for group_id, group in (self.ready | self.leased).items()]
        arrays = {
            "open": np.array(list(self.open), dtype=np.int64),
            "ready": np.array(ready, dtype=np.int64).reshape(-1, 2),
            "closed": self._closed.to_array(),
            "uids": self._uids.to_array(),
        }
        note = {
            "submitted": self.submitted,
            "consumed": self.consumed,
            "sequence": self._sequence,
            "evicted": dict(self.evicted),
            "failed": dict(self.failed),
        }
        return arrays, note

    def restore(
        self,
        arrays: Mapping[str, np.ndarray],
        note: Mapping[str, Any],
        rows: np.ndarray,
        places: Sequence[int],
        *,
        now: float,
    ) -> None:
        """Rebuild an empty book from what `to_arrays` returned and from the stored rows."""
        for group_id in arrays["open"].tolist():
            self.reserve(group_id, now=now)
        self.admit(rows, places, now=now)
        for group_id, sequence in arrays["ready"].tolist():
            self.ready[group_id].sequence = sequence
        self._closed, self._uids = IntervalSet(arrays["closed"]), IntervalSet(arrays["uids"])
        self.submitted, self.consumed, self._sequence = note["submitted"], note["consumed"], note["sequence"]
        self.evicted, self.failed = Counter(note["evicted"]), Counter(note["failed"])

    def _known(self, group_id: int) -> bool:
        return any(group_id in part for part in (self.open, self.ready, self.leased, self._closed))

    def _expected(self, group_id: int, prompt_id: int) -> tuple[int, set[int]]:
        """The prompt of a group, and the sample indices that it has."""
        group = self.open.get(group_id)
        if group is not None:
            return (prompt_id if group.prompt_id is None else group.prompt_id), set(group.indices)
        if self._known(group_id):
            complete = group_id in self.ready or group_id in self.leased
            state = f"is complete with {self.group_size} responses" if complete else "was closed"
            raise ValueError(f"extend: group {group_id} {state} and takes no more")
        return prompt_id, set()

    def _ready_group(self, group_id: int) -> ReadyGroup:
        group = self.ready[group_id]
        return ReadyGroup(group_id, group.version, group.sequence)

    def _close(self, groups: Sequence[Group], group_ids: Sequence[int]) -> list[int]:
        places = [place for group in groups for place in group.places]
        self._closed.add(group_ids)
        self.stored -= len(places)
        return places
