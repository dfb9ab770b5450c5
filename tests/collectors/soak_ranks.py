"""One rank of ``test_soak.py``: python -m tests.collectors.soak_ranks RANK WORLD STORE SECONDS SEED WHERE.

Rank 0 learns with rewards that are slow, hang and give up at random, while the test kills the other ranks one
by one. After every update rank 0 checks that nothing was lost. The rewards are computed ``here``, on rank 0,
or ``there``, on the ranks that sample.
"""

import asyncio
import contextlib
import itertools
import json
import os
import random
import sys
import time
from collections import Counter

import torch
import torch.distributed as dist

from rzero.buffers import ProvenanceReplayBuffer, TokenLogStorage
from rzero.collectors import (
    AsyncRolloutCollector,
    CreditScheduler,
    EngineError,
    GroupFailed,
    Prompt,
    RemoteEngine,
    SingleTurn,
    TransformersEngine,
    WeightPublisher,
    finished_first,
    named_weights,
    open_channels,
    serve_engine,
)
from tests.collectors.conftest import EOS, llama

GROUP, PROMPTS, LAG = 4, 3, 2
FAULTS = {"ok": 0.90, "slow": 0.04, "hung": 0.03, "gives up": 0.03}
REWARD_TIMEOUT = 0.5


def fate_of(prompt_id: int, seed: int) -> str:
    """What the rewards do to a prompt, wherever they are computed."""
    return random.Random(f"{seed}/{prompt_id}").choices(list(FAULTS), list(FAULTS.values()))[0]


class FaultyRewards:
    """Rewards with faults drawn from a seed; counts how often each prompt was rewarded."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self.asked: Counter[int] = Counter()

    async def __call__(self, prompt, responses):
        self.asked[prompt.prompt_id] += 1
        fate = fate_of(prompt.problem, self._seed)
        if fate == "slow":
            await asyncio.sleep(REWARD_TIMEOUT / 5)
        if fate == "hung":
            await asyncio.sleep(3600)
        if fate == "gives up":
            raise GroupFailed("no reward", f"prompt {prompt.prompt_id} has none")
        return [float(len(response)) for response in responses]


def prompts():
    for index in itertools.count():
        yield Prompt(prompt_id=index, token_ids=(1, 3 + index % 20, 4), problem=index)


def learner(channels, seconds: float, seed: int, where: str) -> dict:
    model, rewards = llama(0), FaultyRewards(seed)
    engines = [RemoteEngine(*pair, timeout=60.0) for pair in channels.values()]
    publisher = WeightPublisher(engines, tolerate_lost=True, timeout=60.0)
    publisher.publish(named_weights(model), 0)
    collector = AsyncRolloutCollector(
        engines,
        prompts(),
        SingleTurn(rewards, timeout=REWARD_TIMEOUT) if where == "here" else None,
        scheduler=CreditScheduler(nominal_lag=LAG, groups_per_batch=PROMPTS, order=finished_first()),
        buffer=ProvenanceReplayBuffer(
            storage=TokenLogStorage(),
            group_size=GROUP,
            groups_per_batch=PROMPTS,
            capacity_updates=LAG + 2,
        ),
        publisher=publisher,
        group_size=GROUP,
        max_new_tokens=6,
        seed=seed,
        timeout=60.0,
    )
    trained: set[int] = set()
    uids: set[int] = set()
    started, updates = time.monotonic(), 0
    for version, batch in enumerate(collector):
        ids = set(batch.prompt_id.tolist())
        sizes = Counter(batch.prompt_id.tolist())
        assert all(size == GROUP for size in sizes.values()), "a group is not whole"
        assert len(ids) == PROMPTS
        assert not ids & trained, "a group came twice"
        assert {fate_of(prompt_id, seed) for prompt_id in ids} <= {"ok", "slow"}, "a group came that failed"
        assert not uids & set(batch.uid.tolist())
        trained |= ids
        uids |= set(batch.uid.tolist())
        versions = batch.policy_version[batch.response_mask]
        assert int(versions.min()) >= 0
        assert int(versions.max()) <= version, "a version from the future"
        with torch.no_grad():
            model.lm_head.weight.add_(0.001)
        collector.update_policy_weights_(model)
        stats = collector.stats()
        assert stats["submitted"] == sum(stats[k] for k in ("accepted", "filtered", "failed", "running")), (
            stats
        )
        assert stats["running"] <= (LAG + 1) * PROMPTS
        updates = version + 1
        if updates % 50 == 0:
            print(json.dumps({"progress": updates, "engines": stats["engines"]}), flush=True)
        if time.monotonic() - started > seconds:
            break
    stats = collector.stats()
    # What was started is trained on, failed, or still in work: once each, and nobody starves.
    assert len(trained) == updates * PROMPTS == stats["trained"]
    in_work = stats["running"] + stats["finished"] + stats["released"]
    assert stats["submitted"] == len(trained) + stats["failed"] + in_work, stats
    started_ids = range(int(stats["submitted"]))
    result = {
        "updates": updates,
        "fates": Counter(fate_of(prompt_id, seed) for prompt_id in started_ids),
        "stats": stats,
        "versions": publisher.common_version(),
    }
    if where == "here":
        assert max(rewards.asked.values()) == 1, "a group was rewarded twice"
        unrewarded = set(started_ids) - rewards.asked.keys()
        result["oldest_unrewarded"] = len(started_ids) - min(unrewarded, default=len(started_ids))
    return result


def main() -> None:
    rank, world, store = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    channels = open_channels(0, list(range(1, world)))
    if rank == 0:
        print(json.dumps(learner(channels, float(sys.argv[4]), int(sys.argv[5]), sys.argv[6])), flush=True)
    else:
        there = {}
        if sys.argv[6] == "there":
            rewards = FaultyRewards(int(sys.argv[5]))
            there = {"interaction": SingleTurn(rewards, timeout=REWARD_TIMEOUT), "problem": int}
        engine = TransformersEngine(llama(1), eos_token_ids=(EOS,), version=-1, max_slots=8)
        with contextlib.suppress(EngineError):  # the learner has ended
            serve_engine(engine, *channels[0], **there)
    os._exit(0)  # some ranks are gone; there is nobody to take leave of


if __name__ == "__main__":
    main()
