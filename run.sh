#!/usr/bin/env bash
# Measures every algorithm in every mode with three seeds, and prints the table; see benchmark/matrix.py for the flags.
set -euo pipefail
cd "$(dirname "$0")"
exec python benchmark/matrix.py "$@"
