"""The token boundary, between plain threads."""

import sys
import threading

import pytest

from rzero.collectors.token_boundary import TokenBoundary
from tests.vllm.real import pytestmark  # noqa: F401


class Sampler:
    """A thread that does nothing but draw."""

    def __init__(self, *, draw=lambda: None):
        self.boundary = TokenBoundary("Sampler")
        self.drawing, self.drawn, self._draw = False, 0, draw
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self):
        while self.boundary.wait(lambda: True):
            if self.boundary.wanted:
                self.boundary.stand()
                continue
            self.drawing = True
            self._draw()
            self.drawn += 1
            self.drawing = False


@pytest.fixture
def switching_often():
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def test_nothing_is_drawn_while_anybody_holds(switching_often):
    sampler = Sampler()
    wrong = []

    def hold():
        for _ in range(300):
            with sampler.boundary.hold("swap"):
                drawn = sampler.drawn
                for _ in range(20):
                    if sampler.drawing or sampler.drawn != drawn:
                        wrong.append(sampler.drawn)

    threads = [threading.Thread(target=hold) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sampler.boundary.close()
    sampler.thread.join()
    assert not wrong
    assert sampler.drawn > 0


def test_a_hold_waits_for_the_token_that_is_being_drawn():
    drawing, go_on, found = threading.Event(), threading.Event(), []
    sampler = Sampler(draw=lambda: (drawing.set(), go_on.wait()))
    drawing.wait()

    def hold():
        with sampler.boundary.hold("swap"):
            found.append(sampler.drawing)

    holding = threading.Thread(target=hold)
    holding.start()
    with sampler.boundary.condition:
        sampler.boundary.condition.wait_for(lambda: sampler.boundary.wanted or found)
    go_on.set()
    holding.join()
    assert found == [False]
    sampler.boundary.close()


def test_a_pause_outlives_the_holds_in_it():
    sampler = Sampler()
    sampler.boundary.pause()
    drawn = sampler.drawn
    with sampler.boundary.hold("abort"):
        pass
    assert sampler.boundary.wanted
    assert sampler.drawn == drawn
    sampler.boundary.resume()
    while sampler.drawn == drawn:
        pass
    sampler.boundary.close()


def test_a_pause_that_is_ended_before_it_came_returns():
    go_on = threading.Event()
    sampler = Sampler(draw=go_on.wait)
    pausing = threading.Thread(target=sampler.boundary.pause)
    pausing.start()
    with sampler.boundary.condition:
        sampler.boundary.condition.wait_for(lambda: sampler.boundary.wanted)
    sampler.boundary.resume()
    pausing.join(timeout=60)
    assert not pausing.is_alive()
    go_on.set()
    sampler.boundary.close()


def test_what_would_wait_for_ever_is_refused():
    sampler = Sampler()
    sampler.boundary.pause()
    with (
        pytest.raises(RuntimeError, match=r"Sampler.swap: the engine must not be paused while half-sampled"),
        sampler.boundary.drain("swap", lambda: False),
    ):
        pass
    assert not sampler.boundary.draining
    sampler.boundary.fail(OSError("broken"))
    with pytest.raises(RuntimeError, match=r"Sampler.pause: the engine has failed: broken"):
        sampler.boundary.pause()
