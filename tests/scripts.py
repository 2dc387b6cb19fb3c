"""Run a script as `python script.py …` or torchrun would, in processes forked off the source of `tests.ranks`.

That saves the imports, which take longer than most scripts. What depends on a start from nothing (launchers, hash
seeds, what is imported, how a process ends) needs real processes.
"""

import atexit
import functools
import os
import runpy
import socket
import subprocess
import sys
import tempfile
import weakref
from dataclasses import dataclass
from multiprocessing import connection
from pathlib import Path

from tests.ranks import context, source

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """How a script ended, and what it wrote."""

    returncode: int
    stdout: str
    stderr: str


def run_script(script, *arguments):
    """Run it from the root of the project, with one thread.

    Where the script itself starts `autoshard run --processes N`, or torch's `spawn`, those are forked as well and find
    each other as under torchrun; with more options the launcher runs as it is. Before that the script may not compute
    gradients: autograd then has threads, and is of no use in what is forked.
    """
    with tempfile.TemporaryDirectory() as folder:
        outputs = (f"{folder}/stdout", f"{folder}/stderr")
        status = source().call(_start, outputs, str(script), [str(one) for one in arguments], 1)
        stdout, stderr = (Path(name).read_text() for name in outputs)
    return Done(returncode=status, stdout=stdout, stderr=stderr)


def _start(outputs, script, arguments, count):
    """Start the processes and wait; the status of the first that fails, which ends the others."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    running = []
    for rank in range(count):
        # Lightning takes its processes from torchrun only where a run has an id
        own = {"RANK": rank, "LOCAL_RANK": rank, "TORCHELASTIC_RUN_ID": "forked", **shared} if count > 1 else {}
        environment = {name: str(value) for name, value in own.items()}
        process = context.Process(target=_main, args=(outputs, script, arguments, environment), daemon=False)
        process.start()
        running.append(process)
    status = 0
    while running:
        connection.wait([process.sentinel for process in running])
        for process in [one for one in running if one.exitcode is not None]:
            running.remove(process)
            if process.exitcode and not status:
                status = process.exitcode
                for other in running:
                    other.kill()
    return status


def _main(outputs, script, arguments, environment):
    weakref.finalize._registry.clear()  # temporary directories are for the process to remove that this is forked off
    for number, name in enumerate(outputs, 1):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    import torch
    import torch.multiprocessing as processes

    torch.set_num_threads(1)
    os.environ.update(environment, OMP_NUM_THREADS="1", COLUMNS="120", PYTHONPATH=str(ROOT))
    os.chdir(ROOT)
    sys.argv[:] = [script, *arguments]
    sys.path.insert(0, str(Path(script).parent))

    real = subprocess.call

    def call(command):
        (*launcher, count), (path, *rest) = command[:6], command[6:]
        if launcher != [sys.executable, "-m", "autoshard", "run", "--processes"] or path.startswith("--"):
            return real(command)
        return _start(outputs, path, rest, int(count))

    subprocess.call = call
    processes.spawn = functools.partial(processes.start_processes, start_method="fork")
    try:
        runpy.run_path(script, run_name="__main__")
    finally:
        atexit._run_exitfuncs()  # a process of multiprocessing ends without them
