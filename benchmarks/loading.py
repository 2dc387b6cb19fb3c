"""Loading decoders of random bf16 weights to CPU memory, against other tools and against the machine itself.

    python benchmarks/loading.py --quick                 what the bars need, 2 GB warm and cold, 3 rounds: 7 minutes
    python benchmarks/loading.py --quick --gigabytes 6   the same of 6 GB, less of it
    python benchmarks/loading.py                         2 GB and 6 GB, warm and cold, all ways, 5 rounds
    python benchmarks/loading.py --gigabytes 2 --rounds 3 --only raw,autoshard

Every run is a process of its own, so that memory is fresh; the ways take turns, every second round the last first.
"warm": the files are in the page cache before; "cold": they are dropped from it (and what the disk read is shown).
Rates are medians, their spread in brackets. Where no dtype changes, on the CPU all libraries only map the files;
"copied" is `autoshard.load(…, mapped=False)`, and with float32 all of them really read and convert. "+ use": seconds
until every weight was used once, by a forward of 16 tokens where there is a model. "processor": seconds of all cores
until loaded, which say more on a busy machine. Bytes are those of /proc/self/io; "beyond" is the peak of memory beyond
the model's own. "Plain columns" are what a short program copies out of a mapping. The decoder of 6 GB has few layers of
the width of a model of 70 B parameters, and quick it is neither copied nor converted. Bars: medians of the ratios in
each round, and their spread.
"""

import argparse
import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from loading_ways import LARGE_GIGABYTES, WAYS, make_checkpoint, sized


def set_cache(folder: Path, cold: bool) -> None:
    buffer = memoryview(bytearray(16 << 20))
    for file in folder.glob("*.safetensors"):
        with open(file, "rb", buffering=0) as opened:
            if cold:
                os.fsync(opened.fileno())
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            else:
                while opened.readinto(buffer):
                    pass


def run_one(way: str, folder: Path) -> dict:
    command = [sys.executable, __file__, "--one", way, "--folder", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        return {"failed": done.stderr.strip().splitlines()[-1]}
    return json.loads(done.stdout.splitlines()[-1])


BARS = {
    False: [
        ("load against from_pretrained", "from_pretrained", "autoshard.load", 1.5),
        ("load against load_checkpoint_and_dispatch", "load_checkpoint_and_dispatch", "autoshard.load", 2.5),
        ("load, copied, against memcpy", "raw memcpy into fresh memory", "autoshard.load, copied", 0.85),
        ("load in float32 against from_pretrained", "from_pretrained, float32", "autoshard.load, float32", 1.0),
        ("columns against rows, 2 ranks", "autoshard, rows of 1 of 2 ranks", "autoshard, columns of 1 of 2 ranks", 0.8),
        ("columns against rows, 8 ranks", "autoshard, rows of 1 of 8 ranks", "autoshard, columns of 1 of 8 ranks", 0.8),
        (
            "plain columns against rows, 2 ranks",
            "autoshard, rows of 1 of 2 ranks",
            "raw columns of 1 of 2 ranks",
            None,
        ),
        (
            "plain columns against rows, 8 ranks",
            "autoshard, rows of 1 of 8 ranks",
            "raw columns of 1 of 8 ranks",
            None,
        ),
    ],
    True: [
        ("load, copied, against reading", "raw sequential read", "autoshard.load, copied", 0.95),
        ("reading only against reading", "raw sequential read", "autoshard, reading only", 0.95),
        ("reading only against the disk", "raw direct read", "autoshard, reading only", 0.95),
    ],
}
"""Cold or not -> what is compared: a way, ours, and how many times as fast ours is to be; None: for comparison."""


def compare(folder: Path, rounds: int, ways: list[str], cold: bool) -> None:
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    found: dict[str, list[dict]] = {way: [] for way in ways}
    for number in range(rounds):
        for way in ways[:: 1 if number % 2 == 0 else -1]:  # what the process before gave back is quicker to get
            set_cache(folder, cold)
            found[way].append(run_one(way, folder))
    print(f"\n{size / 1e9:.2f} GB, {'cold' if cold else 'warm'}, {rounds} rounds")
    print(" " * 35 + "                 seconds   GB/s    + use processor asked/size disk/size   beyond")
    for way, runs in found.items():
        failed = [run["failed"] for run in runs if "failed" in run]
        if failed:
            print(f"{way:35} failed: {failed[0]}")
            continue
        times, last = sorted(run["seconds"] for run in runs), runs[-1]
        middle, used = statistics.median(times), statistics.median(run["used"] for run in runs)
        share = 1 / int(way.split()[-2]) if way.endswith("ranks") else 1.0
        processor = statistics.median(run["processor"] for run in runs)
        bytes_ = f"{last['asked'] / size:10.3f} {last['disk'] / size:9.3f}"
        print(
            f"{way:35} {middle:8.2f} [{times[0]:.2f} to {times[-1]:.2f}] {size * share / middle / 1e9:6.2f} "
            f"{used:8.2f} {processor:9.2f} {bytes_} {(last['peak'] - last['kept']) / 2**20:5.0f} MiB",
            flush=True,
        )
    for what, other, ours, bar in BARS[cold]:
        pairs = list(zip(found[other], found[ours], strict=True)) if {other, ours} <= found.keys() else []
        ratios = sorted(a["seconds"] / b["seconds"] for a, b in pairs if "failed" not in a and "failed" not in b)
        if ratios:
            middle = statistics.median(ratios)
            print(f"{what:45} {middle:6.2f} [{ratios[0]:.2f} to {ratios[-1]:.2f}]" + (f", bar {bar}" if bar else ""))


QUICK = {
    (False, False): ("raw memcpy", "autoshard.load", "from_pretrained", "load_checkpoint_and_dispatch", "ranks"),
    (True, False): ("autoshard.load", "from_pretrained", "8 ranks"),
    (False, True): ("raw sequential", "raw direct", "reading only", "autoshard.load, copied"),
    (True, True): ("raw sequential", "raw direct", "reading only"),
}
"""Large or not, cold or not -> parts of the names of the ways: what the bars need."""
LEFT_OUT = (", copied", "float32")
"""What of 6 GB takes longest, and says what 2 GB said: most of it is fresh memory."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, nargs="+", help="2 and 6, or 2 if quick")
    parser.add_argument("--rounds", type=int, help="5, or 3 if quick")
    parser.add_argument("--quick", action="store_true", help="only what the bars need")
    parser.add_argument("--only", default="", help="parts of the names of ways, with commas")
    parser.add_argument("--folder", type=Path, help="where the files go (kept if given), or are")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(WAYS[options.one](options.folder)))
        return
    rounds = options.rounds or (3 if options.quick else 5)
    sizes = options.gigabytes or ([2.0] if options.quick else [2.0, 6.0])
    place = options.folder or Path(tempfile.mkdtemp(prefix="autoshard-loading-"))
    try:
        for gigabytes, cold in itertools.product(sizes, (False, True)):
            folder, large = place / f"{gigabytes:g}", gigabytes >= LARGE_GIGABYTES
            if not folder.exists():
                make_checkpoint(folder, sized(gigabytes))
            names = QUICK[large, cold] if options.quick else options.only.split(",")
            left_out = LEFT_OUT if options.quick and large else ()
            parts = [way for way in WAYS if any(part in way for part in names)]
            ways = [way for way in parts if not any(part in way for part in left_out)]
            compare(folder, rounds, ways, cold)
    finally:
        if options.folder is None:
            shutil.rmtree(place)


if __name__ == "__main__":
    main()
