"""The asynchronous loop: prompts to the engines, whole groups into the buffer, weights back."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext, suppress
from functools import cached_property
from typing import Any, final

from tensordict import TensorDictBase
from torch import Tensor, nn
from torch.distributed.checkpoint.stateful import Stateful
from torchrl.collectors import BaseCollector

from rzero.buffers import PackedBatch, ProvenanceReplayBuffer
from rzero.collectors.engine import Completion, EngineLost, GenerationEngine, GenerationRequest, origin
from rzero.collectors.engine_pool import EnginePool
from rzero.collectors.interaction import Interaction, group_player
from rzero.collectors.prompt import Prompt
from rzero.collectors.publisher import PublishReport, WeightPublisher
from rzero.collectors.rewards import RewardFunction, interaction_of
from rzero.collectors.rollout_loop import RolloutLoop
from rzero.collectors.scheduler import Scheduler
from rzero.collectors.weights import only_policy, policy_weights, require_all_engines


@final
class AsyncRolloutCollector(BaseCollector):
    """Keeps engines sampling while a learner updates, and hands the learner whole groups.

        prompts --admit--> engines --complete--> rewards --release--> buffer --iterate--> learner
           ^                  ^                                                              |
           +---- scheduler ---+------------------ publisher <------- update_policy_weights_ -+

    One background thread does everything but the sampling and the learning. The scheduler decides how far the
    engines may run ahead; with ``CreditScheduler(nominal_lag=0)`` the same code is synchronous.

    Iterating yields one ``PackedBatch`` of ``scheduler.groups_per_batch`` whole groups at a time, each
    response exactly once, without end; after each, the learner calls ``update_policy_weights_`` once. An
    exception in an engine, the reward function or the background thread is raised in the iteration, with its
    original traceback. ``GroupFailed`` loses its group alone, which is counted and gives its room back; the
    run ends if as many groups as can be in work fail with no success between them. If the publisher tolerates
    lost engines, another one samples what a lost one was sampling, from its beginning and with its seed.

    Args:
        engines: All at the same version, which is where the run starts.
        prompts: Endless; advanced by the background thread. To be saved, a collector needs a
            ``PromptStream``.
        reward_fn: Rewards a whole group; an ``Interaction`` says more about how, a plain or async function
            stands for ``SingleTurn(reward_fn)``. None: the engines have groups rewarded where they are, as
            ``RemoteEngine`` does if its rank serves with an interaction.
        scheduler: Who may start, and in which order the learner gets what has finished.
        buffer: Empty, of the same group size and groups per batch.
        group_size: Responses per prompt.
        max_new_tokens: Length limit of a response.
        seed: With a response's uid it decides its random numbers.
        publisher: Of the same engines; None makes one.
        postproc: Applied to each batch before the learner gets it.
        pre_collect_hook: Called before each wait for a batch.
        post_collect_hook: Called with each batch, after ``postproc``.
        timeout: Seconds that an iteration waits for a batch before it gives up with what is missing.

    Raises:
        ValueError: If the engines disagree about the version, or scheduler and buffer about the batch.
        TypeError: If ``reward_fn`` is None and an engine is no ``GroupEngine``.
    """

    total_frames = -1  # endless, in TorchRL's words

    def __init__(
        self,
        engines: Sequence[GenerationEngine],
        prompts: Iterator[Prompt],
        reward_fn: RewardFunction | Interaction | None,
        *,
        scheduler: Scheduler,
        buffer: ProvenanceReplayBuffer,
        group_size: int,
        max_new_tokens: int,
        seed: int,
        publisher: WeightPublisher | None = None,
        postproc: Callable[[PackedBatch], Any] | None = None,
        pre_collect_hook: Callable[[], None] | None = None,
        post_collect_hook: Callable[[Any], None] | None = None,
        timeout: float = 600.0,
    ) -> None:
        super().__init__(pre_collect_hook=pre_collect_hook, post_collect_hook=post_collect_hook)
        versions = [engine.version() for engine in engines]
        if set(versions) != {scheduler.version}:
            raise ValueError(
                f"AsyncRolloutCollector: engines must all hold version {scheduler.version}, got {versions}"
            )
        self.publisher = publisher or WeightPublisher(engines)
        self.publisher.add_done_callback(self._published)
        self._pool = EnginePool(engines, tolerate_lost=self.publisher.tolerate_lost)
        self._interaction = interaction_of(reward_fn)
        self._scheduler, self._postproc, self._timeout = scheduler, postproc, timeout
        self._loop = RolloutLoop(
            self._pool,
            prompts,
            group_player(self._interaction, engines),
            reward_state=self._interaction if isinstance(self._interaction, Stateful) else None,
            scheduler=scheduler,
            buffer=buffer,
            group_size=group_size,
            max_new_tokens=max_new_tokens,
            seed=seed,
            timeout=timeout,
        )

    def start(self) -> None:
        """Begin to sample in the background; iterating does this by itself."""
        self._loop.start()

    def is_running(self) -> bool:
        """Whether the background thread works."""
        return self._loop.is_running()

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Let the engines stand still within a block; what they are sampling goes on afterwards."""
        engines = self.engines
        for engine in engines:
            engine.pause()
        try:
            yield
        finally:
            for engine in engines:
                engine.resume()

    def iterator(self) -> Iterator[Any]:
        """Batches for the learner, one after the other, without end."""
        self.start()
        while not self._loop.stopping:
            if self.pre_collect_hook is not None:
                self.pre_collect_hook()
            batch = self._loop.next_batch()
            out = batch if self._postproc is None else self._postproc(batch)
            if self.post_collect_hook is not None:
                self.post_collect_hook(out)  # pyright: ignore[reportArgumentType]  # torchrl knows TensorDicts only
            yield out

    @property
    def learner_version(self) -> int:
        """Version of the weights being updated: the number of updates before the current batch."""
        return self._scheduler.learner_version - 1

    def update_policy_weights_(
        self,
        policy_or_weights: nn.Module | TensorDictBase | Mapping[str, Tensor] | None = None,
        *,
        weights: TensorDictBase | Mapping[str, Tensor] | None = None,
        policy: nn.Module | None = None,
        worker_ids: None = None,
        model_id: str | None = None,
        weights_dict: Mapping[str, Any] | None = None,
    ) -> None:
        """Publish the weights after an update, in the background.

        When every engine has them, what was trained on gives its place back.

        Args:
            policy_or_weights: The learner's model, its ``named_weights``, or a TensorDict of it, of which the
                tensors that the engines hold are taken; None publishes the publisher's registered model.
            weights: Another way to pass weights.
            policy: Another way to pass the model.
            worker_ids: None; a version goes to all engines.
            model_id: None or ``"policy"``; there is one model.
            weights_dict: ``{"policy": weights}``, another way to pass weights.

        Raises:
            TypeError: If more than one thing is passed, or something else than weights.
            ValueError: If one worker or another model is asked for.
        """
        require_all_engines(worker_ids, model_id)
        given = only_policy(policy_or_weights, weights, policy, weights_dict=weights_dict)
        if given is None:
            return self.publisher.update_weights()
        new = policy_weights(given)
        if isinstance(given, TensorDictBase):
            # It may name tied weights twice, and buffers that never travel.
            new = {name: tensor for name, tensor in new.items() if name in self._weight_names}
        self.publisher.publish_async(new, self._scheduler.learner_version)

    @cached_property
    def _weight_names(self) -> set[str]:
        """Of the tensors that the engines hold."""
        return set(self.engines[0].weight_digests())

    @property
    def policy_version(self) -> int:
        """The newest version on every engine."""
        return self.publisher.common_version()

    def get_policy_version(self) -> int:
        """The newest version on every engine."""
        return self.policy_version

    @property
    def engines(self) -> list[GenerationEngine]:
        """The engines that are not lost."""
        return self._pool.living

    def stats(self) -> dict[str, int | float | bool]:
        """Tokens (``frames``) and batches delivered, versions, engines that live, and groups by their fates.

        Failures are counted by their reasons, too.
        """
        return {
            "frames": self._loop.state.frames,
            "batches": self._loop.state.batches,
            "policy_version": self.policy_version,
            "engines": len(self.engines),
            **self._loop.counts(),
        }

    def sample(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        """Sample something beside the training, e.g. to evaluate, and wait for it.

        Args:
            requests: With uids that no training response has, e.g. from 2**61 on.

        Raises:
            TimeoutError: If they take longer than ``timeout`` seconds.
        """
        return self._pool.sample(requests, timeout=self._timeout)

    def busy_seconds(self) -> float:
        """How long an engine has been sampling so far, in seconds, mean over those that live."""
        return self._pool.busy_seconds()

    def seconds_outside(self) -> tuple[float, float]:
        """How long a group is on the way to its engine and back, with its rewards: mean seconds of each."""
        return self._loop.sampler.seconds_outside()

    def shutdown(
        self, timeout: float | None = None, close_env: bool = True, raise_on_error: bool = True
    ) -> None:
        """Stop the background thread, waiting for it ``timeout`` seconds at most, and close the engines."""
        self._loop.stop(timeout)
        if self._interaction is not None:
            self._interaction.close()
        for engine in self.engines:
            with suppress(EngineLost) if self.publisher.tolerate_lost else nullcontext():
                engine.close()

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """Seed what is sampled from now on; returns the seed."""
        self._loop.sampler.seed = seed
        return seed

    def quiesce(self) -> None:
        """Wait until the last publish has arrived and every group that it lets start is complete.

        Called before each ``update_policy_weights_``, with a strict order, it makes every group the work of
        one version, and which version, and which groups an update gets, no matter of time.

        Raises:
            TimeoutError: If that takes longer than ``timeout`` seconds.
        """
        self._loop.quiesce()

    def state_dict(self) -> OrderedDict:
        """Everything that is not with the learner, as it stands between events, in tensors and JSON.

        The scheduler, the prompts' cursor, the groups that wait here or in the buffer, the failures, the
        state of the reward function if it has one. Of the groups in flight it holds the prompts' ids: they
        are sampled again, each response from its own seed.

        Raises:
            TypeError: If the prompts are no ``PromptStream``, and could not be found again.
        """
        return self._loop.state_dict()

    def snapshot(self) -> Future[OrderedDict]:
        """``state_dict`` by the background thread, while the learner works on the batch that it took last.

        No further batch is taken before the state is; nothing changes it afterwards.
        """
        return self._loop.snapshot()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue where ``state_dict`` was taken, with engines of the version that was being made then.

        Raises:
            RuntimeError: If the collector has started.
            ValueError: If it was saved with other settings, or the engines hold another version.
            TypeError: If the prompts are no ``PromptStream``.
        """
        self._loop.load_state_dict(state_dict)

    def _published(self, future: Future[PublishReport]) -> None:
        error = future.exception()
        if error is not None:
            self._loop.abort(origin(error))
        else:
            self._loop.published(future.result().version)
