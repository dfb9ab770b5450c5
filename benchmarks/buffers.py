"""Replay buffers for responses of uneven length, measured side by side in one run.

    python benchmarks/buffers.py            # the comparison, then the curve from 10^3 to 10^6
    python benchmarks/buffers.py --quick    # a tenth of the responses, and the curve up to 10^5

The same responses (50 to 1,000 tokens, 6 token fields, groups of 16) go into each buffer as they come from a
sampler: mappings of tensors and numbers, by the group and by the update of 256. Appending includes all that a
buffer needs done to them. Each buffer runs in a process of its own on one thread. Appends and samples are
timed in CPU time of that process, so that neighbours on the machine count less; checkpoints in wall time; of
several rounds the best counts, for everybody.
Resident memory is what its process grew by. Sampling returns 256 responses as real tensors: packed where the
buffer can, padded where it must, and ours also in TorchRL's padded layout, which has more and wider fields
than were stored. A list of dicts appends references and copies nothing until it is sampled. Only ours checks
what it is given, and hashes it, in and out.
"""

import argparse
import gc
import json
import logging
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, lazy_stack
from torchrl.data import LazyMemmapStorage, LazyStackStorage, LazyTensorStorage, ReplayBuffer

from rzero.buffers import (
    FifoGroupSampler,
    ProvenanceReplayBuffer,
    RandomGroupSampler,
    TokenLogStorage,
    pack_fields,
    provenance_digest,
    to_torchrl,
)

GROUP, BATCH, LONGEST = 16, 256, 1000
TOKEN_BYTES = 4 + 4 + 1 + 4 + 4 + 2
TOKEN_NAMES = {"token_ids", "behavior_log_probs", "response_mask", "policy_version", "log_probs", "turn"}
EXTRA_FIELDS = {"log_probs": torch.float32, "turn": torch.int16}

Response = dict[str, Any]


def groups(count: int, *, seed: int = 0) -> Iterator[list[Response]]:
    """Draw the same groups of responses for everybody."""
    generator = np.random.default_rng(seed)
    for first in range(0, count, GROUP):
        yield [_response(uid, generator) for uid in range(first, first + GROUP)]


def _response(uid: int, generator: np.random.Generator) -> Response:
    length, prompt = int(generator.integers(50, LONGEST + 1)), 20
    sampled = torch.arange(length) >= prompt
    log_probs = torch.from_numpy(-generator.exponential(size=length).astype(np.float32))
    tokens = {
        "token_ids": torch.from_numpy(generator.integers(0, 50_000, length, dtype=np.int32)),
        "behavior_log_probs": torch.where(sampled, log_probs, torch.nan),
        "response_mask": sampled,
        "policy_version": torch.where(sampled, 7, -1).int(),
    }
    return {
        **tokens,
        "extras": {"log_probs": log_probs + 0.01, "turn": sampled.short()},
        "digest": provenance_digest(
            tokens["token_ids"], tokens["behavior_log_probs"], tokens["policy_version"]
        ),
        "uid": uid,
        "group_id": uid // GROUP,
        "prompt_id": uid // GROUP,
        "sample_index": uid % GROUP,
        "prompt_length": prompt,
        "response_length": length - prompt,
        "reward": float(uid % 2),
        "finish_code": 0,
        "context_id": 1,
        "seed": uid,
        "t_submit_ns": 1,
        "t_first_ns": 2,
        "t_done_ns": 3,
    }


def _flat(response: Response) -> Response:
    """The fields without nesting, as the buffers of TorchRL take them."""
    return {**{name: value for name, value in response.items() if name != "extras"}, **response["extras"]}


class Ours:
    """Responses packed in a chunked log."""

    def __init__(
        self,
        count: int,
        folder: Path,
        *,
        path: Path | None = None,
        padded: bool = False,
        checked: bool = True,
    ):
        self.buffer = ProvenanceReplayBuffer(
            storage=TokenLogStorage(extra_fields=EXTRA_FIELDS, path=path),
            group_size=GROUP,
            groups_per_batch=BATCH // GROUP,
            capacity_updates=count // BATCH + 1,
            sampler=RandomGroupSampler(seed=0),
            check_digests=checked,
        )
        self.folder, self.padded = folder, padded

    def append(self, group: list[Response]) -> None:
        """Store a group."""
        self.buffer.extend(group)

    def sample(self) -> Any:
        """Draw 256 responses."""
        batch = self.buffer.sample(timeout=0)
        return to_torchrl(batch, layout="padded") if self.padded else batch

    def save(self) -> None:
        """Write a checkpoint."""
        self.buffer.dumps(self.folder / "checkpoint")


class OursPadded(Ours):
    """The same, sampled in TorchRL's padded layout."""

    def __init__(self, count: int, folder: Path):
        super().__init__(count, folder, padded=True)


class OursUnchecked(Ours):
    """The same, without a look at the digests of what is sampled: the work that the others do, too."""

    def __init__(self, count: int, folder: Path):
        super().__init__(count, folder, checked=False)


class OursMapped(Ours):
    """The same, in memory-mapped files with a journal."""

    def __init__(self, count: int, folder: Path):
        super().__init__(count, folder, path=folder / "store")


class LazyStack:
    """TorchRL's storage for uneven data: a list of TensorDicts."""

    def __init__(self, count: int, folder: Path):
        self.buffer = ReplayBuffer(storage=LazyStackStorage(count), batch_size=BATCH)
        self.folder = folder

    def append(self, group: list[Response]) -> None:
        """Store a group."""
        self.buffer.extend(
            lazy_stack(
                [
                    TensorDict({k: torch.as_tensor(v) for k, v in _flat(response).items()})
                    for response in group
                ]
            )
        )

    def sample(self) -> Any:
        """Draw 256 responses."""
        rows = self.buffer.sample()
        names = list(rows.keys())
        return {name: rows.get(name, as_padded_tensor=name in TOKEN_NAMES) for name in names}

    def save(self) -> None:
        """Write a checkpoint."""
        torch.save(self.buffer.state_dict(), self.folder / "checkpoint.pt")


class PaddedTensor:
    """TorchRL's dense storage, every response padded to the longest."""

    def __init__(self, count: int, folder: Path):
        self.buffer = ReplayBuffer(storage=self.make_storage(count, folder), batch_size=BATCH)
        self.folder = folder

    def make_storage(self, count: int, folder: Path) -> Any:
        """Make the storage."""
        return LazyTensorStorage(count)

    def append(self, group: list[Response]) -> None:
        """Store a group."""
        rows = [_flat(response) for response in group]
        fields = {}
        for name, value in rows[0].items():
            if name in TOKEN_NAMES:
                dense = value.new_zeros((len(rows), LONGEST))
                for row, response in enumerate(rows):
                    dense[row, : len(response[name])] = response[name]
                fields[name] = dense
            else:
                fields[name] = torch.stack([torch.as_tensor(response[name]) for response in rows])
        self.buffer.extend(TensorDict(fields, batch_size=[len(rows)]))

    def sample(self) -> Any:
        """Draw 256 responses."""
        return self.buffer.sample()

    def save(self) -> None:
        """Write a checkpoint."""
        self.buffer.dumps(self.folder / "checkpoint")


class PaddedMapped(PaddedTensor):
    """The same in memory-mapped files."""

    def make_storage(self, count: int, folder: Path) -> Any:
        """Make the storage."""
        return LazyMemmapStorage(count, scratch_dir=folder / "scratch")


class ListOfDicts:
    """What people write themselves."""

    def __init__(self, count: int, folder: Path):
        self.rows: list[Response] = []
        self.generator = np.random.default_rng(0)
        self.folder = folder

    def append(self, group: list[Response]) -> None:
        """Store a group."""
        self.rows += [_flat(response) for response in group]

    def sample(self) -> Any:
        """Draw 256 responses."""
        rows = [self.rows[row] for row in self.generator.integers(len(self.rows), size=BATCH)]
        lengths = torch.tensor([len(row["token_ids"]) for row in rows])
        batch = {"cu_seqlens": torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])}
        for name in rows[0]:
            values = [row[name] for row in rows]
            if name in TOKEN_NAMES:
                batch[name] = torch.cat(values)
            else:
                batch[name] = torch.stack(values) if name == "digest" else torch.tensor(values)
        return batch

    def save(self) -> None:
        """Write a checkpoint."""
        torch.save(self.rows, self.folder / "checkpoint.pt")


CONTENDERS: dict[str, Callable[[int, Path], Any]] = {
    "ours, packed": Ours,
    "ours, packed, digests unchecked": OursUnchecked,
    "ours, to padded": OursPadded,
    "ours, memory-mapped": OursMapped,
    "LazyStackStorage, to padded": LazyStack,
    "LazyTensorStorage, padded": PaddedTensor,
    "LazyMemmapStorage, padded": PaddedMapped,
    "list of dicts, to packed": ListOfDicts,
}


def resident_bytes() -> int:
    """Resident memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def measure(name: str, count: int) -> dict[str, float]:
    """Measure one buffer; runs in a process of its own."""
    torch.set_num_threads(1)
    logging.getLogger("torchrl").setLevel(logging.WARNING)
    folder = Path(tempfile.mkdtemp(prefix="rzero-buffers-"))
    try:
        warm = CONTENDERS[name](512, folder / "warm")
        (folder / "warm").mkdir(exist_ok=True)
        for group in groups(512, seed=1):
            warm.append(group)
        warm.sample()
        del warm
        gc.collect()
        before = resident_bytes()
        buffer = CONTENDERS[name](count, folder)
        tokens, seconds = 0, 0.0
        for group in groups(count):
            tokens += sum(len(response["token_ids"]) for response in group)
            begin = time.process_time()
            buffer.append(group)
            seconds += time.process_time() - begin
        del group
        gc.collect()
        resident = resident_bytes() - before
        begin = time.perf_counter()
        buffer.save()
        saved = time.perf_counter() - begin
        size = sum(f.stat().st_size for f in folder.rglob("*") if f.is_file() and "checkpoint" in str(f))
        samples = []
        for _ in range(count // BATCH - 1):
            begin = time.process_time()
            buffer.sample()
            samples.append(time.process_time() - begin)
        return {
            "appends": count / seconds,
            "sample_ms": 1e3 * median(samples),
            "resident_mb": resident / 1e6,
            "resident_ratio": resident / (tokens * TOKEN_BYTES),
            "save_s": saved,
            "save_mb": size / 1e6,
        }
    finally:
        shutil.rmtree(folder)


def measure_updates(name: str, count: int) -> float:
    """Append whole updates of 256 mappings: responses a second."""
    torch.set_num_threads(1)
    return _append_rate(name, [response for group in groups(count) for response in group])


def measure_packed(count: int) -> float:
    """Append whole updates that a collector has packed already: responses a second."""
    torch.set_num_threads(1)
    every = [response for group in groups(count) for response in group]
    batches = [pack_fields(every[first : first + BATCH]) for first in range(0, count, BATCH)]
    buffer = Ours(count, Path()).buffer
    begin = time.process_time()
    for batch in batches:
        buffer.extend(batch)
    return count / (time.process_time() - begin)


def _append_rate(name: str, responses: list[Response]) -> float:
    logging.getLogger("torchrl").setLevel(logging.WARNING)
    with tempfile.TemporaryDirectory(prefix="rzero-buffers-") as folder:
        (Path(folder) / "warm").mkdir()
        CONTENDERS[name](BATCH, Path(folder) / "warm").append(responses[:BATCH])
        buffer = CONTENDERS[name](len(responses), Path(folder))
        begin = time.process_time()
        for first in range(0, len(responses), BATCH):
            buffer.append(responses[first : first + BATCH])
        return len(responses) / (time.process_time() - begin)


def compare(count: int, *, rounds: int) -> dict[str, dict[str, float]]:
    """Measure every buffer, round after round; keep the best of each column, print it and how we stand."""
    results: dict[str, dict[str, float]] = {}
    packed_rate = 0.0
    for _ in range(rounds):
        for name in CONTENDERS:
            row = in_process(measure, name, count)
            row["appends_by_update"] = in_process(measure_updates, name, count)
            known = results.setdefault(name, row)
            results[name] = {
                key: (max if "appends" in key else min)(value, known[key]) for key, value in row.items()
            }
        packed_rate = max(packed_rate, in_process(measure_packed, count))
    print(f"{count:,} responses of 50 to {LONGEST:,} tokens, 6 token fields, groups of {GROUP}\n")
    print("| buffer | appends/s by 16 | by 256 | ms a sample of 256 | resident MB | of raw | save s | MB |")
    print("|---|--:|--:|--:|--:|--:|--:|--:|")
    for name, row in results.items():
        print(
            f"| {name} | {row['appends']:,.0f} | {row['appends_by_update']:,.0f} | {row['sample_ms']:.2f} | "
            f"{row['resident_mb']:.0f} | {row['resident_ratio']:.2f}x | "
            f"{row['save_s']:.2f} | {row['save_mb']:.0f} |"
        )
    stand(results, packed_rate=packed_rate)
    return results


def stand(results: dict[str, dict[str, float]], *, packed_rate: float) -> None:
    """Print how we stand to LazyStackStorage, to the raw tokens and to the best of the others."""
    ours, lazy = results["ours, packed"], results["LazyStackStorage, to padded"]
    print("\n| ours | is | target |\n|---|--:|--:|")
    for key, unit in (("appends", "group"), ("appends_by_update", "update")):
        print(f"| appends by the {unit}, of LazyStackStorage's | {ours[key] / lazy[key]:.1f}x | 7x |")
    packed_ratio = packed_rate / lazy["appends_by_update"]
    print(f"| appends of packed updates ({packed_rate:,.0f}/s), of its mappings | {packed_ratio:.1f}x | |")
    for name in ("ours, packed", "ours, to padded"):
        ratio = lazy["sample_ms"] / results[name]["sample_ms"]
        print(f"| sampling {name.removeprefix('ours, ')}, of its padded sampling | {ratio:.1f}x | 5x |")
    raw_mb = ours["resident_mb"] / ours["resident_ratio"]
    print(f"| resident, of the raw tokens | {ours['resident_ratio']:.2f}x | 1.2x |")
    print(f"| checkpoint, of the raw tokens | {ours['save_mb'] / raw_mb:.2f}x | 1.2x |")
    others = [row for name, row in results.items() if not name.startswith("ours")]
    for key, unit in (
        ("sample_ms", "ms a sample"),
        ("resident_mb", "MB resident"),
        ("save_s", "s to save"),
        ("save_mb", "MB saved"),
    ):
        print(f"| {unit} | {ours[key]:.2f} | best of the others {min(row[key] for row in others):.2f} |")


def measure_growth(count: int) -> dict[str, float]:
    """Sample 256 of ``count`` short responses, topping up after each sample; runs in a process of its own."""
    torch.set_num_threads(1)
    generator = np.random.default_rng(0)
    template = pack_fields([_short(_response(uid, generator)) for uid in range(BATCH)])
    result = {}
    for name, sampler in (("random", RandomGroupSampler(seed=0)), ("fifo", FifoGroupSampler())):
        buffer = ProvenanceReplayBuffer(
            storage=TokenLogStorage(),
            group_size=GROUP,
            groups_per_batch=BATCH // GROUP,
            capacity_updates=count // BATCH + 2,
            sampler=sampler,
        )
        written = 0

        def top_up(buffer=buffer) -> float:
            nonlocal written
            batch = template.clone()
            batch.uid += written
            batch.group_id += written // GROUP
            written += BATCH
            begin = time.process_time()
            buffer.extend(batch)
            return time.process_time() - begin

        appends = [top_up() for _ in range(-(-count // BATCH))]
        samples = []
        for _ in range(40):
            begin = time.process_time()
            buffer.sample(timeout=0)
            samples.append(time.process_time() - begin)
            top_up()
        result[f"{name}_sample_ms"] = 1e3 * median(samples)
        result[f"{name}_append_us"] = 1e6 * median(appends[-40:]) / BATCH
        del buffer, top_up
        gc.collect()
    return result


def _short(response: Response) -> Response:
    """Cut a response to a tenth, so that a million of them fit into memory."""
    length = max(21, len(response["token_ids"]) // 10)
    cut = {name: value[:length] for name, value in response.items() if name in ("token_ids", "response_mask")}
    cut |= {name: response[name][:length] for name in ("behavior_log_probs", "policy_version")}
    digest = provenance_digest(cut["token_ids"], cut["behavior_log_probs"], cut["policy_version"])
    rest = {name: value for name, value in response.items() if name != "extras"}
    return {**rest, **cut, "digest": digest, "response_length": length - response["prompt_length"]}


def curve(largest: int) -> list[dict[str, float]]:
    """Measure sampling against what is stored, and print it."""
    print("\n| stored | ms a sample of 256, random | first in first out | us an append, random | fifo |")
    print("|--:|--:|--:|--:|--:|")
    rows = []
    count = 1_000
    while count <= largest:
        row = in_process(measure_growth, count)
        rows.append({"stored": count, **row})
        print(
            f"| {count:,} | {row['random_sample_ms']:.2f} | {row['fifo_sample_ms']:.2f} | "
            f"{row['random_append_us']:.1f} | {row['fifo_append_us']:.1f} |",
            flush=True,
        )
        count *= 10
    return rows


def in_process(function: Callable[..., Any], *arguments: Any) -> Any:
    """Run a function in a fresh process and return what it returns."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure replay buffers side by side.")
    parser.add_argument("--quick", action="store_true", help="a tenth of the responses")
    parser.add_argument("--rounds", type=int, default=3, help="of the comparison; the best one counts")
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    options = parser.parse_args()
    results = compare(1_024 if options.quick else 10_000 // BATCH * BATCH, rounds=options.rounds)
    rows = curve(100_000 if options.quick else 1_000_000)
    if options.json:
        options.json.write_text(
            json.dumps({"argv": sys.argv, "comparison": results, "curve": rows}, indent=1)
        )


if __name__ == "__main__":
    main()
