"""Run a function on several processes that share a gloo group, and hand back what each of them returned.

The processes are forked off one helper that has imported torch, so a start takes a fraction of a second. The function
must be importable (at the top of a test module); so must its arguments and results be picklable.
"""

import gc
import multiprocessing
import os
import pathlib
import tempfile
import time
import traceback
from datetime import timedelta

context = multiprocessing.get_context("forkserver")
# What most functions need: a process imports it in half a second. What is missing is left out without a word.
context.set_forkserver_preload(
    [
        "torch",
        "torch.distributed",
        "transformers.models.llama.modeling_llama",
        "pytest",
        "autoshard.api",
        "autoshard.capture.capture",
        "autoshard.pipelines.engine",
        "autoshard.check.cuts",
        "autoshard.runtime.data_parallel",
        "autoshard.strategies.column_parallel",
        "tests.conformance.rank_checks",
        "tests.pipelines.models",
        "tests.runtime.cut_checks",
    ]
)


class RankFailed(AssertionError):
    """A process raised, or did not come to an end."""


def run_ranks(function, count, *args, timeout_seconds=120.0, may_die=False, lost=None, group_seconds=30.0):
    """Call `function(*args)` on every rank; returns the results by rank. Raises `RankFailed` with the traceback.

    `may_die`: a process that ends without a result gives None; `lost`: so does this rank, which nobody waits for, and
    which is killed at the end. `group_seconds`: how long one rank waits for another,
    such as one that plans.
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


def run_jobs(jobs):
    """What several functions give in one launch: name -> (function, *arguments) becomes name -> result."""
    return {name: function(*arguments) for name, (function, *arguments) in jobs.items()}


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
    gc.freeze()  # what was imported stays: the collector would look through all of it
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    import torch
    import torch.distributed as dist

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
