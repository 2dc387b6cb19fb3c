"""no_collection: off inside, and after it as it was."""

import gc

import pytest

from autoshard.collector import no_collection


def test_the_collector_is_off_inside_and_after_it_as_it_was():
    assert gc.isenabled()
    with no_collection():
        assert not gc.isenabled()
        with no_collection():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(ValueError, match="inside"), no_collection():
        raise ValueError("inside")
    assert gc.isenabled()
