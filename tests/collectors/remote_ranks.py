"""One rank of the tests in ``test_remote.py``: python -m tests.collectors.remote_ranks SCENARIO RANK
STORE."""

import itertools
import json
import os
import signal
import sys
import time
import traceback

import torch
import torch.distributed as dist

from rzero.buffers import PackedBatch, ProvenanceReplayBuffer, TokenLogStorage
from rzero.collectors import (
    EngineError,
    GroupFailed,
    GroupRequest,
    Prompt,
    RemoteEngine,
    SingleTurn,
    TransformersEngine,
    WeightPublisher,
    named_weights,
    open_channels,
    serve_engine,
    weight_digests,
)
from rzero.collectors.pack_completions import pack_groups
from rzero.collectors.transport import ConnectionLost
from tests.collectors.conftest import EOS, digest_of, full_forward_log_probs, llama, request


def sampler(scenario: str, channels) -> None:
    model, steps = llama(1), itertools.count()

    def break_down(module, args, kwargs):
        if next(steps) == 5:
            if scenario == "raise":
                raise FloatingPointError("the model broke down")
            if scenario == "die":
                os.kill(os.getpid(), signal.SIGKILL)

    model.register_forward_pre_hook(break_down, with_kwargs=True)
    engine = TransformersEngine(model, eos_token_ids=(EOS,), version=-1, max_slots=4)
    interaction = SingleTurn(rewards) if scenario in ("play", "reward raises") else None
    serve_engine(engine, *channels[0], interaction=interaction, problem=lambda prompt_id: prompt_id * 10)
    engine.close()


def rewards(prompt, responses):
    if prompt.problem == 70:
        raise GroupFailed("no judge", "the judge of problem 70 is away")
    if prompt.problem == 90:
        raise ZeroDivisionError("problem 90 cannot be judged")
    return [prompt.problem + sum(response) for response in responses]


def taken_by_a_buffer(batch: PackedBatch) -> bool:
    """A buffer checks the digest of every row."""
    buffer = ProvenanceReplayBuffer(
        storage=TokenLogStorage(), group_size=3, groups_per_batch=3, capacity_updates=2
    )
    buffer.extend(batch)
    return torch.equal(buffer.sample(timeout=5.0).token_ids, batch.token_ids)


def group(prompt_id: int) -> GroupRequest:
    prompt = Prompt(prompt_id=prompt_id, token_ids=(1, 5, prompt_id), problem=None)
    return GroupRequest(group_id=prompt_id + 1, prompt=prompt, size=3, max_new_tokens=5, seed=6)


def play(engine: RemoteEngine) -> dict:
    """Groups are rewarded there, by their problems there; one of them is given up, and costs only itself."""
    WeightPublisher([engine]).publish(named_weights(llama(3)), 0)
    futures = {prompt_id: engine.play_group(group(prompt_id)) for prompt_id in range(5, 9)}
    error = futures.pop(7).exception()
    groups = {prompt_id: future.result() for prompt_id, future in futures.items()}
    again = engine.submit_group(group(5).requests()).result()
    batch = pack_groups(list(groups.values()))
    sums = batch.token_ids.long().cumsum(0)
    ends = (batch.cu_seqlens[1:] - 1).tolist()
    starts = (batch.cu_seqlens[:-1] + batch.prompt_length - 1).tolist()
    expected = [
        10 * prompt_id + int(sums[end] - sums[start])
        for prompt_id, start, end in zip(batch.prompt_id.tolist(), starts, ends, strict=True)
    ]
    result = {
        "error": [type(error).__name__, error.reason, error.message, *error.__notes__],
        "rewarded": batch.reward.tolist() == expected,
        "uids": batch.uid.tolist(),
        "group_ids": batch.group_id.tolist(),
        "stored": taken_by_a_buffer(batch),
        "same": [c.response.tolist() for c in again]
        == [
            batch.token_ids[start + 1 : end + 1].tolist()
            for start, end in zip(starts[:3], ends[:3], strict=True)
        ],
    }
    engine.close()
    return result


def serve(engine: RemoteEngine) -> dict:
    """Samples, publishes in between, samples on; what came back must be what these weights say."""
    publisher = WeightPublisher([engine])
    result = {"first": engine.version()}
    publisher.publish(named_weights(llama(3)), 0)
    before = [engine.submit(request(i, max_new_tokens=5)) for i in range(12)]
    before = [future.result() for future in before]
    publisher.publish(named_weights(llama(4)), 1)
    after = [engine.submit(request(i, max_new_tokens=5)) for i in range(12, 24)]
    after = [future.result() for future in after]
    result["versions"] = [
        sorted({v for c in some for v in c.policy_version.tolist()}) for some in (before, after)
    ]
    result["max_delta"] = max(
        float(
            (c.behavior_log_probs - full_forward_log_probs(llama(seed), c.request.prompt, c.response))
            .abs()
            .max()
        )
        for seed, some in ((3, before), (4, after))
        for c in some
    )
    result["digests"] = all(torch.equal(c.digest, digest_of(c)) for c in before + after)
    digests = weight_digests(named_weights(llama(5)))
    digests["lm_head.weight"] ^= 1
    try:
        engine.swap(2, named_weights(llama(5)), digests)
    except EngineError as error:
        result["refused"] = str(error)
    result["version_after_refusal"] = engine.version()
    engine.pause()
    paused = engine.submit(request(99))
    result["done_while_paused"] = paused.done()
    engine.resume()
    result["sampled_after_resume"] = len(paused.result().response)
    result["context"] = engine.context().engine
    result["busy"] = engine.busy_seconds()
    engine.close()
    return result


def fail(engine: RemoteEngine, scenario: str) -> dict:
    WeightPublisher([engine]).publish(named_weights(llama(3)), 0)
    if scenario == "reward raises":
        futures = [engine.play_group(group(prompt_id)) for prompt_id in (9, 10, 11)]
    elif scenario == "no interaction":
        futures = [engine.play_group(group(5))]
    else:
        futures = [engine.submit(request(i, max_new_tokens=6)) for i in range(12)]
    errors, started = [], time.monotonic()
    for future in futures:
        errors.append(future.exception())
    seconds = time.monotonic() - started
    lost = [e for e in errors if e is not None]
    try:
        engine.submit(request(50))
        later = ""
    except EngineError as error:
        later = str(error)
    return {
        "kinds": sorted({type(e).__name__ for e in lost}),
        "text": str(lost[0]),
        "is_connection": isinstance(lost[0], ConnectionLost),
        "seconds": seconds,
        "later": later,
    }


def main() -> None:
    scenario, rank, store = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    channels = open_channels(0, [1])
    if rank == 1:
        try:
            sampler(scenario, channels)
        except EngineError:
            traceback.print_exc()
            os._exit(1)  # as the recipes do: a thread still waits for commands
    else:
        engine = RemoteEngine(*channels[1])
        whole = {"serve": serve, "play": play}.get(scenario)
        print(json.dumps(fail(engine, scenario) if whole is None else whole(engine)), flush=True)
        if whole is None:
            os._exit(0)  # the other rank is gone; there is nobody to take leave of
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
