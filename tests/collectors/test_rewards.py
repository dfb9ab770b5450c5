import asyncio
import itertools
import logging
import subprocess
import sys
import textwrap
import threading
import time
import traceback

import pytest

from rzero.collectors import GroupFailed, Prompt, SingleTurn, strict
from rzero.collectors.watchdog import Watchdog
from tests.collectors.conftest import llama
from tests.collectors.test_collector import GROUP, length_reward, make_collector, train

HANGING = 4  # the prompt whose rewards never come


@pytest.fixture
def release():
    """Lets threads go that hung for a test."""
    event = threading.Event()
    yield event
    event.set()


def hang_in_a_thread(release):
    def reward(prompt, responses):
        if prompt.prompt_id == HANGING:
            release.wait()
        return length_reward(prompt, responses)

    return reward


def hang_in_the_loop(release):
    async def reward(prompt, responses):
        await asyncio.sleep(3600 if prompt.prompt_id == HANGING else 0)
        return length_reward(prompt, responses)

    return reward


def block_the_loop(release):
    async def reward(prompt, responses):
        if prompt.prompt_id == HANGING:
            release.wait()
        return length_reward(prompt, responses)

    return reward


def whole(counts):
    return (
        counts["submitted"] == counts["accepted"] + counts["filtered"] + counts["failed"] + counts["running"]
    )


@pytest.mark.parametrize("hang", [hang_in_a_thread, hang_in_the_loop])
@pytest.mark.parametrize("workers", [1, 3])
def test_a_hung_reward_fails_its_group_and_no_other(make_engine, release, hang, workers):
    interaction = SingleTurn(hang(release), timeout=0.3, workers=workers)
    # In strict order nothing passes the hung group until it is given up.
    collector = make_collector([make_engine(llama(0))], nominal_lag=1, order=strict(), reward_fn=interaction)
    batches = train(collector, llama(0), 6)
    stats = collector.stats()
    collector.shutdown()
    trained = {prompt for batch in batches for prompt in batch.prompt_id.tolist()}
    assert HANGING not in trained
    assert set(range(HANGING)) | {HANGING + 1} <= trained
    assert stats["failed"] == stats["failed/reward timeout"] == 1
    assert whole(stats)


def test_the_failure_is_logged_once_with_what_happened(make_engine, release, caplog):
    def reward(prompt, responses):
        if prompt.prompt_id % 3 == 1:
            raise GroupFailed("judge away", f"no verdict on {prompt.prompt_id}")
        return length_reward(prompt, responses)

    collector = make_collector([make_engine(llama(0))], nominal_lag=1, reward_fn=reward)
    with caplog.at_level(logging.WARNING):
        batches = train(collector, llama(0), 4)
    stats = collector.stats()
    collector.shutdown()
    assert all(prompt % 3 != 1 for batch in batches for prompt in batch.prompt_id.tolist())
    assert stats["failed"] == stats["failed/judge away"] >= 4
    assert [str(record.exc_info[1]) for record in caplog.records] == ["judge away: no verdict on 1"]


def test_async_rewards_wait_side_by_side(make_engine):
    together, arrived = threading.Event(), itertools.count(1)

    async def reward(prompt, responses):
        # Returns only when all groups that may be in work wait here at once.
        if next(arrived) == 6:
            together.set()
        while not together.is_set():
            await asyncio.sleep(0.001)
        return length_reward(prompt, responses)

    collector = make_collector(
        [make_engine(llama(0))], nominal_lag=1, reward_fn=SingleTurn(reward, workers=1)
    )
    train(collector, llama(0), 3)
    collector.shutdown()


@pytest.mark.parametrize("end", ["timeout", "close"])
def test_a_coroutine_that_is_not_waited_for_any_more_is_cancelled(end):
    began, left = threading.Event(), threading.Event()

    async def reward(prompt, responses):
        began.set()
        try:
            await asyncio.sleep(3600)
        finally:
            left.set()

    calls = SingleTurn(reward, timeout=0.1 if end == "timeout" else 600)
    future = calls.rewards(Prompt(prompt_id=7, token_ids=(1,), problem=None), [])
    assert began.wait(30)
    if end == "timeout":
        assert isinstance(future.exception(timeout=30), GroupFailed)
    else:
        calls.close()
    assert left.wait(30)
    calls.close()


def explode(prompt, responses):
    if prompt.prompt_id == HANGING:
        raise ZeroDivisionError("the verifier broke down")
    return length_reward(prompt, responses)


async def explode_in_the_loop(prompt, responses):
    await asyncio.sleep(0)
    return explode(prompt, responses)


@pytest.mark.parametrize("reward_fn", [explode, explode_in_the_loop, lambda *a: explode_in_the_loop(*a)])
def test_an_exception_is_raised_in_the_consumer_with_its_traceback(make_engine, reward_fn):
    collector = make_collector([make_engine(llama(0))], nominal_lag=1, reward_fn=reward_fn)
    with pytest.raises(ZeroDivisionError, match="the verifier broke down") as caught:
        train(collector, llama(0), 10)
    collector.shutdown()
    assert any(frame.name == "explode" for frame in traceback.extract_tb(caught.value.__traceback__))


@pytest.mark.parametrize("hang", [hang_in_a_thread, hang_in_the_loop, block_the_loop])
def test_the_run_ends_when_nothing_but_failures_comes(make_engine, release, hang):
    interaction = SingleTurn(
        lambda prompt, responses: hang(release)(_Hanging, responses), timeout=0.1, workers=2
    )
    collector = make_collector([make_engine(llama(0))], nominal_lag=0, reward_fn=interaction)
    with pytest.raises(RuntimeError, match="3 groups in a row failed, the last by reward timeout") as caught:
        next(iter(collector))
    assert isinstance(caught.value.__cause__, GroupFailed)
    stats = collector.stats()
    collector.shutdown()
    assert stats["failed"] == 3
    assert whole(stats)


class _Hanging:
    prompt_id = HANGING


def test_waiting_in_vain_says_what_failed(make_engine, release):
    interaction = SingleTurn(hang_in_a_thread(release), timeout=0.1)
    collector = make_collector([make_engine(llama(0))], nominal_lag=1, reward_fn=interaction, timeout=1.5)
    batches = iter(collector)
    for _ in range(2):  # without weights, no third batch can come
        next(batches)
    with pytest.raises(TimeoutError, match="of 3 groups") as caught:
        next(batches)
    collector.shutdown()
    assert "1 groups failed by reward timeout, the last: " in caught.value.__notes__[0]
    assert "for prompt 4" in caught.value.__notes__[0]


def test_a_hung_thread_does_not_keep_the_process(tmp_path):
    script = textwrap.dedent(
        """
        import threading
        from rzero.collectors import Prompt, SingleTurn
        calls = SingleTurn(lambda prompt, responses: threading.Event().wait(), timeout=0.2)
        future = calls.rewards(Prompt(prompt_id=7, token_ids=(1,), problem=None), [])
        print(future.exception(timeout=30))
        calls.close()
        """
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "reward timeout: reward_fn returned nothing within 0.2 s for prompt 7\n"


@pytest.mark.parametrize(
    ("rewards", "message"),
    [
        ([1.0], "reward_fn must return 4 rewards, got 1"),
        ([1.0, 2.0, float("nan"), 3.0], r"reward_fn must return finite rewards, got \[1.0, 2.0, nan, 3.0\]"),
        ([1.0, 2.0, 3.0, "good"], "could not convert string to float"),
    ],
)
def test_other_than_one_number_a_response_is_refused(make_engine, rewards, message):
    assert GROUP == 4
    collector = make_collector([make_engine(llama(0))], nominal_lag=0, reward_fn=lambda *_: rewards)
    with pytest.raises(ValueError, match=message):
        next(iter(collector))
    collector.shutdown()


def test_refusals():
    with pytest.raises(ValueError, match="seconds must be greater than 0, got 0"):
        SingleTurn(length_reward, timeout=0)
    with pytest.raises(ValueError, match="workers must be at least 1, got 0"):
        SingleTurn(length_reward, workers=0)


def test_a_watchdog_calls_in_order_and_only_for_what_is_late():
    watchdog, late, called = Watchdog(0.05), [], threading.Event()
    watches = [watchdog.watch(lambda n=n: late.append(n)) for n in range(100)]
    for n, watch in enumerate(watches):
        if n % 10 != 3:
            watch.over()
    began = time.monotonic()
    watchdog.watch(called.set)
    assert called.wait(30)
    assert late == list(range(3, 100, 10))
    assert time.monotonic() - began >= 0.04
    watchdog.close()
