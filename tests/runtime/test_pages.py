"""Pages of a private mapping that were written to, by both ways to ask; and how what is read is divided."""

import itertools
import os

import pytest
import torch

from autoshard.runtime import pages
from autoshard.runtime.mapped import LARGE_PAGE_BYTES, PART_BYTES, Region, bring, let_go, map_file, parts

PAGES = 40


@pytest.fixture
def mapped(tmp_path):
    (tmp_path / "file").write_bytes(bytes(range(256)) * (PAGES * pages.PAGE_BYTES // 256))
    return map_file(tmp_path / "file")


def write(mapped, *numbers):
    whole = torch.frombuffer(mapped, dtype=torch.uint8)
    for number in numbers:
        whole[number * pages.PAGE_BYTES + 7] = 3


def spans(mapped, *numbers):
    size, base = pages.PAGE_BYTES, mapped.address
    return [(base + begin * size, base + end * size) for begin, end in numbers]


def asked(way, begin, end):
    file = os.open("/proc/self/pagemap", os.O_RDONLY)
    try:
        return way(file, begin, end)
    except OSError as error:
        pytest.skip(f"this system can't be asked so: {error}")
    finally:
        os.close(file)


@pytest.mark.skipif(not os.path.exists("/proc/self/pagemap"), reason="Linux tells which pages were written to")
@pytest.mark.parametrize("way", [pages._scan, pages._read])
def test_what_was_written_is_found(way, mapped, monkeypatch):
    monkeypatch.setattr(pages, "_RANGES", 2)
    end = mapped.address + len(mapped)
    assert asked(way, mapped.address, end) == []
    bring([Region(mapped, 0, len(mapped))])
    assert asked(way, mapped.address, end) == []  # read only
    write(mapped, 0, 5, 6, 7, 20, 30, 39)
    assert asked(way, mapped.address, end) == spans(mapped, (0, 1), (5, 8), (20, 21), (30, 31), (39, 40))
    assert asked(way, mapped.address + 6 * pages.PAGE_BYTES, mapped.address + 21 * pages.PAGE_BYTES) == spans(
        mapped, (6, 8), (20, 21)
    )


def test_letting_go_keeps_what_was_written(mapped):
    before = torch.frombuffer(mapped, dtype=torch.uint8).clone()
    write(mapped, 0, 5, 6, 39)
    after = torch.frombuffer(mapped, dtype=torch.uint8).clone()
    assert not torch.equal(before, after)
    let_go([Region(mapped, 3, len(mapped) - 3)])
    assert torch.equal(torch.frombuffer(mapped, dtype=torch.uint8), after)


@pytest.mark.parametrize("begin", [0, 5000, LARGE_PAGE_BYTES - 1])
@pytest.mark.parametrize("nbytes", [1, PART_BYTES, 3 * PART_BYTES + 17, 90 << 20])
def test_parts_join_to_the_whole_between_large_pages(mapped, begin, nbytes):
    found = parts([Region(mapped, begin, nbytes)], 4)
    assert len(found) <= 5 and found[0].start == begin
    assert sum(part.nbytes for part in found) == nbytes
    for left, right in itertools.pairwise(found):
        assert left.start + left.nbytes == right.start and right.start % LARGE_PAGE_BYTES == 0
        assert min(left.nbytes, right.nbytes) >= PART_BYTES // 2
