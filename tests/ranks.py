"""Run a function on several processes that share a gloo group, and hand back what each of them returned.

The processes are forked off one that stands beside this one: it was forked off before any test ran, so it has imported
all that tests import and has nothing of theirs, and a start takes a few milliseconds. The function must be importable
(at the top of a test module); so must its arguments and results be picklable.
"""

import contextlib
import gc
import logging
import multiprocessing
import os
import pathlib
import sys
import tempfile
import time
import traceback
from datetime import timedelta

import torch
import torch.distributed as dist

context = multiprocessing.get_context("fork")


class _Source:
    """The process off which others are forked, and this end of the pipe to it."""

    def __init__(self):
        self.pipe, other = context.Pipe()
        self.process = context.Process(target=_serve, args=(other, self.pipe))
        self.process.start()
        other.close()

    def call(self, function, *args, **settings):
        """What the function returns or raises there; processes that it starts are forked off the source."""
        self.pipe.send((function, args, settings))
        raised, result = self.pipe.recv()
        if raised:
            raise result
        return result

    def close(self):
        self.pipe.close()
        self.process.join()


def _serve(pipe, other):
    other.close()
    gc.freeze()  # what was imported stays: the collector would look through all of it
    sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__  # not those with which pytest catches what tests print
    logging.root.handlers.clear()
    with contextlib.suppress(EOFError):
        while True:
            function, args, settings = pipe.recv()
            try:
                answer = False, function(*args, **settings)
            except RankFailed as error:
                answer = True, error
            except Exception:
                answer = True, RankFailed(traceback.format_exc())
            pipe.send(answer)


_sources = []


def source():
    """The process to fork others off; it is started where there is none."""
    if not _sources:
        _sources.append(_Source())
    return _sources[0]


def end_source():
    while _sources:
        _sources.pop().close()


class RankFailed(AssertionError):
    """A process raised, or did not come to an end."""


def run_ranks(function, count, *args, **settings):
    """Call `function(*args)` on every rank; returns the results by rank. Raises `RankFailed` with the traceback.

    The settings are those of `_run_ranks`.
    """
    return source().call(_run_ranks, function, count, args, **settings)


def exit_codes(function, *calls):
    """How processes end that call the function, each with arguments of its own; negative for a signal."""
    return source().call(_exit_codes, function, calls)


def _exit_codes(function, calls):
    processes = [context.Process(target=function, args=args) for args in calls]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    return [process.exitcode for process in processes]


def run_jobs(jobs):
    """What several functions give in one launch: name -> (function, *arguments) becomes name -> result."""
    return {name: function(*arguments) for name, (function, *arguments) in jobs.items()}


def _run_ranks(function, count, args, *, timeout_seconds=120.0, may_die=False, lost=None, group_seconds=30.0):
    """Fork the ranks and wait for them.

    `may_die`: a process that ends without a result gives None; `lost`: so does this rank, which nobody waits for, and
    which is killed at the end. `group_seconds`: how long one rank waits for another, such as one that plans.
    """
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(count):
            receive, send = context.Pipe(duplex=False)
            process = context.Process(
                target=_rank, args=(send, folder, rank, count, function, args, group_seconds), daemon=True
            )
            process.start()
            send.close()
            pipes.append(receive)
            processes.append(process)
        try:
            return _collect(pipes, time.monotonic() + timeout_seconds, may_die, lost)
        finally:
            if lost is not None:
                processes[lost].kill()
            for process in processes:
                process.join(2)
                if process.is_alive():
                    process.kill()
                    process.join()


def _collect(pipes, deadline, may_die, lost):
    results = []
    for rank, pipe in enumerate(pipes):
        if rank == lost:
            results.append(None)
            continue
        if not pipe.poll(max(0.0, deadline - time.monotonic())):
            raise RankFailed(f"rank {rank} did not come to an end")
        try:
            good, result = pipe.recv()
        except EOFError:
            if not may_die:
                raise RankFailed(f"rank {rank} ended without a result") from None
            good, result = True, None
        if not good:
            raise RankFailed(f"rank {rank}:\n{result}")
        results.append(result)
    return results


def _rank(pipe, folder, rank, count, function, args, group_seconds):
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.manual_seed(0)
    torch.set_num_threads(1)
    store = pathlib.Path(folder) / "store"
    dist.init_process_group(
        "gloo", init_method=store.as_uri(), rank=rank, world_size=count, timeout=timedelta(seconds=group_seconds)
    )
    try:
        dist.barrier()  # who needs no collective would leave while others still connect to it
        result = True, function(*args)
    except BaseException:
        result = False, traceback.format_exc()
    pipe.send(result)
    pipe.close()
    if not result[0]:
        os._exit(1)  # the others may be in a collective that never ends
    dist.destroy_process_group()
