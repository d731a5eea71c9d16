"""The turning-point rules against a scalar reading of the definitions, over every sign pattern, and their
invariances."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from algos.tp_grpo import balance, incremental_rewards, step_rewards, turning_points

PATTERNS = [torch.tensor(list(itertools.product([-1.0, 0.0, 1.0], repeat=n + 1))) for n in range(1, 7)]
dyadic = st.integers(-64, 64).map(lambda i: i / 16)  # sums of these are exact
sequences = st.integers(1, 6).flatmap(lambda n: st.lists(dyadic, min_size=n + 1, max_size=n + 1))


def sign(value, tolerance=0.0):
    return 0 if abs(value) <= tolerance else (1 if value > 0 else -1)


def literal_turning_points(r, rule, tolerance=0.0):
    """Definitions 4.1 and 5.1 word by word, for one sequence r[0..n]; step j = 1 .. n."""
    n = len(r) - 1
    s = {j: sign(r[j] - r[j - 1], tolerance) * sign(r[n] - r[0], tolerance) for j in range(1, n + 1)}
    points = []
    for j in range(1, n + 1):
        continues = sign(r[j] - r[j - 1], tolerance) * sign(r[n] - r[j], tolerance) > 0
        if rule == "trend":
            points.append(s[1] > 0 if j == 1 else s[j - 1] < 0 and s[j] > 0)
        else:
            points.append(continues if j == 1 else s[j - 1] < 0 and s[j] > 0 and continues)
    return points


@pytest.mark.parametrize("rule", ["consistent", "trend"])
def test_turning_points_are_the_definitions_on_every_sign_pattern(rule):
    for R in PATTERNS:
        expected = torch.tensor([literal_turning_points(r.tolist(), rule) for r in R])
        assert torch.equal(turning_points(R, rule), expected)
    assert torch.equal(
        turning_points(R.view(3, -1, 7), rule), expected.view(3, -1, 6)
    )  # any leading dimensions


@given(sequences, st.sampled_from(["consistent", "trend"]), st.sampled_from([0.0, 0.5]))
def test_turning_points_are_the_definitions_on_drawn_sequences(r, rule, tolerance):
    expected = literal_turning_points(r, rule, tolerance)
    assert turning_points(torch.tensor(r, dtype=torch.float64), rule, tolerance).tolist() == expected


def test_last_step_is_never_a_consistent_turning_point():
    for R in PATTERNS:
        assert not turning_points(R, "consistent")[..., -1].any()
    assert turning_points(PATTERNS[-1], "trend")[..., -1].any()


@given(sequences)
def test_consistent_turning_points_award_more_than_their_step(r):
    R = torch.tensor(r, dtype=torch.float64)
    points = turning_points(R)
    award, change = (R[-1] - R[:-1])[points], incremental_rewards(R)[points]
    assert (award.abs() > change.abs()).all() and (award.sign() == change.sign()).all()


@given(sequences)
def test_increments_telescope(r):
    R = torch.tensor(r, dtype=torch.float64)
    d = incremental_rewards(R)
    assert d.tolist() == [b - a for a, b in zip(r, r[1:], strict=False)] and d.sum() == R[-1] - R[0]


@given(sequences, st.sampled_from(["consistent", "trend"]), st.sampled_from([0.25, 2.0, 8.0]), dyadic)
def test_step_rewards_shift_scale_and_mirror(r, rule, scale, shift):
    R = torch.tensor(r, dtype=torch.float64)
    rewards = step_rewards(R, rule)
    assert torch.equal(step_rewards(R + shift, rule), rewards)
    assert torch.equal(step_rewards(scale * R, rule), scale * rewards)
    assert torch.equal(step_rewards(-R, rule), -rewards)


def test_step_rewards_by_hand():
    """Up, down, then up for good: steps 1 and 3 turn to the final direction."""
    R = torch.tensor([0.0, 0.5, 0.25, 0.75, 1.0])
    assert turning_points(R).tolist() == [True, False, True, False]
    assert step_rewards(R).tolist() == [1.0, -0.25, 0.75, 0.25]
    assert turning_points(R, "trend").tolist() == [True, False, True, False]
    falls = torch.tensor(
        [0.0, 0.5, 0.25, 1.0, 0.75]
    )  # the step to 1.0 is not continued: only the trend rule takes it
    assert turning_points(falls).tolist() == [True, False, False, False]
    assert turning_points(falls, "trend").tolist() == [True, False, True, False]
    assert step_rewards(falls, "trend").tolist() == [0.75, -0.25, 0.5, -0.25]


def literal_balance(mask, award):
    """App. D by exhaustive ranking: (keep, drop) for a flat list; ties keep the earlier."""
    positive = [i for i, m in enumerate(mask) if m and award[i] > 0]
    negative = [i for i, m in enumerate(mask) if m and award[i] < 0]
    if not positive or not negative:
        return list(mask)
    keep = min(len(positive), len(negative))
    dropped = [
        i for side in (positive, negative) for i in sorted(side, key=lambda i: (-abs(award[i]), i))[keep:]
    ]
    return [m and i not in dropped for i, m in enumerate(mask)]


@given(st.lists(st.tuples(st.booleans(), st.integers(-3, 3)), min_size=1, max_size=12))
def test_balance_keeps_the_largest_awards(entries):
    mask = torch.tensor([m for m, _ in entries])
    award = torch.tensor([float(a) for _, a in entries])
    expected = literal_balance(mask.tolist(), award.tolist())
    assert balance(mask, award).tolist() == expected
    assert balance(mask.view(1, -1, 1), award.view(1, -1, 1)).flatten().tolist() == expected
    square = torch.stack([mask, mask]).T, torch.stack([award, award]).T  # not contiguous in memory
    assert torch.equal(balance(*square), balance(*(t.contiguous() for t in square)))


def test_balance_spans_the_whole_batch_and_the_rest_falls_back():
    up = [0.0, 0.5, 1.0]  # turning point at step 1, awarded +1
    small = [0.0, 0.25, 0.5]  # the same, awarded +0.5
    down = [1.0, 0.5, 0.25]  # awarded -0.75
    R = torch.tensor(
        [[up, small], [down, [0.0, 0.0, 0.0]]]
    )  # (P, G, n+1): groups are balanced against each other
    assert step_rewards(R)[..., 0].tolist() == [[1.0, 0.25], [-0.75, 0.0]]
    assert step_rewards(R, balanced=False)[..., 0].tolist() == [[1.0, 0.5], [-0.75, 0.0]]
    alone = torch.tensor([[up, small]])  # no negative turning point at all: both stay
    assert step_rewards(alone)[..., 0].tolist() == [[1.0, 0.5]]


def test_equal_rewards_have_no_turning_point_and_no_reward():
    R = torch.full((2, 3, 6), 0.3)
    for rule in ("consistent", "trend"):
        assert not turning_points(R, rule).any() and (step_rewards(R, rule) == 0).all()


def test_tolerance_ignores_jitter():
    R = torch.tensor([0.5, 0.5 + 1e-6, 0.5 - 1e-6, 0.5 + 2e-6])
    assert turning_points(R).any() and not turning_points(R, tolerance=1e-5).any()
    turn = torch.tensor([0.0, 0.5, 0.25, 0.75, 1.0])
    assert step_rewards(turn, tolerance=0.3).tolist() == [1.0, -0.25, 0.5, 0.25]  # 0.25 ends no trend


def test_unknown_rule_is_refused():
    with pytest.raises(ValueError, match="""^rule must be "consistent" or "trend", not 'paper'$"""):
        turning_points(torch.zeros(3), "paper")


def test_the_rules_keep_the_dtype():
    R = torch.rand(2, 3, 5, dtype=torch.float64)
    assert step_rewards(R).dtype == torch.float64
    assert_close(step_rewards(R.float()), step_rewards(R).float(), rtol=1e-5, atol=1e-6)
