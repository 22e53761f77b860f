"""Form of the activations by the rate of the line."""

import pytest

from p2ptrain.train.stage_lines import SPARE, chosen_boundary

TOKENS, WIDTH, SLOWEST_S = 1000, 96, 1.0


@pytest.mark.parametrize(
    ("bytes_per_token", "name"),
    [(4 * WIDTH, "fp32"), (4 * WIDTH - 1, "bf16"), (2 * WIDTH, "bf16"), (2 * WIDTH - 1, "int8"), (1, "int8")],
)
def test_the_most_exact_form_that_delays_no_stage_is_chosen(bytes_per_token, name):
    rate = TOKENS * bytes_per_token / (SPARE * SLOWEST_S)
    assert chosen_boundary(rate * (1 + 1e-9), TOKENS, WIDTH, SLOWEST_S).name == name
