"""The methods of TorchRL's ReplayBuffer that would overwrite what is stored, refused."""

from typing import Any, NoReturn

from torchrl.data.replay_buffers import ReplayBuffer


class WriteOnceReplayBuffer(ReplayBuffer):
    """Abstract: a replay buffer whose content is never overwritten and whose parts stay together.

    TorchRL's own versions of these methods would write into a copy and report success, or part the ledger
    from its rows. Each raises RuntimeError.
    """

    def __setitem__(self, index: Any, value: Any) -> NoReturn:
        """Refuse."""
        _refuse("__setitem__")

    def write_all(self, data: Any, end: int | None = None) -> NoReturn:
        """Refuse."""
        _refuse("write_all")

    def set_at_(self, key: Any, value: Any, index: Any) -> NoReturn:
        """Refuse."""
        _refuse("set_at_")

    def set_(self, key: Any, value: Any) -> NoReturn:
        """Refuse."""
        _refuse("set_")

    def update_(self, input_dict_or_td: Any, clone: bool = False, *, keys_to_update: Any = None) -> NoReturn:
        """Refuse."""
        _refuse("update_")

    def update_if_present(self, *args: Any, **options: Any) -> NoReturn:
        """Refuse."""
        _refuse("update_if_present")

    def submit_update_if_present(self, *args: Any, **options: Any) -> NoReturn:
        """Refuse."""
        _refuse("submit_update_if_present")

    def set_storage(self, storage: Any, collate_fn: Any = None) -> NoReturn:
        """Refuse."""
        _refuse("set_storage")

    def set_writer(self, writer: Any) -> NoReturn:
        """Refuse."""
        _refuse("set_writer")

    def set_rng(self, generator: Any) -> None:
        """Refuse a generator: the one order that draws at random has its own."""
        if generator is not None:  # TorchRL's constructor gives None.
            raise RuntimeError(
                "ProvenanceReplayBuffer.set_rng: seed the order instead, RandomGroupSampler(seed=...)"
            )
        super().set_rng(None)

    def share(self, shared: bool = True) -> Any:
        """Refuse to be shared between processes; other processes send batches."""
        if shared:
            _refuse("share")
        return super().share(False)

    def __getstate__(self) -> NoReturn:
        """Refuse: a copy would give every response to a learner again."""
        _refuse("__getstate__")


def _refuse(method: str) -> NoReturn:
    raise RuntimeError(
        f"ProvenanceReplayBuffer.{method}: stored responses are write-once and belong to one process; "
        "extend the buffer, annotate its storage, or send batches to its process"
    )
