"""Calls of our methods in all of vLLM's workers, whose errors come back as values.

An exception would leave vLLM's multiprocess executor out of step: it stops reading at the first worker that
failed, and every later call then gets the answers of the one before from the others. Imports vLLM.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import traceback
from collections.abc import Callable
from functools import wraps
from typing import Any

from vllm.v1.engine.exceptions import EngineDeadError

from rzero.collectors.engine import EngineError, EngineLost


def answering(method: Callable[..., Any]) -> Callable[..., dict[str, Any]]:
    """Have a worker's method return ``value`` and ``error``, which ``ask_workers`` takes apart."""

    @wraps(method)
    def answer(self: Any, *args: Any) -> dict[str, Any]:
        try:
            return {"value": method(self, *args), "error": ""}
        except EngineError as error:
            return {"value": None, "error": str(error)}
        except Exception:
            return {"value": None, "error": traceback.format_exc()}

    return answer


def ask_workers(llm_engine: Any, method: str, *args: Any) -> list[Any]:
    """What an ``answering`` method returns in each worker.

    Args:
        llm_engine: VLLM's ``LLMEngine``.
        method: Name of the method.
        args: Plain strings, numbers, lists and dicts, which vLLM serialises safely.

    Raises:
        EngineError: If it failed in a worker; all have come back from it.
        EngineLost: If the engine core's process is gone.
    """
    try:
        answers = llm_engine.collective_rpc(method, args=args)
    except EngineDeadError as error:
        raise EngineLost(str(error)) from error
    for worker, answer in enumerate(answers):
        if answer["error"]:
            raise EngineError(f"{answer['error']} (worker {worker} of {len(answers)})")
    return [answer["value"] for answer in answers]
