"""Collecting: engines that sample with versioned weights, schedulers, the asynchronous loop, lag.

The engines that need transformers or vLLM load on first use.
"""

from typing import TYPE_CHECKING, Any

from rzero.collectors.collector import AsyncRolloutCollector
from rzero.collectors.engine import (
    Completion,
    EngineError,
    EngineLost,
    GenerationEngine,
    GenerationRequest,
    InFlightPolicy,
)
from rzero.collectors.environment import Environment, MultiTurn, Step, Trajectory
from rzero.collectors.failures import GroupFailed
from rzero.collectors.interaction import GroupEngine, GroupRequest, Interaction
from rzero.collectors.lag import LagReport
from rzero.collectors.measured_workload import WorkloadMeter
from rzero.collectors.prompt import Prompt, PromptStream
from rzero.collectors.publisher import PublishReport, WeightPublisher
from rzero.collectors.remote import RemoteEngine
from rzero.collectors.rewards import RewardFunction, SingleTurn
from rzero.collectors.scheduler import (
    CreditScheduler,
    Order,
    Scheduler,
    SlotScheduler,
    finished_first,
    strict,
    windowed,
)
from rzero.collectors.serving import serve_engine
from rzero.collectors.simulate import Comparison, Simulation, Workload, compare_with_synchronous, simulate
from rzero.collectors.transport import Channel, open_channels
from rzero.collectors.weights import load_weights, named_weights, rounded_weights, weight_digests

if TYPE_CHECKING:
    from rzero.collectors.transformers_engine import TransformersEngine
    from rzero.collectors.vllm_engine import VLLMEngine

__all__ = [
    "AsyncRolloutCollector",
    "Channel",
    "Comparison",
    "Completion",
    "CreditScheduler",
    "EngineError",
    "EngineLost",
    "Environment",
    "GenerationEngine",
    "GenerationRequest",
    "GroupEngine",
    "GroupFailed",
    "GroupRequest",
    "InFlightPolicy",
    "Interaction",
    "LagReport",
    "MultiTurn",
    "Order",
    "Prompt",
    "PromptStream",
    "PublishReport",
    "RemoteEngine",
    "RewardFunction",
    "Scheduler",
    "Simulation",
    "SingleTurn",
    "SlotScheduler",
    "Step",
    "Trajectory",
    "TransformersEngine",
    "VLLMEngine",
    "WeightPublisher",
    "Workload",
    "WorkloadMeter",
    "compare_with_synchronous",
    "finished_first",
    "load_weights",
    "named_weights",
    "open_channels",
    "rounded_weights",
    "serve_engine",
    "simulate",
    "strict",
    "weight_digests",
    "windowed",
]


def __getattr__(name: str) -> Any:
    if name == "TransformersEngine":
        from rzero.collectors.transformers_engine import TransformersEngine

        return TransformersEngine
    if name == "VLLMEngine":
        from rzero.collectors.vllm_engine import VLLMEngine

        return VLLMEngine
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
