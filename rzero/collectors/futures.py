"""What concurrent.futures does not offer."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future, InvalidStateError
from functools import partial
from typing import Any, TypeVar

ResultT = TypeVar("ResultT")
NextT = TypeVar("NextT")


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


def then(future: Future[ResultT], function: Callable[[ResultT], NextT]) -> Future[NextT]:
    """What a function makes of a result, in the thread that brings it; exceptions of either pass on.

    Example:
        >>> group = Future()
        >>> first = then(group, lambda results: results[0])
        >>> group.set_result([1, 2])
        >>> first.result()
        1
    """
    following: Future[NextT] = Future()

    def done(_: Future[ResultT]) -> None:
        result = outcome(future)
        if not isinstance(result, BaseException):
            try:
                result = function(result)
            except BaseException as error:
                result = error
        settle(following, result)

    future.add_done_callback(done)
    return following


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
