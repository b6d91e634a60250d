#!/usr/bin/env bash
# Prints the speed table: every algorithm in every mode, three seeds each. Arguments go to benchmark/run.py.
set -euo pipefail
cd "$(dirname "$0")"
for script in leanrl/*_torchcompile.py; do
  algo=$(basename "$script" _torchcompile.py)
  python benchmark/run.py --algo "$algo" --run-dir "runs/benchmark/$algo" "$@"
done
