"""A cluster on paper: GPUs, model and batch in numbers, turned into a workload for the simulator."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from rzero.collectors.scheduler import CreditScheduler, Order
from rzero.collectors.simulate import Workload
from rzero.collectors.simulate_laws import lognormal_length, step_rate


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """A machine, a model and a batch; every speed is an assumption until it was measured."""

    gpus: int
    """GPUs in total; some learn, the others sample."""
    gpus_per_engine: int
    """GPUs of one copy of the sampler."""
    parameters: float
    """Parameters that one token touches; a training token costs six operations for each."""
    weight_gigabytes: float
    """Size of the weights on the wire."""
    responses: int
    """Responses in one update."""
    group_size: int
    """Responses per prompt."""
    mean_length: float
    """Mean length of a response in tokens; log-normal, before the cut at the limit."""
    cv: float
    """Standard deviation over mean of the lengths."""
    limit: int
    """Longest response in tokens."""
    slots: int
    """Responses that one engine decodes together at most."""
    step_seconds: float
    """Time of a decoding step of an engine, apart from what each response adds."""
    sequence_seconds: float
    """What each response adds to it."""
    train_teraflops: float
    """Training speed really reached per GPU."""
    fixed_seconds: float
    """Part of an update that more GPUs do not shorten."""
    publish_seconds: float
    """From the end of an update until its weights are on every engine."""
    pause_seconds: float = 0.2
    """The part of it during which the engines stand still."""

    def workload(self, learners: int, *, scale: int = 1) -> Workload:
        """The workload with this many learning GPUs, or a model of 1/scale of the cluster."""
        operations = 6 * self.parameters / (self.train_teraflops * 1e12 * learners)
        return Workload(
            length_law=lognormal_length(self.mean_length, cv=self.cv, limit=self.limit),
            rate_law=step_rate(step_seconds=self.step_seconds, sequence_seconds=self.sequence_seconds),
            train_seconds=lambda tokens: self.fixed_seconds + operations * tokens * scale,
            group_size=self.group_size,
            engines=max(1, (self.gpus - learners) // self.gpus_per_engine // scale),
            engine_slots=self.slots,
            publish_seconds=self.publish_seconds,
            pause_seconds=min(self.pause_seconds, self.publish_seconds),
        )

    def colocated(self) -> Workload:
        """All GPUs sample, then all GPUs train: for a synchronous run only; switching costs nothing."""
        engines = self.gpus // self.gpus_per_engine
        return replace(self.workload(self.gpus), engines=engines, publish_seconds=0.0, pause_seconds=0.0)

    def credits(self, nominal_lag: int, order: Order, *, scale: int = 1) -> CreditScheduler:
        """A fresh scheduler for the groups of one update."""
        groups = max(1, self.responses // self.group_size // scale)
        return CreditScheduler(nominal_lag=nominal_lag, groups_per_batch=groups, order=order)


@dataclass(frozen=True, kw_only=True)
class Split:
    """How a cluster divides into learner and engines, and what follows without any simulation.

    Attributes:
        learners: GPUs that learn.
        engines: Engines on the others.
        step_seconds: Time of an update if nobody ever waits.
        batches_in_flight: Responses that fill all slots, in updates' worth: the lag that full engines cost.
        response_updates: How many updates a response of mean length lasts on a full engine.
    """

    learners: int
    engines: int
    step_seconds: float
    batches_in_flight: float
    response_updates: float


def balance(cluster: Cluster) -> Split:
    """The split at which full engines draw what the learner trains on in the same time."""
    whole = cluster.workload(1)
    tokens = float(whole.length_law(np.random.default_rng(0), 100_000).mean())
    rate = whole.rate_law(cluster.slots)

    def split(learners: int) -> Split:
        engines = (cluster.gpus - learners) // cluster.gpus_per_engine
        trained = cluster.workload(learners).train_seconds(round(cluster.responses * tokens))
        sampled = cluster.responses * tokens / (engines * cluster.slots * rate)
        step = max(trained, sampled)
        return Split(
            learners=learners,
            engines=engines,
            step_seconds=step,
            batches_in_flight=engines * cluster.slots / cluster.responses,
            response_updates=tokens / rate / step,
        )

    choices = range(1, cluster.gpus - cluster.gpus_per_engine + 1, max(1, cluster.gpus // 1000))
    return min((split(learners) for learners in choices), key=lambda choice: choice.step_seconds)


SMALL = Cluster(
    gpus=16,
    gpus_per_engine=1,
    parameters=1.5e9,
    weight_gigabytes=3,
    responses=512,
    group_size=8,
    mean_length=3000,
    cv=0.4,
    limit=8192,
    slots=256,
    step_seconds=0.008,
    sequence_seconds=3e-5,
    train_teraflops=350,
    fixed_seconds=2.0,
    publish_seconds=0.5,
)
LARGE = Cluster(
    gpus=10_000,
    gpus_per_engine=8,
    parameters=22e9,
    weight_gigabytes=470,
    responses=8192,
    group_size=16,
    mean_length=12_000,
    cv=0.8,
    limit=32_768,
    slots=128,
    step_seconds=0.025,
    sequence_seconds=6e-5,
    train_teraflops=350,
    fixed_seconds=2.0,
    publish_seconds=2.0,
)
