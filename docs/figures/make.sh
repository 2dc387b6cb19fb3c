#!/usr/bin/env bash
# Make the pictures of the documentation again, with the package itself.
set -euo pipefail
cd "$(dirname "$0")/../.."
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
options=(--image svg --no-compare --no-what-if)
autoshard plan examples/model.py -d 2x4GiB,1x3GiB -s balanced --objective throughput -o "$folder/plan.json" >/dev/null
autoshard report "$folder/plan.json" -o "$folder/plan.html" "${options[@]}"
autoshard plan examples/model.py -d 3x4GiB -s pipeline --objective throughput --batch 8 --micro-batches 6 \
    -o "$folder/pipeline.json" >/dev/null
autoshard report "$folder/pipeline.json" -o "$folder/pipeline.html" "${options[@]}"
cp "$folder"/plan-{memory,placement}.svg "$folder/pipeline-timeline.svg" docs/figures/
