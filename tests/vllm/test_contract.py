"""What holds for every engine: tests of the embedded engine, run against real vLLM."""

from tests.collectors.test_transformers_engine import (  # noqa: F401
    test_a_swap_with_a_wrong_digest_keeps_weights_and_version,
    test_closing_cancels_what_is_in_flight,
    test_finish_codes,
    test_nothing_is_drawn_while_paused,
    test_recorded_log_probs_are_those_of_a_plain_forward,
    test_what_waits_while_finishing_first_starts_with_the_new_weights,
)
from tests.vllm.real import pytestmark  # noqa: F401
