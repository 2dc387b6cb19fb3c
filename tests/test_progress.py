"""What long work tells of itself, and the bar that a terminal shows of it."""

import os
import pty
import sys
import threading
import time

import torch
from torch import nn

import autoshard
from autoshard.common.progress import shown_progress, tell, watched_by


def model() -> nn.Module:
    return nn.Sequential(*[nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)) for _ in range(20)])


def told(work) -> dict[str, list[tuple[int, int | None]]]:
    """Unit -> what was told in it."""
    found: dict[str, list[tuple[int, int | None]]] = {}
    with watched_by(lambda unit, done, total: found.setdefault(unit, []).append((done, total))):
        work()
    return found


def test_capture_and_proof_tell_how_far_they_are():
    devices = {"cpu:0": "1GiB", "cpu:1": "1GiB"}
    inputs = torch.ones(4, 8)
    found = told(
        lambda: autoshard.plan(model(), devices, inputs=inputs, strategy="column-parallel", objective="memory")
    )
    assert [done for done, _ in found["ops"]][:2] == [0, 64]


def test_saving_and_loading_tell_bytes(tmp_path):
    saved = model()
    total = sum(parameter.nbytes for parameter in saved.parameters())
    found = told(lambda: autoshard.save(saved, tmp_path / "out"))["bytes"]
    assert found[0] == (0, total) and found == sorted(found)
    shown = []
    autoshard.load(tmp_path / "out", "cpu", model=model(), progress=lambda done, total: shown.append((done, total)))
    assert all(done <= total for done, total in shown)


def read_all(terminal: int, seen: bytearray) -> None:
    while True:
        try:
            seen += os.read(terminal, 65536)
        except OSError:  # the other end is closed
            return


def test_a_terminal_shows_amount_and_rate(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    ours, theirs = pty.openpty()
    seen = bytearray()
    reader = threading.Thread(target=read_all, args=(ours, seen))
    reader.start()
    with os.fdopen(theirs, "w") as terminal, monkeypatch.context() as patched:
        patched.setattr(sys, "stderr", terminal)
        with shown_progress("working"):
            for done in range(0, 3_000_000_000, 250_000_000):
                tell("bytes", done, 3_000_000_000)
                with shown_progress("inside"):
                    time.sleep(0.05)
            for done in range(8):
                tell("ops", 1000 * done)
                time.sleep(0.05)
    reader.join()
    os.close(ours)
    text = seen.decode()
    assert "working" in text and "inside" not in text
    assert "of 3.00 GB" in text and "GB/s" in text
    assert "ops/s" in text
