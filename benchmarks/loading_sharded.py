"""What a rank's memory has at its peak while it loads its part of a checkpoint, over what it then keeps.

    python benchmarks/loading_sharded.py [--gigabytes 1.5] [--meshes fsdp=4 fsdp=2,tp=2 pp=2,fsdp=2] [--folder DIR]

A decoder of random bfloat16 weights, planned for training by processes, and loaded by them on the CPU over gloo. "own":
bytes of its shards. "peak": of private memory (RssAnon, read every 2 ms) beyond that before, and "mapped": the peak of
pages of files, which the system takes back as it needs. What a process allocates once (groups, libraries) is loaded
before by a model of one layer.
"""

import argparse
import gc
import json
import multiprocessing
import os
import tempfile
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.loading import CONFIG, LAYER_BYTES, make_checkpoint, memory


class Peak(threading.Thread):
    """The largest that RssAnon and RssFile were while it ran, in bytes."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.private, self.mapped, self.running = 0, 0, True

    def run(self) -> None:
        while self.running:
            self.private = max(self.private, memory("RssAnon"))
            self.mapped = max(self.mapped, memory("RssFile"))
            time.sleep(0.002)


def plan_for(folder: Path, mesh: str) -> str:
    import autoshard
    from autoshard.integrations.huggingface import load_model

    size = 1
    for part in mesh.split(","):
        size *= int(part.partition("=")[2])
    model = load_model(folder)
    ids = torch.zeros(8, 64, dtype=torch.long)
    workload = autoshard.Workload(mode="training", batch_size=8, sequence_length=64)
    devices = {f"cpu:{index}": "40GiB" for index in range(size)}
    inputs = {"input_ids": ids, "labels": ids}
    return autoshard.plan(
        model, devices, inputs=inputs, workload=workload, launch="processes", mesh=mesh, precision="pure"
    ).to_json()


def load_on_rank(pipe, store: str, rank: int, folders: list[tuple[Path, str]]) -> None:
    import autoshard
    from autoshard.plan import Plan

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    plans = [Plan.from_json(text) for _, text in folders]
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=len(plans[0].devices))
    for (folder, _), plan in zip(folders, plans, strict=True):
        peak, begin = Peak(), time.perf_counter()
        private, mapped = memory("RssAnon"), memory("RssFile")
        peak.start()
        ids = torch.zeros(8, 64, dtype=torch.long)
        model = autoshard.load(folder, plan=plan, inputs={"input_ids": ids, "labels": ids}, progress=False)
        peak.running = False
        peak.join()
        local = (one.to_local() if hasattr(one, "to_local") else one for one in model.parameters())
        own = sum(one.nbytes for one in local if not one.is_meta)
        found = {"own": own, "peak": peak.private - private, "mapped": peak.mapped - mapped}
        found["seconds"] = time.perf_counter() - begin
        del model, local
        gc.collect()
    pipe.send(found)
    dist.barrier()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=1.5)
    parser.add_argument("--meshes", nargs="*", default=["fsdp=4", "fsdp=2,tp=2", "pp=2,fsdp=2"])
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "autoshard-loading")
    options = parser.parse_args()
    layers = max(2, 2 * round((options.gigabytes * 1e9 - 262e6) / LAYER_BYTES / 2))
    folders = {count: options.folder / f"sharded-{count}" for count in (2, layers)}
    for count, folder in folders.items():
        if not folder.exists():
            make_checkpoint(folder, count)
    context = multiprocessing.get_context("spawn")
    print(f"{layers} layers of {CONFIG['hidden_size']}   own MB   peak MB   peak / own   mapped MB   seconds")
    for mesh in options.meshes:
        plans = [(folder, plan_for(folder, mesh)) for folder in folders.values()]
        with tempfile.TemporaryDirectory() as store:
            pipes, processes = [], []
            for rank in range(len(json.loads(plans[0][1])["devices"])):
                receive, send = context.Pipe(duplex=False)
                arguments = (send, (Path(store) / "store").as_uri(), rank, plans)
                processes.append(context.Process(target=load_on_rank, args=arguments))
                processes[-1].start()
                pipes.append(receive)
            for rank, pipe in enumerate(pipes):
                found = pipe.recv()
                print(f"{mesh:16} rank {rank} {found['own'] / 1e6:8.0f} {found['peak'] / 1e6:9.0f} "
                      f"{found['peak'] / found['own']:12.2f} {found['mapped'] / 1e6:11.0f} {found['seconds']:9.1f}"
                )  # fmt: skip
            for process in processes:
                process.join()


if __name__ == "__main__":
    main()
