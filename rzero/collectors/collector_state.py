"""What a collector must remember to go on after a restart."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch.distributed.checkpoint.stateful import Stateful

from rzero.buffers import ProvenanceReplayBuffer
from rzero.collectors.failures import FailureCounts
from rzero.collectors.group_sampler import GroupSampler
from rzero.collectors.pack_completions import Fields, join_groups, split_groups
from rzero.collectors.prompt import Prompt, PromptStream
from rzero.collectors.scheduler import Scheduler


@final
@dataclass(kw_only=True)
class CollectorState:
    """The parts of a collector whose states belong together, and its own counts.

    Whoever calls a method sees to it that no part changes meanwhile.

    Attributes:
        scheduler: Every group's fate.
        prompts: A ``PromptStream``, if the state is ever to be saved.
        sampler: The groups in flight.
        buffer: The groups that are released.
        failures: Counts.
        reward_state: What the rewards remember, None if nothing.
        group_size: Responses per prompt.
        finished: Groups that are complete and not released, by ticket.
        frames: Sampled tokens delivered so far.
        batches: Batches delivered so far.
    """

    scheduler: Scheduler
    prompts: Iterator[Prompt]
    sampler: GroupSampler
    buffer: ProvenanceReplayBuffer
    failures: FailureCounts
    reward_state: Stateful | None
    group_size: int
    finished: dict[int, Fields] = field(default_factory=dict)
    frames: int = 0
    batches: int = 0

    def state_dict(self) -> OrderedDict:
        """See ``AsyncRolloutCollector.state_dict``."""
        finished = join_groups([self.finished[ticket] for ticket in self.scheduler.finished])
        return OrderedDict(
            scheduler=self.scheduler.state_dict(),
            prompts=copy.deepcopy(self._prompt_stream("state_dict").state_dict()),
            in_flight=[list(pair) for pair in self.sampler.prompt_ids.items()],
            finished={name: torch.from_numpy(field) for name, field in finished.items()},
            buffer=self.buffer.state_dict(),
            failures=self.failures.state_dict(),
            frames=self.frames,
            batches=self.batches,
            interaction={} if self.reward_state is None else copy.deepcopy(self.reward_state.state_dict()),
        )

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """See ``AsyncRolloutCollector.load_state_dict``."""
        prompts, version = self._prompt_stream("load_state_dict"), self.scheduler.version
        if version != state_dict["scheduler"]["learner_version"]:
            raise ValueError(
                f"AsyncRolloutCollector.load_state_dict: engines must hold version "
                f"{state_dict['scheduler']['learner_version']}, got {version}"
            )
        self.scheduler.load_state_dict(state_dict["scheduler"])
        self.scheduler.publish(version)
        prompts.load_state_dict(state_dict["prompts"])
        self.buffer.load_state_dict(state_dict["buffer"])
        finished = {name: field.numpy() for name, field in state_dict["finished"].items()}
        groups = split_groups(finished, sizes=[self.group_size] * len(self.scheduler.finished))
        self.finished = dict(zip(self.scheduler.finished, groups, strict=True))
        self.failures.load_state_dict(state_dict["failures"])
        self.frames, self.batches = state_dict["frames"], state_dict["batches"]
        if self.reward_state is not None:
            self.reward_state.load_state_dict(state_dict["interaction"])
        for ticket, prompt_id in state_dict["in_flight"]:
            self.sampler.start(ticket, prompts.prompt(prompt_id))

    def _prompt_stream(self, caller: str) -> PromptStream:
        if not isinstance(self.prompts, PromptStream):
            raise TypeError(
                f"AsyncRolloutCollector.{caller}: prompts must be a PromptStream, to be found again after a "
                f"restart, got {type(self.prompts).__name__}"
            )
        return self.prompts
