#!/usr/bin/env bash
# Measures every algorithm in every mode with three seeds and prints the table. ./run.sh --help lists the flags.
# ./run.sh --gpu-report takes five minutes on a GPU and prints a first table; with --everything, nine minutes and eight
# algorithms. ./run.sh --gpu-first-hour makes the longer measurements that need a GPU, for up to an hour.
set -euo pipefail
cd "$(dirname "$0")"
if [ "${1-}" = --gpu-report ]; then
  exec python -m benchmark.gpu_report "${@:2}"
fi
if [ "${1-}" = --gpu-first-hour ]; then
  exec python -m benchmark.first_hour "${@:2}"
fi
exec python -m benchmark.speed "$@"
