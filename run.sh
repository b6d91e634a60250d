#!/usr/bin/env bash
# Measures every algorithm in every mode with three seeds, and prints the table; for the flags: ./run.sh --help
# ./run.sh --gpu-first-hour measures what only a GPU can tell, an hour at a time.
set -euo pipefail
cd "$(dirname "$0")"
if [ "${1-}" = --gpu-first-hour ]; then
  exec python -m benchmark.first_hour "${@:2}"
fi
exec python -m benchmark.speed "$@"
