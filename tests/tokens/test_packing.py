"""Packing of dialogues into rows, and what a row means."""

from __future__ import annotations

import random

import numpy as np

from p2ptrain.tokens.packing import BEGINS, FLAG_BITS, IGNORED, EncodedDialogue, best_fit, decoded_rows, packed_rows


def dialogue(ids: list[int], predicted: list[int]) -> EncodedDialogue:
    return EncodedDialogue(np.array(ids, dtype=np.uint8), np.isin(np.arange(len(ids)), predicted))


def test_the_longest_first_each_where_least_room_remains():
    assert best_fit([3, 5, 2, 4, 6], 8) == [[4, 2], [1, 0], [3]]
    rng = random.Random(1)
    lengths = [rng.randint(1, 100) for _ in range(500)]
    bins = best_fit(lengths, 100)
    assert sorted(item for items in bins for item in items) == list(range(500))
    assert all(sum(lengths[item] for item in items) <= 100 for items in bins)
    assert len(bins) <= 1.03 * sum(lengths) / 100


def test_rows_hold_whole_dialogues_and_say_what_is_predicted():
    found = [dialogue([10, 11, 12], [1, 2]), dialogue([20, 21, 22, 23], [0, 3]), dialogue([30, 31], [1])]
    rows = np.stack(list(packed_rows(found, 6, padding=9)))
    inputs, labels, positions = decoded_rows(rows)
    assert inputs.tolist() == [[10, 11, 12, 9, 9, 9], [20, 21, 22, 23, 30, 31]]
    no = IGNORED
    assert labels.tolist() == [[11, 12, no, no, no, no], [no, no, 23, no, 31, no]]  # never a dialogue's first token
    assert positions.tolist() == [[0, 1, 2, 0, 1, 2], [0, 1, 2, 3, 0, 1]]
    assert {array.dtype for array in (inputs, labels, positions)} == {np.dtype(np.int64)}


def test_codes_are_ids_of_any_size_with_flags():
    big = EncodedDialogue(np.array([200_000, 200_001], dtype=np.uint32), np.array([False, True]))
    (row,) = packed_rows([big], 2, 0)
    assert row.tolist() == [200_000 << FLAG_BITS | BEGINS, 200_001 << FLAG_BITS | 1]
