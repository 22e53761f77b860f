"""Several peers that a cut keeps apart from the others while both sides train on, and identities that nobody knows."""

from __future__ import annotations

import pytest
from run_rules import run_rules
from table import Table

from p2ptrain.base.ids import PeerId
from p2ptrain.swarm import Terms
from p2ptrain.swarm.partners import own_terms
from p2ptrain.swarm.progress import progress_displacement
from p2ptrain.swarm.rules import OUT_OF_STEP_S, ProgressBounds

RULES = run_rules(run_tokens=12_000.0)
BEYOND = ProgressBounds(RULES).implausible_distance


def apart(majority: int, minority: int, gap: float, slow: int = 4) -> tuple[Table, list[str], list[str]]:
    """Return a table whose second part made a step of four while a cut kept the parts ``gap`` tokens apart."""
    most, few = ([f"{part} {number}" for number in range(count)] for part, count in (("m", majority), ("p", minority)))
    table = Table(*most, *few, rules=RULES)
    table.start()
    table.run(3.0)
    for _ in range(5):
        table.step()
        table.run(2.0)
    table.holds_back = lambda sender, receiver, what: sender[0] != receiver[0]
    count = 0
    while table[most[0]].progress - table[few[0]].progress < gap:
        count += 1
        table.step(*most, *(few if count % slow == 0 else ()))
        table.run(2.0)
    table.holds_back = lambda sender, receiver, what: False
    table.trace.clear()
    return table, most, few


def go_on(table: Table, seconds: float) -> None:
    for _ in range(int(seconds / 2.0)):
        table.step()
        table.run(2.0)


@pytest.mark.parametrize(("majority", "minority"), [(3, 2), (6, 2), (10, 3)])
def test_a_minority_that_was_cut_off_takes_the_weights_of_the_others(majority: int, minority: int):
    table, most, few = apart(majority, minority, gap=1.2 * BEYOND)
    go_on(table, 2 * OUT_OF_STEP_S)
    assert all(table[name].core.counters.pulls >= 1 for name in few)
    assert all(table[name].core.counters.pulls == 0 for name in most)
    table.trace.clear()
    go_on(table, 20.0)
    assert not [line for line in table.trace if "implausible" in line]
    furthest = max(seat.progress for seat in table.seats.values())
    assert all(seat.core.settled and seat.progress > 0.8 * furthest for seat in table.seats.values())


def test_a_majority_far_ahead_whose_weights_do_worse_gives_none():
    """Identities cost nothing: as many as there are honest peers may claim to be far ahead."""
    table, most, few = apart(majority=3, minority=2, gap=1.2 * BEYOND)
    table.worthless = {PeerId(name) for name in most}
    go_on(table, 2 * OUT_OF_STEP_S)
    before = [table[name].core.counters.exchanges_ok for name in few]
    go_on(table, 2 * OUT_OF_STEP_S)
    assert [line for line in table.trace if "its weights do worse than ours" in line]
    assert all(table[name].core.counters.pulls == 0 for name in few)
    assert all(table[name].core.counters.exchanges_ok > count + 5 for name, count in zip(few, before, strict=True))


def test_two_far_ahead_do_not_take_three_with_them():
    table, most, few = apart(majority=2, minority=3, gap=1.2 * BEYOND)
    go_on(table, 2 * OUT_OF_STEP_S)
    assert all(table[name].core.counters.pulls == 0 for name in (*most, *few))


def test_a_stream_of_fresh_identities_lowers_nobody():
    """Check newcomers that nobody has counted before, or only just."""
    table = Table("amber", "birch")
    table.start()
    for _ in range(10):
        table.step()
        table.run(2.0)
    core = table["amber"].core._core
    for number in range(100):
        peer = PeerId(f"fresh {number}")
        fresh = Terms(5, 0.0, 1.0, float("inf"), False, core.state)
        assert progress_displacement(own_terms(core, peer), fresh, 1, core.rules) == 0.0
        core.members.hear(peer, core.state, 5, 0.0, table.now, False)
        core.count_peers(table.now)
        assert progress_displacement(own_terms(core, peer), fresh, 1, core.rules) == 0.0
