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

from rzero.collectors import (
    EngineError,
    RemoteEngine,
    TransformersEngine,
    WeightPublisher,
    named_weights,
    open_channels,
    serve_engine,
    weight_digests,
)
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
    serve_engine(engine, *channels[0])
    engine.close()


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


def fail(engine: RemoteEngine) -> dict:
    WeightPublisher([engine]).publish(named_weights(llama(3)), 0)
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
        print(json.dumps(serve(engine) if scenario == "serve" else fail(engine)), flush=True)
        if scenario != "serve":
            os._exit(0)  # the other rank is gone; there is nobody to take leave of
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
