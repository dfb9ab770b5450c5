"""Predicts lag, idle time and speed of an asynchronous run: a real scheduler under a virtual clock.

::

    release, admit          accept, filter, fail            train               publish
    scheduler ---> engines ----------------> scheduler ---> learner ---> weights ------> engines, scheduler
                   `VirtualEngine`, shared by               train_seconds      publish_seconds,
                   all sequences on it                                         swapped in mid-response

The scheduler objects are those of a real run; nothing about them is modelled again here.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from rzero.collectors.lag import LagReport
from rzero.collectors.scheduler import CreditScheduler, Scheduler, strict
from rzero.collectors.simulate_laws import LengthLaw, RateLaw
from rzero.collectors.simulate_run import SimulatedRun

__all__ = ["Comparison", "Simulation", "Workload", "compare_with_synchronous", "simulate"]


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What is sampled and trained, and how long each part takes. All times are in seconds.

    Attributes:
        length_law: Lengths of responses, see `rzero.collectors.simulate_laws`.
        rate_law: Tokens per second of each sequence, given the sequences on its engine.
        train_seconds: Time of one update, given the number of response tokens in its batch.
        group_size: Responses of one prompt. A group is sampled on one engine.
        engines: Number of engines.
        engine_slots: Sequences that one engine decodes together at most, the others wait inside it; None: no
            limit.
        publish_seconds: From the end of an update until its weights are on every engine.
        acknowledge_seconds: The part at the end of it in which the engines have the weights already.
        pause_seconds: The part before that in which the engines stand still.
        overlap_publish: Whether the learner goes on while its weights are on the way. If the next update is
            done before, only the newest weights are sent.
        evaluate_every: Every so many versions the engines do nothing but an evaluation; 0: never.
        evaluation_seconds: How long an evaluation takes.
        submit_seconds: From the start of a group until its engine has it.
        reward_seconds: From the last token of a group until its rewards are there.
        filter_probability: Part of the complete groups that is filtered out.
        fail_probability: Part of the complete groups that fails, e.g. because the reward timed out.
        engine_failure_seconds: Mean time between failures of one engine; None: never. All it is sampling is
            lost and its tickets fail.
        repair_seconds: How long a failed engine is away.
    """

    length_law: LengthLaw
    rate_law: RateLaw
    train_seconds: Callable[[int], float]
    group_size: int = 1
    engines: int = 1
    engine_slots: int | None = None
    publish_seconds: float = 0.0
    acknowledge_seconds: float = 0.0
    pause_seconds: float = 0.0
    overlap_publish: bool = False
    evaluate_every: int = 0
    evaluation_seconds: float = 0.0
    submit_seconds: float = 0.0
    reward_seconds: float = 0.0
    filter_probability: float = 0.0
    fail_probability: float = 0.0
    engine_failure_seconds: float | None = None
    repair_seconds: float = 0.0

    def __post_init__(self) -> None:
        """Refuses what no machine can do."""
        least = {"group_size": 1, "engines": 1, "publish_seconds": 0, "evaluate_every": 0}
        least |= {
            "pause_seconds": 0,
            "acknowledge_seconds": 0,
            "evaluation_seconds": 0,
            "submit_seconds": 0,
            "reward_seconds": 0,
            "repair_seconds": 0,
        }
        for name, bound in least.items():
            if not getattr(self, name) >= bound:
                raise ValueError(f"Workload: {name} must be at least {bound}, got {getattr(self, name)}")
        if self.engine_slots is not None and self.engine_slots < 1:
            raise ValueError(f"Workload: engine_slots must be at least 1, got {self.engine_slots}")
        if self.pause_seconds + self.acknowledge_seconds > self.publish_seconds:
            raise ValueError(
                f"Workload: pause_seconds + acknowledge_seconds must be at most publish_seconds = "
                f"{self.publish_seconds}, got {self.pause_seconds} + {self.acknowledge_seconds}"
            )
        for name in ("filter_probability", "fail_probability"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"Workload: {name} must lie in [0, 1), got {getattr(self, name)}")
        if self.engine_failure_seconds is not None and not self.engine_failure_seconds > 0:
            raise ValueError(
                f"Workload: engine_failure_seconds must be positive, got {self.engine_failure_seconds}"
            )


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """What a simulated run measured, after its warm-up.

    Attributes:
        lag: Lags of the tokens that were trained on.
        updates: Number of updates measured.
        step_seconds: Mean time from one batch to the next.
        learner: Parts of the learner's time, adding up to 1: `train`, `publish` (waiting for its own weights
            to arrive), `idle` (waiting for groups: the bubble).
        engines: Parts of the engines' time, adding up to 1: `busy`, `idle` (no sequence), `held` (swap or
            evaluation), `down`; and `concurrency`, sequences per engine while busy.
        tokens_per_second: Response tokens trained on.
        counts: The scheduler's counts at the end, of the whole run.
    """

    lag: LagReport
    updates: int
    step_seconds: float
    learner: dict[str, float]
    engines: dict[str, float]
    tokens_per_second: float
    counts: dict[str, int]

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain numbers, strings, lists and dicts, ready for JSON."""
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "lag"}
        return fields | {"lag": self.lag.to_dict()}


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A run beside the synchronous one of the same inputs.

    Attributes:
        run: The simulated run.
        synchronous: The same with at most one batch in work: nominal lag 0.
        speed_up: Step time of the synchronous run over that of the run.
    """

    run: Simulation
    synchronous: Simulation
    speed_up: float


def simulate(
    scheduler: Scheduler, workload: Workload, *, updates: int, warmup: int | None = None, seed: int = 0
) -> Simulation:
    """Simulates a run of `updates` measured updates.

    Args:
        scheduler: A fresh scheduler; it is used up.
        workload: What is sampled and trained, and how long it takes.
        updates: Number of updates to measure.
        warmup: Updates before that, which fill the pipeline; None: 10, and 4 times what the scheduler holds.
        seed: Seed of lengths, failures and filters. Runs of one seed get the same lengths, ticket by ticket.

    Raises:
        ValueError: If the scheduler is not fresh or a number is out of range.
        RuntimeError: If nothing can ever happen again, or the scheduler's hard bound is broken.

    Example:
        >>> from rzero.collectors.scheduler import SlotScheduler
        >>> from rzero.collectors.simulate_laws import constant_rate, exponential_length
        >>> workload = Workload(
        ...     length_law=exponential_length(100),
        ...     rate_law=constant_rate(100),
        ...     train_seconds=lambda tokens: 0.5,
        ... )
        >>> scheduler = SlotScheduler(queue=2, in_flight=32, groups_per_batch=8)
        >>> run = simulate(scheduler, workload, updates=400)
        >>> round(run.lag.means()["start"], 1), round(run.step_seconds, 2)
        (6.0, 0.5)
    """
    if scheduler.counts["submitted"] or not scheduler.drained:
        raise ValueError(f"simulate: scheduler must be fresh, got one with {scheduler.counts}")
    if updates < 1:
        raise ValueError(f"simulate: updates must be at least 1, got {updates}")
    if warmup is None:
        warmup = 10 + 4 * scheduler.capacity // scheduler.groups_per_batch
    if warmup < 0:
        raise ValueError(f"simulate: warmup must be at least 0, got {warmup}")
    run = SimulatedRun(scheduler, workload, first=scheduler.version + warmup, updates=updates, seed=seed)
    run.play()
    measured = run.measured()
    return Simulation(lag=run.lag, updates=updates, counts=scheduler.counts, **asdict(measured))


def compare_with_synchronous(
    scheduler: Scheduler, workload: Workload, *, updates: int, warmup: int | None = None, seed: int = 0
) -> Comparison:
    """Simulates a run and the synchronous one of the same inputs; arguments and errors as for `simulate`."""
    batch = scheduler.groups_per_batch
    baseline = CreditScheduler(nominal_lag=0, groups_per_batch=batch, order=strict())
    run = simulate(scheduler, workload, updates=updates, warmup=warmup, seed=seed)
    synchronous = simulate(baseline, workload, updates=updates, warmup=warmup, seed=seed)
    return Comparison(run=run, synchronous=synchronous, speed_up=synchronous.step_seconds / run.step_seconds)
