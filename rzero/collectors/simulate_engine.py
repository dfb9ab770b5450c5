"""An engine under a virtual clock: all its sequences advance together, and weights change in the middle."""

import heapq
import math
from bisect import bisect_right
from collections import deque
from typing import final

from rzero.collectors.simulate_laws import RateLaw

# Tokens: far above the rounding of a float that counts tokens, far below one token.
SLACK = 1e-6


@final
class VirtualEngine:
    """Continuous batching as processor sharing: with n sequences, each draws `rate_law(n)` tokens per second.

    One number describes all progress: `drawn`, the tokens that a sequence present from the beginning would
    have drawn. A response of L tokens that starts at `drawn` = x ends at x + L and draws its k-th token at
    x + k, so weights that arrive at `drawn` = y change its version after floor(y - x) tokens.

    Responses beyond the slots wait inside, first come first served.

    Args:
        rate_law: Tokens per second of each sequence, given their number.
        version: Version of the weights at the beginning.
        slots: Sequences decoded together at most.
    """

    def __init__(self, *, rate_law: RateLaw, version: int, slots: float = math.inf) -> None:
        """Starts empty at time 0; see the class for the arguments."""
        self.now = 0.0
        self.drawn = 0.0
        self.up = True
        self.seconds = {"busy": 0.0, "idle": 0.0, "held": 0.0, "down": 0.0, "sequence": 0.0}
        self._rate_law, self._slots = rate_law, slots
        self._rates: dict[int, float] = {}
        self._holds = 0
        self._ends: list[tuple[float, int, float]] = []  # (drawn at the end, ticket, drawn at the start)
        self._coming: dict[int, list[int]] = {}  # lengths by ticket
        self._waiting: deque[tuple[int, int]] = deque()  # (ticket, length)
        self._swap_drawn = [0.0]
        self._swap_version = [version]

    @property
    def load(self) -> int:
        """Responses that the engine has to do, drawn, waiting or on their way."""
        return len(self._ends) + len(self._waiting) + sum(map(len, self._coming.values()))

    def advance(self, now: float) -> None:
        """Lets time pass until `now`; nothing may end in between."""
        seconds, self.now = now - self.now, now
        if not self.up:
            self.seconds["down"] += seconds
        elif self._holds:
            self.seconds["held"] += seconds
        elif self._ends:
            self.drawn += seconds * self._rate()
            self.seconds["busy"] += seconds
            self.seconds["sequence"] += seconds * len(self._ends)
        else:
            self.seconds["idle"] += seconds

    def next_end(self) -> float:
        """Time at which the next response ends if nothing else happens before."""
        if not self._ends or self._holds or not self.up:
            return math.inf
        return self.now + max(0.0, self._ends[0][0] - self.drawn) / self._rate()

    def start(self, ticket: int, length: int) -> None:
        """Begins one response of a ticket, now or when a slot is free."""
        self._waiting.append((ticket, length))
        self._fill()

    def announce(self, ticket: int, lengths: list[int]) -> None:
        """Has the responses of a ticket on their way to the engine."""
        self._coming[ticket] = lengths

    def receive(self, ticket: int) -> None:
        """Begins the responses of a ticket that was announced, unless the engine has failed since."""
        for length in self._coming.pop(ticket, []):
            self.start(ticket, length)

    def pop_ended(self) -> list[tuple[int, list[int], list[int]]]:
        """Removes the responses that end now, at a time given by `next_end`.

        Returns:
            For each its ticket, and the versions and token counts of its segments.
        """
        # The clock is a float: what the event was made for has ended, whatever the last bit says.
        self.drawn = max(self.drawn, self._ends[0][0])
        ended = []
        while self._ends and self._ends[0][0] <= self.drawn + SLACK:
            end, ticket, start = heapq.heappop(self._ends)
            ended.append((ticket, *self._segments(start, round(end - start))))
        self._fill()
        return ended

    def swap(self, version: int) -> None:
        """New weights: tokens drawn from now on carry `version`, also those of running responses."""
        self._swap_drawn.append(self.drawn)
        self._swap_version.append(version)

    def hold(self) -> None:
        """Stops drawing, for a swap or an evaluation, until `let_go` was called as often."""
        self._holds += 1

    def let_go(self) -> None:
        """Undoes one `hold`."""
        self._holds -= 1

    def fail(self) -> list[int]:
        """Goes down and loses all it had; returns the tickets, each once."""
        self.up = False
        tickets = {ticket for _, ticket, _ in self._ends} | {ticket for ticket, _ in self._waiting}
        tickets |= self._coming.keys()
        self._ends.clear()
        self._waiting.clear()
        self._coming.clear()
        return sorted(tickets)

    def repair(self, version: int) -> None:
        """Comes back empty with the newest weights."""
        self.up = True
        self.swap(version)

    def _fill(self) -> None:
        while self._waiting and len(self._ends) < self._slots:
            ticket, length = self._waiting.popleft()
            heapq.heappush(self._ends, (self.drawn + length, ticket, self.drawn))

    def _rate(self) -> float:
        count = len(self._ends)
        if count not in self._rates:
            self._rates[count] = self._rate_law(count)
        return self._rates[count]

    def _segments(self, start: float, length: int) -> tuple[list[int], list[int]]:
        first = bisect_right(self._swap_drawn, start) - 1
        versions, counts, before = [], [], 0
        for index in range(first, len(self._swap_drawn)):
            last = index + 1 == len(self._swap_drawn)
            until = length if last else min(length, math.floor(self._swap_drawn[index + 1] - start + SLACK))
            if until > before:
                versions.append(self._swap_version[index])
                counts.append(until - before)
                before = until
        return versions, counts
