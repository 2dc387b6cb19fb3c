"""Stages on several processes under torch's schedules: outputs, losses and gradients are those of the model itself."""

from functools import partial

import pytest
import torch

from tests.pipelines.models import decoder, shared, skips, tied, turned
from tests.pipelines.rank_checks import differences, token_loss
from tests.ranks import run_ranks

BFLOAT16 = partial(torch.autocast, "cpu", dtype=torch.bfloat16)


def on_two():
    """All that two ranks are asked, in one launch."""
    generator = torch.Generator().manual_seed(1)
    target = torch.randint(0, 11, (8, 5), generator=generator)
    return {
        "tied": differences(tied, 2, "gpipe", loss=token_loss, target=target),
        "decoder": differences(partial(decoder, 2, 2), 2, "1f1b"),
        "interleaved": differences(partial(decoder, 4, 4), 2, "interleaved"),
        "recomputed": differences(partial(decoder, 4, 4), 2, "interleaved", recompute=True),
        "skips": differences(skips, 2, "interleaved"),
        "unwanted outputs": differences(tied, 2, "1f1b", loss=token_loss, target=target, return_outputs=False),
        "mixed precision": differences(partial(decoder, 2, 2), 2, "1f1b", around=BFLOAT16, tolerance=2**-7),
        "zero bubble": differences(partial(decoder, 4, 4), 2, "zero-bubble"),
        "transposed gradient": differences(turned, 2, "zero-bubble"),
    }


def test_two_ranks_train_as_one():
    for result in run_ranks(on_two, 2):
        assert not any(result.values()), result


def on_four():
    return {
        "decoder": differences(partial(decoder, 4, 4), 4, "1f1b"),
        "skips": differences(skips, 4, "gpipe"),
        "shared": differences(shared, 4, "1f1b"),
    }


@pytest.mark.slow
def test_four_ranks_train_as_one():
    for result in run_ranks(on_four, 4):
        assert not any(result.values()), result
