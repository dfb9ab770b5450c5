"""An engine in another process: ``RemoteEngine`` here, ``serve_engine`` (``serving.py``) there.

learner's rank                                      sampler's rank
RemoteEngine.submit / swap / close  --commands-->   serve_engine --> engine (its own thread), interaction
futures resolve                     <--results---   completions, whole groups, acknowledgements, errors
"""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from itertools import islice

from torch import Tensor

from rzero.buffers import SamplingContext
from rzero.collectors.drain import drain
from rzero.collectors.engine import Completion, EngineError, EngineLost, GenerationRequest
from rzero.collectors.failures import GroupFailed
from rzero.collectors.futures import settle, then
from rzero.collectors.interaction import GroupRequest
from rzero.collectors.pack_completions import Fields
from rzero.collectors.transport import Channel, Message
from rzero.collectors.wire import (
    Requests,
    decode_completions,
    decode_played,
    encode_group_requests,
    encode_requests,
)


class RemoteEngine:
    """A ``GenerationEngine`` that runs on another rank.

    Args:
        outgoing: Channel to the sampler's rank.
        incoming: Channel from it.
        timeout: Seconds that the engine has to answer a call, also the first, while its rank builds it.

    Raises:
        EngineError: From any call after the engine has failed, or if it does not answer in time.
        EngineLost: Likewise, after its process is gone.
    """

    def __init__(self, outgoing: Channel, incoming: Channel, *, timeout: float = 600.0) -> None:
        self._outgoing, self._incoming = outgoing, incoming
        self._timeout = timeout
        self._busy_seconds = 0.0
        self._lock = threading.Lock()
        self._submitted: dict[int, tuple[Requests, Future[list[Completion]]]] = {}  # by the first uid
        self._playing: dict[int, Future[Fields]] = {}  # by the group's id
        self._reply: queue.SimpleQueue[Message | BaseException] = queue.SimpleQueue()
        self._call_lock = threading.Lock()  # one call that waits for a reply at a time
        self._error: BaseException | None = None
        self._to_send: queue.SimpleQueue[Message | Requests | GroupRequest | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(
                target=target, name=f"RemoteEngine-{outgoing.peer}-{target.__name__}", daemon=True
            )
            for target in (self._send_loop, self._receive_loop)
        ]
        for thread in self._threads:
            thread.start()
        hello = self._answer("start")
        self._context = SamplingContext.from_json(hello.text["context"])
        self._version = int(hello.text["version"])

    def submit(self, request: GenerationRequest) -> Future[Completion]:
        """See ``GenerationEngine.submit``."""
        return then(self.submit_group([request]), lambda completions: completions[0])

    def submit_group(self, requests: Sequence[GenerationRequest]) -> Future[list[Completion]]:
        """See ``GenerationEngine.submit_group``; nothing travels back before all are complete."""
        future: Future[list[Completion]] = Future()
        group = tuple(requests)
        with self._lock:
            self._refuse_if_failed("submit")
            self._submitted[group[0].uid] = (group, future)
        self._to_send.put(group)
        return future

    def play_group(self, group: GroupRequest) -> Future[Fields]:
        """See ``GroupEngine.play_group``; the engine's rank must serve with an interaction."""
        future: Future[Fields] = Future()
        with self._lock:
            self._refuse_if_failed("play_group")
            self._playing[group.group_id] = future
        self._to_send.put(group)
        return future

    def pause(self) -> None:
        """See ``GenerationEngine.pause``."""
        self._call(Message("pause"))

    def resume(self) -> None:
        """See ``GenerationEngine.resume``."""
        self._call(Message("resume"))

    def swap(self, version: int, weights: Mapping[str, Tensor], digests: Mapping[str, int]) -> None:
        """See ``GenerationEngine.swap``; the engine samples on while the weights travel."""
        text = {"version": str(version), "digests": json.dumps(dict(digests))}
        self._call(Message("swap", dict(weights), text))
        self._version = version

    def version(self) -> int:
        """The last version that the engine acknowledged."""
        return self._version

    def context(self) -> SamplingContext:
        """See ``GenerationEngine.context``."""
        return self._context

    def weight_digests(self) -> dict[str, int]:
        """See ``GenerationEngine.weight_digests``."""
        return json.loads(self._call(Message("digests")).text["digests"])

    def busy_seconds(self) -> float:
        """As of the engine's last message."""
        return self._busy_seconds

    def close(self) -> None:
        """Stop the engine and end ``serve_engine`` on its rank."""
        if self._error is None:
            self._call(Message("close"))
        self._to_send.put(None)
        for thread in self._threads:
            thread.join(self._timeout)

    def _call(self, message: Message) -> Message:
        with self._call_lock:
            with self._lock:
                self._refuse_if_failed(message.kind)
            self._to_send.put(message)
            return self._answer(message.kind)

    def _answer(self, kind: str) -> Message:
        try:
            reply = self._reply.get(timeout=self._timeout)
        except queue.Empty:
            error = EngineError(
                f"RemoteEngine.{kind}: rank {self._outgoing.peer} did not answer within {self._timeout:g} s"
            )
            self._fail(error)  # a late answer must not be taken for that of the next call
            raise error from None
        if isinstance(reply, BaseException):
            raise _like(reply, f"RemoteEngine.{kind}: {reply}") from reply
        if reply.kind == "refused":
            raise EngineError(reply.text["reason"])
        return reply

    def _refuse_if_failed(self, caller: str) -> None:
        if self._error is not None:
            text = f"RemoteEngine.{caller}: the engine has failed: {self._error}"
            raise _like(self._error, text) from self._error

    def _send_loop(self) -> None:
        try:
            while True:
                items = drain(self._to_send)
                requests = [item for item in items if isinstance(item, tuple)]
                if requests:
                    self._outgoing.send(Message("submit", encode_requests(requests)))
                groups = [item for item in items if isinstance(item, GroupRequest)]
                if groups:
                    self._outgoing.send(Message("play", encode_group_requests(groups)))
                for item in items:
                    if isinstance(item, Message):
                        self._outgoing.send(item)
                    elif item is None:
                        return
        except BaseException as error:
            self._fail(error)

    def _receive_loop(self) -> None:
        try:
            while True:
                message = self._incoming.receive()
                self._busy_seconds = float(message.text.get("busy_seconds", self._busy_seconds))
                if message.kind == "completions":
                    self._resolve(message)
                elif message.kind == "played":
                    self._resolve_played(message)
                elif message.kind == "group failed":
                    error = GroupFailed(message.text["reason"], message.text["message"])
                    error.add_note(message.text["traceback"])
                    self._take_playing(int(message.text["group_id"])).set_exception(error)
                elif message.kind == "error":
                    raise EngineError(f"rank {self._incoming.peer} failed:\n{message.text['traceback']}")
                else:
                    self._reply.put(message)
                    if message.kind == "closed":
                        return
        except BaseException as error:
            self._fail(error)

    def _resolve(self, message: Message) -> None:
        with self._lock:
            groups = [self._submitted.pop(uid) for uid in message.tensors["first_uid"].tolist()]
        completions = iter(decode_completions(message.tensors, [r for group, _ in groups for r in group]))
        for group, future in groups:
            future.set_result(list(islice(completions, len(group))))

    def _resolve_played(self, message: Message) -> None:
        for fields in decode_played(message.tensors):
            self._take_playing(int(fields["group_id"][0])).set_result(fields)

    def _take_playing(self, group_id: int) -> Future[Fields]:
        with self._lock:
            return self._playing.pop(group_id)

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            self._error = self._error or error
            futures = [*(future for _, future in self._submitted.values()), *self._playing.values()]
            self._submitted, self._playing = {}, {}
        for future in futures:
            settle(future, error)
        self._reply.put(error)


def _like(error: BaseException, text: str) -> EngineError:
    return EngineLost(text) if isinstance(error, EngineLost) else EngineError(text)
