#!/usr/bin/env bash
# Measures every algorithm in every mode with three seeds, and prints the table; for the flags: ./run.sh --help
set -euo pipefail
cd "$(dirname "$0")"
exec python -m benchmark.speed "$@"
