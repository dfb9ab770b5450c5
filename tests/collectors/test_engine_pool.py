import threading

import pytest

from rzero.collectors import EngineLost
from rzero.collectors.engine_pool import EnginePool
from tests.collectors.conftest import llama, request


def lose_at(engine, uid):
    """Makes an engine answer one request, and every later one, like one whose process has ended."""
    submit, lost = engine.submit, threading.Event()

    def submitted(asked):
        if asked.uid == uid or lost.is_set():
            lost.set()
            raise EngineLost("the connection to rank 7 was lost")
        return submit(asked)

    engine.submit = submitted
    return engine


def test_the_engine_with_the_least_to_do_is_taken(make_engine):
    pool = EnginePool([make_engine(), make_engine()])
    assert [pool.take(4), pool.take(1), pool.take(1)] == [0, 1, 1]
    pool.give_back(0, 4)
    assert pool.take(1) == 0


def test_what_a_lost_engine_had_is_sampled_by_another(make_engine):
    requests = [request(uid) for uid in range(8)]
    alone = EnginePool([make_engine(llama(0))]).sample(requests, timeout=60.0)
    pool = EnginePool([make_engine(llama(0)), lose_at(make_engine(llama(0)), 3)], tolerate_lost=True)
    together = pool.sample(requests, timeout=60.0)
    assert len(pool.living) == 1
    assert [c.request.uid for c in together] == list(range(8))
    assert [c.response.tolist() for c in together] == [c.response.tolist() for c in alone]  # the same seeds


def test_a_lost_engine_is_raised_unless_that_is_tolerated(make_engine):
    pool = EnginePool([lose_at(make_engine(), 0)])
    with pytest.raises(EngineLost, match="the connection to rank 7 was lost"):
        pool.sample([request(0)], timeout=60.0)
    pool = EnginePool([lose_at(make_engine(), 0), lose_at(make_engine(), 0)], tolerate_lost=True)
    with pytest.raises(EngineLost, match="all 2 engines are lost, the last: the connection to rank 7"):
        pool.sample([request(0)], timeout=60.0)


def test_waiting_has_an_end(make_engine):
    engine = make_engine()
    engine.pause()
    with pytest.raises(TimeoutError, match=r"1 responses must be done within 0.1 s, got 0"):
        EnginePool([engine]).sample([request(0)], timeout=0.1)
    engine.resume()
