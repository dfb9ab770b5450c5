"""The law that a response was sampled under, written once and referred to by number."""

import hashlib
import json
import math
import os
import threading
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class SamplingContext:
    """Everything that decides which distribution a token was drawn from, besides weights and history.

    Equal contexts have equal ids in every process, because the id is derived from the content. No field has a
    default: a law that was not recorded cannot be reconstructed.

    Args:
        temperature: > 0, finite.
        top_p: in (0, 1]; 1 keeps the whole vocabulary.
        top_k: >= 0; 0 keeps the whole vocabulary.
        min_p: in [0, 1); 0 keeps the whole vocabulary.
        log_prob_mode: ``"processed"``: the recorded log-probs are of the distribution after temperature and
            truncation, the one really sampled from. No other mode is evidence, so no other is accepted.
        engine: name of the sampler, e.g. ``"transformers"`` or ``"vllm"``.
        engine_version: its version.
        kernel_fingerprint: the fingerprint of the kernels that computed the logits.
        dtype: of the weights while sampling, e.g. ``"float32"``.
        tensor_parallel_size: >= 1.
        model_digest: identifies the architecture and its configuration.
        tokenizer_digest: identifies the tokenizer.

    Raises:
        TypeError: if a field has another type.
        ValueError: if a field is out of its range.

    Example:
        >>> context = SamplingContext(
        ...     temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, log_prob_mode="processed",
        ...     engine="transformers", engine_version="5.19", kernel_fingerprint="exact-1", dtype="float32",
        ...     tensor_parallel_size=1, model_digest="m", tokenizer_digest="t",
        ... )
        >>> SamplingContext.from_json(context.to_json()) == context
        True
    """

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    log_prob_mode: str
    engine: str
    engine_version: str
    kernel_fingerprint: str
    dtype: str
    tensor_parallel_size: int
    model_digest: str
    tokenizer_digest: str

    def __post_init__(self) -> None:
        """Check every field."""
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type is float and type(value) is int:
                object.__setattr__(self, field.name, float(value))  # 1 and 1.0 are one law and one id.
            elif type(value) is not field.type:
                raise TypeError(f"SamplingContext: {field.name} must be of type {field.type}, got {value!r}")
        rules = {
            "temperature": (0 < self.temperature < math.inf, "be positive and finite"),
            "top_p": (0 < self.top_p <= 1, "lie in (0, 1]"),
            "top_k": (self.top_k >= 0, "be at least 0"),
            "min_p": (0 <= self.min_p < 1, "lie in [0, 1)"),
            "log_prob_mode": (self.log_prob_mode == "processed", "be 'processed'"),
            "tensor_parallel_size": (self.tensor_parallel_size >= 1, "be at least 1"),
        }
        texts = (
            "engine",
            "engine_version",
            "kernel_fingerprint",
            "dtype",
            "model_digest",
            "tokenizer_digest",
        )
        rules |= {name: (bool(getattr(self, name)), "not be empty") for name in texts}
        for name, (holds, rule) in rules.items():
            if not holds:
                raise ValueError(f"SamplingContext: {name} must {rule}, got {getattr(self, name)!r}")

    @cached_property
    def context_id(self) -> int:
        """The id, in [0, 2**63): the first 63 bits of the BLAKE2b hash of the JSON text."""
        digest = hashlib.blake2b(self.to_json().encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") >> 1

    def to_json(self) -> str:
        """Write the context as canonical JSON: sorted keys, no spaces, shortest exact floats."""
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":"), allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> "SamplingContext":
        """Read what `to_json` wrote.

        Raises:
            ValueError: if the text is not a JSON object with exactly the fields of a context.
        """
        content = json.loads(text)
        names = {field.name for field in fields(cls)}
        if not isinstance(content, dict) or content.keys() != names:
            raise ValueError(
                f"SamplingContext.from_json: text must hold exactly {sorted(names)}, got {text[:200]}"
            )
        return cls(**content)


class ContextTable:
    """The contexts of a run, interned: each is stored once, under its id.

    Args:
        path: a JSON file that mirrors the table, read if it exists. None keeps the table in memory.

    Example:
        >>> table = ContextTable()
        >>> len(table)
        0
    """

    def __init__(self, path: str | Path | None = None):
        """Read the file, if there is one."""
        self._path = None if path is None else Path(path)
        self._lock = threading.Lock()
        self._contexts: dict[int, SamplingContext] = {}
        self._text = _text({})
        if self._path is not None and self._path.exists():
            self._contexts = _parse(self._path.read_text())
            self._text = _text(self._contexts)

    def intern(self, context: SamplingContext) -> int:
        """Store a context unless it is there, and return its id.

        The file is replaced atomically before the id is returned, so no stored response can name a context
        that a crash forgot.
        """
        with self._lock:
            known = self._contexts.get(context.context_id)
            if known is None:
                self._replace({**self._contexts, context.context_id: context})
            elif known != context:
                raise ValueError(
                    f"ContextTable.intern: id {context.context_id} already names {known.to_json()}"
                )
        return context.context_id

    def update(self, text: str) -> None:
        """Add the contexts of another table's `to_json`; each id must be that of its content."""
        with self._lock:
            self._replace({**_parse(text), **self._contexts})

    def to_json(self) -> str:
        """Write the table as one JSON object, id to context."""
        return self._text

    def __getitem__(self, context_id: int) -> SamplingContext:
        """Look a context up by its id."""
        return self._contexts[context_id]

    def __contains__(self, context_id: int) -> bool:
        """Whether the id is known."""
        return context_id in self._contexts

    def __len__(self) -> int:
        """How many contexts are known."""
        return len(self._contexts)

    def __iter__(self) -> Iterator[SamplingContext]:
        """Iterate over the contexts in the order in which they came."""
        return iter(self._contexts.values())

    def _replace(self, contexts: dict[int, SamplingContext]) -> None:
        """Write first, then remember: what is in the table is in the file."""
        text = _text(contexts)
        if self._path is not None:
            partial = self._path.with_name(f"{self._path.name}.partial")
            with open(partial, "w") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            partial.replace(self._path)
        self._contexts, self._text = contexts, text


def _text(contexts: Mapping[int, SamplingContext]) -> str:
    return json.dumps({str(key): asdict(value) for key, value in contexts.items()}, indent=1)


def _parse(text: str) -> dict[int, SamplingContext]:
    contexts = {}
    for context_id, content in json.loads(text).items():
        context = SamplingContext.from_json(json.dumps(content))
        if context.context_id != int(context_id):
            raise ValueError(
                f"ContextTable: id must be {context.context_id} by its content, got {context_id}"
            )
        contexts[context.context_id] = context
    return contexts
