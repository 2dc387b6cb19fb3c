"""All hostile models: what published code does that breaks tools which expect tidy modules."""

from tests.models.hostile_blocks import BLOCK_CASES
from tests.models.hostile_flow import FLOW_CASES
from tests.models.hostile_state import STATE_CASES

HOSTILE_CASES = FLOW_CASES + STATE_CASES + BLOCK_CASES
