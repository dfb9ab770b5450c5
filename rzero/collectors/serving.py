"""The sampler's side of a ``RemoteEngine``: an engine, and perhaps an interaction, that serve another rank.

incoming --commands--> engine, interaction (their own threads) --outcomes--> one queue --> outgoing
"""

from __future__ import annotations

import json
import queue
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

from torch.distributed.checkpoint.stateful import Stateful

from rzero.collectors.drain import drain
from rzero.collectors.engine import Completion, EngineError, GenerationEngine
from rzero.collectors.failures import GroupFailed
from rzero.collectors.futures import outcome
from rzero.collectors.interaction import Interaction, PlayedGroup, play
from rzero.collectors.transport import Channel, ConnectionLost, Message
from rzero.collectors.wire import (
    decode_group_requests,
    decode_requests,
    encode_completions,
    encode_played,
)

_Outgoing = queue.SimpleQueue[Message | list[Completion] | PlayedGroup | BaseException]


def serve_engine(
    engine: GenerationEngine,
    outgoing: Channel,
    incoming: Channel,
    *,
    interaction: Interaction | None = None,
    problem: Callable[[int], Any] | None = None,
) -> None:
    """Run an engine for a ``RemoteEngine`` on another rank until that closes it.

    With an interaction, groups are also rewarded and packed here (``RemoteEngine.play_group``), so that the
    learner's rank need not. An exception in the engine or the interaction travels to the learner's rank with
    its traceback, and is raised here too; ``GroupFailed`` loses its group alone.

    Args:
        engine: Already holding the weights of its version.
        outgoing: Channel to the learner's rank.
        incoming: Channel from it.
        interaction: Plays groups for a collector without a reward function; closed at the end. It must have
            no state: no checkpoint would hold it.
        problem: Of a prompt's id, as ``Prompt.problem``; without it, the interaction sees None there.

    Raises:
        ValueError: If the interaction has a state.
        EngineError: If the engine or the interaction failed.
        ConnectionLost: If the learner's rank is gone.
    """
    if isinstance(interaction, Stateful) and interaction.state_dict():
        raise ValueError(
            f"serve_engine: interaction must have no state, got {sorted(interaction.state_dict())}; "
            f"give it to the collector instead"
        )
    outgoing.send(
        Message("hello", text={"context": engine.context().to_json(), "version": str(engine.version())})
    )
    to_send: _Outgoing = queue.SimpleQueue()
    receiver = threading.Thread(
        target=_serve_commands, args=(engine, incoming, to_send, interaction, problem), daemon=True
    )
    receiver.start()
    try:
        while not _send(engine, outgoing, drain(to_send)):
            pass
        receiver.join()
    finally:
        if interaction is not None:
            interaction.close()


def _send(
    engine: GenerationEngine,
    outgoing: Channel,
    items: list[Message | list[Completion] | PlayedGroup | BaseException],
) -> bool:
    """Send what came up, and say whether that was the end."""
    error = next((item for item in items if isinstance(item, BaseException)), None)
    if isinstance(error, ConnectionLost):
        raise error
    if error is not None:
        text = "".join(traceback.format_exception(error))
        outgoing.send(Message("error", text={"traceback": text}))
        raise EngineError("serve_engine: the engine failed") from error
    busy = {"busy_seconds": repr(engine.busy_seconds())}
    completions = [item for item in items if isinstance(item, list)]
    if completions:
        outgoing.send(Message("completions", encode_completions(completions), busy))
    played = [item for item in items if isinstance(item, tuple)]
    if played:
        outgoing.send(Message("played", encode_played(played), busy))
    messages = [item for item in items if isinstance(item, Message)]
    for message in messages:
        outgoing.send(Message(message.kind, message.tensors, {**message.text, **busy}))
    return any(message.kind == "closed" for message in messages)


def _serve_commands(
    engine: GenerationEngine,
    incoming: Channel,
    to_send: _Outgoing,
    interaction: Interaction | None,
    problem: Callable[[int], Any] | None,
) -> None:
    try:
        while True:
            message = incoming.receive()
            if message.kind == "submit":
                for requests in decode_requests(message.tensors):
                    engine.submit_group(requests).add_done_callback(lambda f: to_send.put(outcome(f)))
            elif message.kind == "play":
                if interaction is None:
                    raise ValueError("serve_engine: interaction must be given to play whole groups, got None")
                for group in decode_group_requests(message.tensors, problem or (lambda _: None)):
                    played = play(interaction, engine, group)
                    played.add_done_callback(partial(_deliver, to_send, group.group_id))
            elif message.kind == "swap":
                to_send.put(_swap(engine, message))
            elif message.kind == "digests":
                to_send.put(Message("digests", text={"digests": json.dumps(engine.weight_digests())}))
            elif message.kind == "pause":
                engine.pause()
                to_send.put(Message("paused"))
            elif message.kind == "resume":
                engine.resume()
                to_send.put(Message("resumed"))
            elif message.kind == "close":
                to_send.put(Message("closed"))
                return
            else:
                raise ValueError(f"serve_engine: kind must be a known command, got {message.kind!r}")
    except BaseException as error:
        to_send.put(error)


def _deliver(to_send: _Outgoing, group_id: int, future: Future[PlayedGroup]) -> None:
    played = outcome(future)
    if isinstance(played, GroupFailed):
        text = {"group_id": str(group_id), "reason": played.reason, "message": played.message}
        text["traceback"] = "".join(traceback.format_exception(played))
        to_send.put(Message("group failed", text=text))
    else:
        to_send.put(played)


def _swap(engine: GenerationEngine, message: Message) -> Message:
    try:
        engine.swap(int(message.text["version"]), message.tensors, json.loads(message.text["digests"]))
    except EngineError as error:
        return Message("refused", text={"reason": str(error)})
    return Message("swapped", text={"version": message.text["version"]})
