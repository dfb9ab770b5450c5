"""Whether an answer to a mathematical problem is right: math-verify, in a process that cannot hold up a run.

Comparing expressions can take for ever, and math-verify's own timeouts need the main thread of a process.
"""

from __future__ import annotations

import importlib.util
import json
import select
import subprocess
import sys
import threading
import weakref
from typing import final

from recipes.errors import RecipeError

DEADLINE = 30.0  # seconds; math-verify itself gives up after 5 for parsing and 5 for comparing
END_OF_THOUGHT = "</think>"


@final
class MathVerifier:
    r"""Compares the last ``\boxed{...}`` of a response with the reference answer.

    What a model thought, up to the last ``</think>``, is not read. A response without a boxed answer is
    wrong, and so is one whose comparison does not end in time.

    Raises:
        RecipeError: If math-verify is not installed.

    Example:
        >>> verifier = MathVerifier()
        >>> verifier.score(r"Half of one is \boxed{0.5}.", r"\frac{1}{2}")
        1.0
        >>> verifier.close()
    """

    def __init__(self) -> None:
        if importlib.util.find_spec("math_verify") is None:
            raise RecipeError(
                "mathematical problems need math-verify, got none installed; pip install 'rzero[math]'"
            )
        self._process: subprocess.Popen[str] | None = None
        self._lock = threading.Lock()
        self.timeouts = 0

    def score(self, response: str, reference: str) -> float:
        """1.0 if the response is right, else 0.0."""
        answer = last_boxed(response.rpartition(END_OF_THOUGHT)[2])
        if answer is None:
            return 0.0
        with self._lock:
            process = self._process = self._process or self._start()
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write(json.dumps({"answer": answer, "reference": reference}) + "\n")
            process.stdin.flush()
            if select.select([process.stdout], [], [], DEADLINE)[0]:
                line = process.stdout.readline()
                if not line:
                    raise RuntimeError("MathVerifier: its process must answer, got none; it has ended")
                return float(json.loads(line))
            self.timeouts += 1
            self._end()
            return 0.0

    def close(self) -> None:
        """End the process."""
        with self._lock:
            self._end()

    def _start(self) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "recipes.tasks.math_verifier"]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._finalizer = weakref.finalize(self, _kill, process)
        return process

    def _end(self) -> None:
        if self._process is not None:
            self._finalizer()
            self._process = None


def last_boxed(text: str) -> str | None:
    r"""The text from the last ``\boxed`` on; None if there is none."""
    place = text.rfind("\\boxed")
    return None if place < 0 else text[place:]


def _kill(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


def _serve() -> None:
    import logging

    from math_verify import LatexExtractionConfig, parse, verify

    logging.disable(logging.CRITICAL)  # a comparison that does not end is an answer too
    boxed = [LatexExtractionConfig(boxed_match_priority=0)]
    for line in sys.stdin:
        request = json.loads(line)
        reference = parse(f"\\boxed{{{request['reference']}}}", extraction_config=boxed)
        answer = parse(request["answer"], extraction_config=boxed)
        print(json.dumps(float(verify(reference, answer))), flush=True)


if __name__ == "__main__":
    _serve()
