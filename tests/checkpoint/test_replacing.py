"""A save that is stopped by an error, a full disk or a kill at any moment leaves the old checkpoint or the new one."""

import contextlib
import os
import resource
import signal
import sys

import pytest
import torch
from torch import nn

import autoshard
from autoshard.checkpoint import save as saving
from autoshard.checkpoint import write
from autoshard.errors import CheckpointError, RankError
from autoshard.runtime.collectives import ProcessRanks
from autoshard.runtime.cuts import apply_cuts
from tests.checkpoint.directories import contents
from tests.ranks import exit_codes, run_ranks
from tests.runtime.cut_models import CASES


def make(value, layers=4):
    """Layers of 4 KiB that all have one value."""
    model = nn.Sequential(*[nn.Linear(32, 32, bias=False) for _ in range(layers)])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    return model


def save(model, path):
    autoshard.save(model, path, max_shard_size="8KiB")


def old_and_new(folder):
    """What a directory holds after a save of 1.0, and after one of 2.0 (in fewer files) over it."""
    save(make(1.0), folder / "expected")
    (folder / "expected" / "tokenizer").mkdir()
    (folder / "expected" / "tokenizer" / "words.txt").write_text("kept")
    (folder / "expected" / "notes.txt").write_text("kept")
    old = contents(folder / "expected")
    save(make(2.0, 3), folder / "expected")
    new = contents(folder / "expected")
    assert new.keys() == old.keys() and new != old
    return old, new


def start_over(path, old):
    for name, data in old.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(data)


def killed_at_every_step(folder, exchange):
    """Kill forks of this process right before the first, second, … call of the system while they save."""
    os.fsync = lambda _: None  # it makes no difference to a kill, and takes long
    if not exchange:  # as on file systems that can't exchange two directories
        write._exchanged = lambda *_: False
    old, new = old_and_new(folder)
    outcomes, step, status = [], 0, 1
    while status:
        step += 1
        path = folder / f"step{step}" / "out"
        start_over(path, old)
        child = os.fork()
        if not child:
            kill_at(step)
            save(make(2.0, 3), path)
            os._exit(0)
        status = os.waitpid(child, 0)[1]
        assert path.exists() or not exchange
        found = contents(write.standing(path))
        assert found in (old, new), f"before step {step}"
        outcomes.append(found == new)
        autoshard.load(path, "cpu", model=make(0.0, 3 if found == new else 4), progress=False)
        save(make(2.0, 3), path)
        assert contents(path) == new
        assert os.listdir(path.parent) == ["out"], f"leftovers of step {step}"
    assert outcomes == sorted(outcomes) and outcomes[-1] and not outcomes[0]
    assert step > 20


def kill_at(step):
    left = [step]

    def watch(event, args):
        if event.split(".")[0] in ("os", "open", "shutil", "fcntl", "ctypes"):
            left[0] -= 1
            if not left[0]:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)


@pytest.mark.parametrize("exchange", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_killed_at_every_step(exchange, tmp_path):
    assert exit_codes(killed_at_every_step, (tmp_path, exchange))[0] == 0


def save_often(path, value, times):
    for _ in range(times):
        save(make(value), path)


def test_several_processes_save_to_one_place(tmp_path):
    """As where every rank saves a model of its own: one of them is there at the end, whole."""
    expected = []
    for value in (1.0, 2.0, 3.0):
        save(make(value), tmp_path / "expected")
        expected.append(contents(tmp_path / "expected"))
    calls = [(tmp_path / "out", value, 3) for value in (1.0, 2.0, 3.0)]
    assert exit_codes(save_often, *calls) == [0, 0, 0]
    assert contents(tmp_path / "out") in expected
    assert sorted(os.listdir(tmp_path)) == ["expected", "out"]


def save_on_a_full_disk(path):
    """Files may not grow beyond 6,000 bytes, as if the disk were full then."""
    model = make(2.0)
    resource.setrlimit(resource.RLIMIT_FSIZE, (6_000, 6_000))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    with pytest.raises(CheckpointError, match=r"could not write .*File too large.*is as it was"):
        save(model, path)


def test_a_full_disk(tmp_path):
    save(make(1.0), tmp_path / "out")
    old = contents(tmp_path)
    assert exit_codes(save_on_a_full_disk, (tmp_path / "out",))[0] == 0
    assert contents(tmp_path) == old
    assert exit_codes(save_on_a_full_disk, (tmp_path / "new",))[0] == 0
    assert contents(tmp_path) == old


def save_cut_on_a_full_disk(path):
    """The first rank can't write what is larger than the file over which ranks agree; all ranks must hear of it."""
    model = CASES["words"].make()
    model.register_buffer("ballast", torch.zeros(1 << 20))
    apply_cuts(model, CASES["words"].cuts(2), ProcessRanks.of())
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    with pytest.raises((CheckpointError, RankError), match=r"could not write .*File too large"):
        autoshard.save(model, path)


def test_a_full_disk_is_an_error_on_all_ranks(tmp_path):
    run_ranks(save_cut_on_a_full_disk, 2, tmp_path / "out")
    assert not os.listdir(tmp_path)


def test_too_little_space_is_known_before(tmp_path):
    model = nn.Linear(1, 1)
    model.weight = nn.Parameter(torch.ones(1, 1).expand(1 << 25, 1 << 25))
    with pytest.raises(CheckpointError, match=r"needs 4.0. PiB|needs \d+ TiB"):
        autoshard.save(model, tmp_path / "out")
    assert not os.listdir(tmp_path)


class Stop(BaseException):
    pass


@pytest.mark.parametrize("stop", [Stop, OSError])
@pytest.mark.parametrize("exchange", [True, False])
def test_an_exception_in_the_middle(stop, exchange, tmp_path, monkeypatch):
    save(make(1.0), tmp_path / "out")
    old = contents(tmp_path)
    write_file = saving.save_file

    def fail(tensors, file, metadata):
        if file.name.startswith("model-00002"):
            raise stop()
        write_file(tensors, file, metadata)

    monkeypatch.setattr(saving, "save_file", fail)
    if not exchange:
        monkeypatch.setattr(write, "_exchanged", lambda *_: False)
    with pytest.raises(CheckpointError if stop is OSError else stop):
        save(make(2.0), tmp_path / "out")
    assert contents(tmp_path) == old


@pytest.mark.parametrize("why", ["mount point", "may not write"])
def test_a_directory_that_nothing_can_be_made_beside(why, tmp_path, monkeypatch):
    path = tmp_path / "out"
    path.mkdir()
    if why == "mount point":
        monkeypatch.setattr(os.path, "ismount", lambda one: str(one) == str(path))
    else:
        monkeypatch.setattr(os, "access", lambda one, mode: str(one) != str(tmp_path))
    with pytest.raises(CheckpointError, match=f"{why}.*Save to a directory inside it"):
        save(make(2.0), path)
    assert not list(path.iterdir())
    save(make(2.0), path / "inside")


def test_what_else_is_in_the_directory_is_kept(tmp_path):
    path = tmp_path / "out"
    save(make(1.0), path)
    (path / "sub").mkdir()
    (path / "sub" / "file").write_text("kept")
    (path / "link").symlink_to("sub/file")
    (path / "dangling").symlink_to("nowhere")
    (path / "pytorch_model.bin").write_text("kept")
    path.chmod(0o750)
    with contextlib.chdir(path / "sub"), pytest.raises(CheckpointError, match="holds, the working directory"):
        autoshard.save(make(2.0), "..")
    (tmp_path / "by_link").symlink_to("out")
    autoshard.save(make(2.0), tmp_path / "by_link")
    assert sorted(os.listdir(path)) == ["dangling", "link", "model.safetensors", "pytorch_model.bin", "sub"]
    assert os.readlink(path / "link") == "sub/file" and (path / "sub" / "file").read_text() == "kept"
    assert path.stat().st_mode & 0o777 == 0o750
    assert sorted(os.listdir(tmp_path)) == ["by_link", "out"] and (tmp_path / "by_link").is_symlink()
