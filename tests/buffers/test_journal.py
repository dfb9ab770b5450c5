"""A journal loses nothing that was acknowledged, and tells a torn end from damage."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rzero.buffers.codec import decode, encode
from rzero.buffers.journal import Journal, JournalError
from tests.buffers.responses import full_disk


def record(number):
    return encode({"n": np.arange(number)}, {"number": number})


def read(path):
    journal = Journal(path)
    found = [decode(bytes(payload))[1]["number"] for payload in journal.records()]
    return found, journal


def write(path, numbers):
    journal = Journal(path)
    list(journal.records())
    ends = []
    for number in numbers:
        journal.append(record(number))
        ends.append(path.stat().st_size)
    journal.close()
    return ends


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_journal_cut_anywhere_keeps_every_whole_record(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("journal") / "journal.bin"
    ends = write(path, range(5))
    cut = data.draw(st.integers(0, ends[-1]))
    with open(path, "r+b") as file:
        file.truncate(cut)
    found, journal = read(path)
    whole = [number for number, end in enumerate(ends) if end <= cut]
    assert found == whole
    assert journal.torn_bytes == cut - max([end for end in ends if end <= cut], default=0)
    journal.append(record(9))  # What is written next does not follow a torn record.
    journal.close()
    assert read(path)[0] == [*whole, 9]


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_damage_is_an_error_and_not_an_end(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("journal") / "journal.bin"
    ends = write(path, range(1, 6))
    content = bytearray(path.read_bytes())
    place = data.draw(st.integers(0, len(content) - 1))
    content[place] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(content)
    start = max([0, *(end for end in ends if end <= place)])
    with pytest.raises(JournalError, match=f"the record at byte {start} of journal.bin is corrupt"):
        read(path)


def test_one_record_takes_the_place_of_all(tmp_path):
    path = tmp_path / "journal.bin"
    write(path, range(3))
    journal = Journal(path)
    journal.replace(record(7))
    journal.append(record(8))
    assert journal.num_bytes == path.stat().st_size
    journal.close()
    assert read(path)[0] == [7, 8]
    assert [file.name for file in tmp_path.iterdir()] == ["journal.bin"]


def test_a_record_that_the_disk_refuses_leaves_no_trace(tmp_path):
    path = tmp_path / "journal.bin"
    journal = Journal(path)
    journal.append(record(1))
    size = path.stat().st_size
    for write in (journal.append, journal.replace):
        with full_disk(size + 100), pytest.raises(OSError, match="File too large"):
            write(record(1000))
        assert path.stat().st_size == journal.num_bytes == size
    journal.append(record(2))
    journal.close()
    assert read(path)[0] == [1, 2]
    assert [file.name for file in tmp_path.iterdir()] == ["journal.bin"]
