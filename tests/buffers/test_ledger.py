"""The book balances after every entry, and refuses what would unbalance it."""

import numpy as np
import pytest

from rzero.buffers.ledger import Ledger
from rzero.buffers.row_table import ROW_DTYPE


def rows(*triples, version=3):
    """Rows of (uid, group, sample index)."""
    made = np.zeros(len(triples), ROW_DTYPE)
    made["uid"], made["group_id"], made["sample_index"] = np.array(triples).T
    made["version"], made["prompt_id"] = version, made["group_id"]
    return made


def admit(ledger, *triples, **options):
    new = rows(*triples, **options)
    ledger.check_admit(new)
    return ledger.admit(new, [triple[0] for triple in triples], now=0.0)


def counts(ledger):
    parts = ledger.running, ledger.stored, ledger.consumed, ledger.evicted.total(), ledger.failed.total()
    assert ledger.submitted == sum(parts)
    return parts


def test_every_response_is_in_one_place():
    ledger = Ledger(2)
    ledger.reserve(7, now=1.0)
    assert counts(ledger) == (2, 0, 0, 0, 0)
    assert admit(ledger, (0, 7, 0)) == []
    assert counts(ledger) == (1, 1, 0, 0, 0)
    assert [group.group_id for group in admit(ledger, (1, 7, 1))] == [7]
    assert counts(ledger) == (0, 2, 0, 0, 0)
    assert ledger.lease([7]) == [0, 1]
    assert counts(ledger) == (0, 2, 0, 0, 0)
    assert [group.group_id for group in ledger.give_back([7])] == [7]
    ledger.lease([7])
    assert ledger.consume([7]) == [0, 1]
    assert counts(ledger) == (0, 0, 2, 0, 0)

    admit(ledger, (2, 8, 0))  # never reserved: the first response opens the group
    assert counts(ledger) == (1, 1, 2, 0, 0)
    assert ledger.fail(8, "lost") == [2]
    assert counts(ledger) == (0, 0, 2, 1, 1)
    admit(ledger, (3, 9, 0), (4, 9, 1))
    assert ledger.evict([9], "stale") == [3, 4]
    assert counts(ledger) == (0, 0, 2, 3, 1)
    assert ledger.evicted == {"lost": 1, "stale": 2}
    assert ledger.failed == {"lost": 1}
    assert ledger.admitted == 5


def test_the_oldest_token_speaks_for_the_group():
    ledger = Ledger(2)
    admit(ledger, (0, 7, 0), version=5)
    (ready,) = admit(ledger, (1, 7, 1), version=2)
    assert ready.version == 2


@pytest.mark.parametrize(
    ("triples", "message"),
    [
        ([(0, 5, 0)], "uid must be new, got 0 a second time"),
        ([(9, 5, 0), (9, 5, 1)], "uids must differ"),
        ([(9, 1, 0)], "group 1 is complete with 2 responses and takes no more"),
        ([(9, 2, 1)], "group 2 was closed and takes no more"),
        ([(9, 3, 0)], "group 3 must have each sample_index below 2 once, got 0"),
        ([(9, 3, 2)], "group 3 must have each sample_index below 2 once, got 2"),
        ([(9, 5, 0), (10, 5, 1), (11, 5, 0)], "group 5 must have each sample_index below 2 once, got 0"),
    ],
)
def test_what_would_unbalance_it_is_refused(triples, message):
    ledger = Ledger(2)
    admit(ledger, (0, 1, 0), (1, 1, 1), (2, 2, 0), (3, 3, 0))
    ledger.fail(2, "lost")
    before = counts(ledger)
    with pytest.raises(ValueError, match=message):
        admit(ledger, *triples)
    assert counts(ledger) == before


def test_a_group_is_of_one_prompt():
    ledger = Ledger(2)
    admit(ledger, (0, 1, 0))
    other = rows((1, 1, 1))
    other["prompt_id"] = 5
    with pytest.raises(ValueError, match="group 1 must be of prompt 1, got prompt 5"):
        ledger.check_admit(other)


def test_a_closed_group_never_opens_again():
    ledger = Ledger(1)
    admit(ledger, (0, 1, 0), (1, 2, 0), (2, 3, 0))
    ledger.lease([1])
    ledger.consume([1])
    ledger.evict([2], "stale")
    ledger.reserve(4, now=0.0)
    ledger.fail(4, "lost")
    for group_id in (1, 2, 3, 4, -1):
        with pytest.raises(ValueError, match=f"group_id must be new and >= 0, got {group_id}"):
            ledger.check_reserve(group_id, 1)
    with pytest.raises(ValueError, match="size must be group_size 1, got 2"):
        ledger.check_reserve(9, 2)


@pytest.mark.parametrize(
    ("kind", "groups"),
    [("consume", [1]), ("consume", [9]), ("evict", [3]), ("evict", [1, 1]), ("fail", [1]), ("fail", [9])],
)
def test_a_group_is_closed_only_from_where_it_is(kind, groups):
    ledger = Ledger(1)
    admit(ledger, (0, 1, 0))
    ledger.reserve(3, now=0.0)
    with pytest.raises(ValueError, match=kind):
        ledger.check_close(kind, groups)


def test_it_comes_back_whole():
    ledger = Ledger(2)
    admit(ledger, (0, 1, 0), (1, 1, 1), (2, 2, 0), (3, 2, 1), (4, 3, 0))
    admit(ledger, (5, 4, 0), (6, 4, 1))
    ledger.reserve(5, now=0.0)
    ledger.evict([1], "stale")
    ledger.lease([2])
    arrays, note = ledger.to_arrays()

    again = Ledger(2)
    stored = rows((5, 4, 0), (2, 2, 0), (6, 4, 1), (3, 2, 1), (4, 3, 0))  # in any order
    again.restore(arrays, note, stored, [5, 2, 6, 3, 4], now=0.0)
    assert counts(again) == counts(ledger)
    assert [group.group_id for group in again.ready_groups()] == [
        2,
        4,
    ]  # a lease does not outlive its process
    assert list(again.open) == [3, 5]
    assert again.open[3].indices == {0}
    with pytest.raises(ValueError, match="a second time"):
        admit(again, (0, 9, 0))
    with pytest.raises(ValueError, match="must be new"):
        again.check_reserve(1, 2)
    assert again.admit(rows((7, 3, 1)), [7], now=0.0)[0].sequence == 3  # after the three that were complete
