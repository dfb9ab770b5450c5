"""What concurrent.futures does not offer."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import CancelledError, Future, InvalidStateError
from functools import partial
from typing import Any, TypeVar

ResultT = TypeVar("ResultT")


def settle(future: Future[Any], result: Any) -> bool:
    """Give a future its result, or an exception, unless it has one already.

    Returns:
        Whether this call settled it.
    """
    try:
        if isinstance(result, BaseException):
            future.set_exception(result)
        else:
            future.set_result(result)
    except InvalidStateError:
        return False
    return True


def outcome(future: Future[ResultT]) -> ResultT | BaseException:
    """The result of a future that is done, or what it would raise."""
    if future.cancelled():
        return CancelledError()
    return future.exception() or future.result()


def first_of(group: Future[list[ResultT]]) -> Future[ResultT]:
    """The first of the results alone.

    Example:
        >>> group = Future()
        >>> first = first_of(group)
        >>> group.set_result([1, 2])
        >>> first.result()
        1
    """
    future: Future[ResultT] = Future()

    def done(_: Future[list[ResultT]]) -> None:
        results = outcome(group)
        settle(future, results[0] if isinstance(results, list) else results)

    group.add_done_callback(done)
    return future


def gathered(futures: Sequence[Future[ResultT]]) -> Future[list[ResultT]]:
    """All results in order, when the last is there, or the first exception.

    Args:
        futures: At least one.

    Example:
        >>> one, other = Future(), Future()
        >>> both = gathered([one, other])
        >>> other.set_result(2); one.set_result(1)
        >>> both.result()
        [1, 2]
    """
    whole: Future[list[ResultT]] = Future()
    results: dict[int, ResultT] = {}
    lock = threading.Lock()

    def done(index: int, future: Future[ResultT]) -> None:
        result = outcome(future)
        if isinstance(result, BaseException):
            settle(whole, result)
            return
        with lock:
            results[index] = result
            complete = len(results) == len(futures)
        if complete:
            settle(whole, [results[k] for k in range(len(futures))])

    for index, future in enumerate(futures):
        future.add_done_callback(partial(done, index))
    return whole
