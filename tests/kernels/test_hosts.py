"""The bits are those of every processor: other vector instructions, other libraries' paths, other days."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rzero.kernels import numeric_contract
from tests.kernels.probe import digests

ROOT = Path(__file__).parents[2]
GOLDEN = json.loads((Path(__file__).parent / "golden_bits.json").read_text())
OTHER_HOSTS = [
    {"ATEN_CPU_CAPABILITY": "default", "MKL_ENABLE_INSTRUCTIONS": "SSE4_2", "MKL_CBWR": "COMPATIBLE"},
    {"ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2", "OMP_NUM_THREADS": "2"},
]


def digests_on(settings: dict[str, str]) -> dict[str, str]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.probe"],
        cwd=ROOT,
        env={**os.environ, **settings},
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def found() -> list[dict[str, str]]:
    return [digests(), *map(digests_on, OTHER_HOSTS)]


def test_every_host_has_the_recorded_bits(found):
    """Recorded on an AMD EPYC with AVX-512. Who changes a bit records anew, and so changes the contract."""
    for host in found:
        assert {name: bits for name, bits in host.items() if "torch's own" not in name} == GOLDEN


def test_torchs_own_ops_show_that_the_hosts_differ(found):
    for op in ("torch's own linear float32", "torch's own silu float32"):
        assert len({host[op] for host in found}) > 1


def test_the_contract_names_the_recorded_bits():
    digest = hashlib.sha256(json.dumps(GOLDEN, sort_keys=True).encode()).hexdigest()
    assert numeric_contract()["bits"] == digest[:16]
