"""Rows keep their place until they are removed, and places are used again."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from rzero.buffers.row_table import ROW_DTYPE, RowTable


def rows(uids):
    made = np.zeros(len(uids), ROW_DTYPE)
    made["uid"] = uids
    return made


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 7), st.integers(0, 5), st.randoms(use_true_random=False)), max_size=25)
)
def test_it_behaves_like_a_dict_of_places(steps):
    table, model, uid = RowTable(), {}, 0
    for insert, remove, random in steps:
        expected = table.next_places(insert)
        places = table.insert(rows(range(uid, uid + insert)))
        assert places.tolist() == expected.tolist()
        assert not set(places.tolist()) & model.keys()
        model |= dict(zip(places.tolist(), range(uid, uid + insert), strict=True))
        uid += insert
        gone = random.sample(sorted(model), min(remove, len(model)))
        table.remove(np.array(gone, np.int64))
        for place in gone:
            del model[place]
        assert len(table) == len(model)
        assert table.places().tolist() == sorted(model)
        assert table[table.places()]["uid"].tolist() == [model[place] for place in sorted(model)]
        probes = np.arange(-1, uid + 2)
        assert table.has(probes).tolist() == [place in model for place in probes]


def test_places_are_used_again():
    table = RowTable()
    table.insert(rows(range(3000)))
    table.remove(np.arange(1000, 2000))
    assert sorted(table.insert(rows(range(500))).tolist()) == list(range(1500, 2000))
    assert table.insert(rows(range(501))).max() == 3000
