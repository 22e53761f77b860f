"""Recipe dilocox: pseudo-gradients mixed with partners during the next phase and used one phase late."""

from __future__ import annotations

import pytest
import torch
from stored import stored
from test_learner import LINK, TERMS, P, commit, exchange, quadratic

from p2ptrain.base.errors import RemoteError
from p2ptrain.base.telemetry import MemoryLog
from p2ptrain.codec import CodecTerms, LowRankCodec, agree, get, proposal_for, proposal_size
from p2ptrain.host.learner import Learner
from p2ptrain.host.rules import LearnerRules
from p2ptrain.outer.adaptive import RANK_WINDOW
from p2ptrain.outer.fragments import slices
from p2ptrain.outer.step import OuterRule
from p2ptrain.recipes import RECIPES
from sim.lockstep.lockstep import Lockstep, LockstepRules
from sim.step_times import effective_rank

H, RULE = 4, OuterRule(0.7, 0.5)
BOTH_STREAMS = (0, 1, 2, 3)
RANK = 8


def learner(seed: int = 0, gradients=None, noise: float = 0.1, inner_steps: int = H) -> Learner:
    rules = LearnerRules(inner_steps, 1e9, RULE, RECIPES["dilocox"])
    pieces = slices(P, 2)
    return Learner(quadratic(seed, noise), rules, pieces, get("fp32"), MemoryLog(), gradient_codec=gradients)


def phase(*learners: Learner) -> None:
    for each in learners:
        step = each.step
        while each.step == step:
            each.advance()


def lockstep(tasks, recipe: str = "dilocox") -> Lockstep:
    return Lockstep(
        tasks,
        LockstepRules(RECIPES[recipe], RULE, H, "complete"),
        lambda progress: [task.inner_step(progress).loss for task in tasks],
        1.0,
    )


def test_a_pair_does_what_lockstep_does_with_the_average_of_all():
    one, other = learner(1), learner(2)
    expected = lockstep([quadratic(1), quadratic(2)], "dilocox_global")
    for _ in range(6):
        phase(one, other)
        expected.outer_step()
        exchange(one, other, BOTH_STREAMS)
    for each, row in zip((one, other), expected.slow, strict=True):
        torch.testing.assert_close(each.slow, row, rtol=0, atol=2e-5)


def test_alone_a_peer_steps_by_its_own_pseudo_gradient_of_the_phase_before():
    one, expected = learner(1), lockstep([quadratic(1)])
    start = one.slow
    phase(one)
    expected.outer_step()
    assert torch.equal(one.slow, start), "there is no average yet"
    for _ in range(3):
        phase(one)
        expected.outer_step()
    torch.testing.assert_close(one.slow, expected.slow[0], rtol=0, atol=2e-5)


def test_a_second_exchange_in_a_phase_sends_what_the_first_one_mixed():
    peers = [learner(seed) for seed in (1, 2, 3)]
    phase(*peers)
    exchange(peers[0], peers[1], BOTH_STREAMS)
    for each in peers[:2]:
        each.settle()
    exchange(peers[1], peers[2], BOTH_STREAMS)
    for each in peers:
        each.settle()
    late = [torch.cat(each.payloads.published.parts[2:]) for each in peers]
    own = [torch.cat([piece.late[f] for f in range(2)]) for piece in (each.state for each in peers)]
    for shown, kept in zip(late, own, strict=True):
        assert torch.equal(shown, kept)
    torch.testing.assert_close(late[1], late[2])
    assert not torch.allclose(late[0], late[1])


def test_an_exchange_that_comes_after_the_next_outer_step_moves_no_late_gradient():
    one, other = learner(1), learner(2)
    phase(one, other)
    encoded = one.payloads.encode(BOTH_STREAMS), other.payloads.encode(BOTH_STREAMS)
    found = one.payloads.difference(encoded[0], encoded[1].parts)
    phase(one)
    before = [part.clone() for part in one.state.late]
    terms = one.payloads  # delivered one phase too late
    assert terms.published.step == 2
    one.inbox.deliver(commit(TERMS, TERMS), found)
    one.settle()
    assert all(torch.equal(part, was) for part, was in zip(one.state.late, before, strict=True))


@pytest.mark.parametrize("adaptive", [False, True])
def test_a_resumed_peer_goes_on_as_if_never_stopped(adaptive):
    def make() -> Learner:
        return learner(4, LowRankCodec(RANK, adaptive))

    steady, other = make(), make()
    for _ in range(2 * RANK_WINDOW + 2):
        phase(steady, other)
        exchange(steady, other, BOTH_STREAMS)
    steady.advance()
    tensors, numbers = stored(steady)
    resumed = make()
    resumed.load_state_dict(tensors, numbers)
    assert resumed.payloads.rank == steady.payloads.rank
    for _ in range(3 * H):
        assert steady.advance() == resumed.advance()
    assert torch.equal(steady.slow, resumed.slow)
    shown = [torch.cat(each.payloads.published.parts) for each in (steady, resumed)]
    assert torch.equal(*shown)


def test_a_newcomer_forgets_its_own_late_gradient():
    one, donor = learner(1), learner(2)
    phase(one, donor, one)
    one.inbox.adopt(LINK, 5, 20.0, [bytearray(part) for part in donor.payloads.weights()])
    one.settle()
    assert not any(part.any() for part in one.state.late)
    slow = one.slow
    phase(one)
    assert torch.equal(one.slow, slow), "its first step after that has no average yet"


# --- the rank that two partners agree on ------------------------------------------------------------------------------


def test_rank_and_inner_steps_fall_where_the_averages_lose_rank():
    """Check a pseudo-gradient of noise whose rank then falls to that of a few directions."""
    one = learner(1, LowRankCodec(RANK, is_adaptive=True), inner_steps=8)
    task = one.task
    one.advance()
    full = torch.randn(P, generator=torch.Generator().manual_seed(3))
    thin = torch.outer(torch.ones(P // 50), torch.arange(50.0)).reshape(-1)

    def live(direction: torch.Tensor, phases: int) -> list[int]:
        made = []
        for _ in range(phases):
            step, count = one.step, 0
            while one.step == step:
                one.advance()
                task.theta.copy_(one.slow - direction)
                count += 1
            made.append(count)
        return made

    assert set(live(full, 2 * RANK_WINDOW)[1:]) == {8}
    assert one.payloads.rank in (0, RANK)
    made = live(0.2 * thin, 2 * RANK_WINDOW)
    assert 1 <= one.payloads.rank < RANK
    assert made[-1] == max(1, (2 * 8 * one.payloads.rank + RANK) // (2 * RANK))


def test_two_partners_use_the_smaller_rank_and_both_know_its_bytes():
    codec = LowRankCodec(RANK, is_adaptive=True)
    one, other = learner(1, codec), learner(2, codec)
    phase(one, other)
    one.payloads.rank = 3
    shown = [each.payloads.current(BOTH_STREAMS) for each in (one, other)]
    proposals = [
        each.payloads.proposals(BOTH_STREAMS, snapshot) for each, snapshot in zip((one, other), shown, strict=True)
    ]
    assert [len(each) for each in proposals[0]] == one.payloads.proposal_sizes(BOTH_STREAMS) == [0, 0, 2, 2]
    ours = one.payloads.encode(BOTH_STREAMS, *proposals, shown[0])
    theirs = other.payloads.encode(BOTH_STREAMS, *reversed(proposals), shown[1])
    sizes = [len(part) for part in ours.parts]
    assert sizes == [len(part) for part in theirs.parts]
    assert sizes[2:] == [LowRankCodec(3).encoded_size(CodecTerms(len(shown[0].parts[n]))) for n in (2, 3)]
    assert all(small < most for small, most in zip(sizes[2:], one.payloads.encoded_sizes((2, 3)), strict=True))
    differences = one.payloads.difference(ours, theirs.parts), other.payloads.difference(theirs, ours.parts)
    for mine, yours in zip(differences[0].parts, differences[1].parts, strict=True):
        assert torch.equal(mine, -yours)


@pytest.mark.parametrize(
    ("proposal", "why"),
    [
        (b"", "a rank in 0 bytes, not 2"),
        (b"\x01", "a rank in 1 bytes, not 2"),
        (b"\x01\x00\x00", "a rank in 3 bytes, not 2"),
        (b"\x00\x00", "rank 0, but the run allows 1 to 8"),
        (b"\x09\x00", "rank 9, but the run allows 1 to 8"),
        (b"\xff\xff", "rank 65535, but the run allows 1 to 8"),
    ],
)
def test_a_rank_that_no_peer_of_the_run_can_want_is_refused(proposal, why):
    codec = LowRankCodec(RANK, is_adaptive=True)
    mine = proposal_for(codec, b"", torch.zeros(64))
    assert len(mine) == proposal_size(codec, 64) == 2
    with pytest.raises(RemoteError, match=why):
        agree(codec, 64, mine, proposal)


def test_what_a_message_left_out_comes_with_the_next_one():
    """Check that over many phases a partner gets nearly all of what a peer's pseudo-gradients add up to."""
    codec = LowRankCodec(2, is_adaptive=True)
    one, other = learner(1, codec, noise=0.0), learner(1, codec, noise=0.0)
    own, said = torch.zeros(P), torch.zeros(P)
    for _ in range(30):
        phase(one, other)
        own += torch.cat(one.state.late)
        mine = one.payloads.encode((2, 3), *[one.payloads.proposals((2, 3))] * 2)
        said += torch.cat([codec.decode(part, terms) for part, terms in zip(mine.parts, mine.terms, strict=True)])
        exchange(one, other, (2, 3))
        one.settle()
    alone = torch.cat([codec.decode(part, terms) for part, terms in zip(mine.parts, mine.terms, strict=True)])
    assert float((own - said).norm() / own.norm()) < 0.2
    assert effective_rank(alone, CodecTerms(P)) > 0
