"""The dict that drops its oldest entries."""

from p2ptrain.base.bounded import BoundedDict


def test_the_entries_written_last_are_kept():
    letters: BoundedDict[str, int] = BoundedDict(2)
    for number, letter in enumerate("abc"):
        letters[letter] = number
    assert list(letters.items()) == [("b", 1), ("c", 2)]


def test_a_write_renews_an_entry_and_a_read_does_not():
    letters: BoundedDict[str, int] = BoundedDict(2)
    letters["a"], letters["b"] = 1, 2
    letters["a"] = 3
    assert letters["b"] == 2
    letters["c"] = 4
    assert letters == {"a": 3, "c": 4}


def test_a_changed_value_does_not_renew_its_entry():
    letters: BoundedDict[str, list[int]] = BoundedDict(2)
    letters["a"], letters["b"] = [], []
    letters["a"].append(1)
    letters["c"] = []
    assert list(letters) == ["b", "c"]


def test_removed_entries_make_room():
    letters: BoundedDict[str, int] = BoundedDict(2)
    letters["a"], letters["b"] = 1, 2
    del letters["a"]
    letters["c"] = 3
    assert list(letters) == ["b", "c"]
    letters.clear()
    assert not letters
