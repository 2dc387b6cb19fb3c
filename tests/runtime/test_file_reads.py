"""Parts of mapped files, read: out of the page cache, past it, or not at all where the mapping is the better way."""

import os

import pytest

from autoshard.runtime import file_reads
from autoshard.runtime.file_reads import BLOCK_BYTES, FileReads
from autoshard.runtime.mapped import Region, is_cached, map_file

NBYTES = 40 * BLOCK_BYTES + 123
CONTENT = bytes(range(251)) * (NBYTES // 251 + 1)


@pytest.fixture
def mapped(tmp_path, monkeypatch):
    monkeypatch.setattr(file_reads, "LEAST_BYTES", 1)
    path = tmp_path / "file"
    path.write_bytes(CONTENT[:NBYTES])
    found = map_file(path)
    if file_reads._open_twice(found) is None:
        pytest.skip("this system has no way past its page cache")
    return found


def forget(mapped):
    """Take a file out of the page cache; skip where that can't be done."""
    with open(mapped.path, "rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if is_cached(Region(mapped, 0, NBYTES)):
        pytest.skip("the page cache keeps this file")


def read(reads, mapped, start, nbytes):
    """What was read, None if it was not."""
    memory = bytearray(nbytes)
    view = memoryview(memory)
    address = file_reads.ctypes.addressof(file_reads.ctypes.c_char.from_buffer(memory))
    return bytes(memory) if reads.read(Region(mapped, start, nbytes), view, address) else None


STRETCHES = [(0, NBYTES), (1, 7), (BLOCK_BYTES - 1, 2), (BLOCK_BYTES, BLOCK_BYTES), (5000, 90_000), (NBYTES - 200, 200)]


@pytest.mark.parametrize("cached", [True, False])
def test_the_bytes_of_the_file(mapped, cached):
    reads = FileReads()
    for start, nbytes in STRETCHES:
        if not cached:
            forget(mapped)
        assert read(reads, mapped, start, nbytes) == CONTENT[start : start + nbytes]
        assert cached or not is_cached(Region(mapped, start, nbytes))


def test_what_is_asked_for_again_comes_to_stay_if_there_is_room(mapped, monkeypatch):
    for room, wanted in ((1 << 60, None), (0, CONTENT[:9000])):
        monkeypatch.setattr(file_reads, "available_bytes", lambda room=room: room)
        reads = FileReads()
        forget(mapped)
        assert read(reads, mapped, 0, 9000) == CONTENT[:9000]
        assert read(reads, mapped, 0, 9000) == wanted


def test_changes_in_the_mapping_are_not_missed(mapped):
    mapped[8000] = 7
    reads = FileReads()
    assert read(reads, mapped, 5000, 9000) is None
    assert read(reads, mapped, 20_000, 9000) == CONTENT[20_000:29_000]


def test_another_file_under_the_name_is_not_read(mapped):
    os.unlink(mapped.path)
    mapped.path.write_bytes(bytes(NBYTES))
    assert read(FileReads(), mapped, 0, 10) is None


def test_a_file_that_is_shorter_now_is_not_read(mapped):
    reads = FileReads()
    assert read(reads, mapped, 0, 10) == CONTENT[:10]
    os.truncate(mapped.path, 3 * BLOCK_BYTES)
    assert read(reads, mapped, 2 * BLOCK_BYTES, 2 * BLOCK_BYTES) is None
