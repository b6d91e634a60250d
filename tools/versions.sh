#!/usr/bin/env bash
# Tests the scripts with other versions of torch: turbo equals plain, the CUDA code that each version generates, and the
# edits of doc/changing.md. Prints a row of a table for each, and then the largest error of each script's CUDA code.
#
#   tools/versions.sh                   # all versions that the requirements allow
#   tools/versions.sh 2.12 2.15         # some
#   PYTHON=3.13 tools/versions.sh 2.15  # with another Python
#
# It needs uv, about 6 GB for each version (PyPI's torch for Linux is the build for CUDA), and half an hour on 2 cores.
# The oldest torch comes with the oldest versions of all packages that the requirements allow. Environments and logs are
# kept in .versions/.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-3.11}
oldest=2.11
tests="turbo_equals_plain or runs_generated_code or the_edit_works or each_function_gets_the_mode"
packages=(torch tensordict gymnasium mujoco numpy envpool)
row() { printf '|'; printf ' %s |' "$@"; printf '\n'; }
errors() {
  "$name/bin/python" - "$@" << 'END'
import sys
from collections import defaultdict
from pathlib import Path
from xml.etree import ElementTree

versions = [Path(path).stem for path in sys.argv[1:]]
errors = defaultdict(lambda: defaultdict(list))
for path, version in zip(sys.argv[1:], versions):
    for found in ElementTree.parse(path).iter("property"):
        errors[found.get("name")][version].append(float(found.get("value")))
rows = [["script", *versions], ["---"] * (1 + len(versions))]
for script, found in sorted(errors.items()):
    rows.append([script, *[f"{max(found[v]):.1e}" if v in found else "" for v in versions]])
for cells in rows:
    print(f"| {' | '.join(cells)} |")
END
}

for word in "$@"; do
  case $word in
    -h | --help)
      sed -n '2,/^[^#]/s/^# \?//p' tools/versions.sh
      exit
      ;;
    [0-9]*) ;;
    *)
      echo "error: $word: give versions of torch, such as 2.13, or --help" >&2
      exit 2
      ;;
  esac
done

mkdir -p .versions
[ $# -gt 0 ] || set -- 2.11 2.12 2.13 2.14 2.15
row Python "${packages[@]}" tests
row --- "${packages[@]/*/---}" ---
failed=0
reports=()
for version in "$@"; do
  name=.versions/torch-$version-python-$python
  resolution=highest
  [ "$version" = $oldest ] && resolution=lowest-direct
  uv venv -q --allow-existing -p "$python" "$name"
  uv pip install -q -p "$name" --resolution $resolution -r requirements/test.txt "torch==$version.*"
  . "$name/bin/activate"
  pytest -q -n 2 -p no:cacheprovider -m "not planted and not finding" -k "$tests" --junitxml "$name.xml" \
    > "$name.log" 2>&1 || failed=1
  reports+=("$name.xml")
  result=$(tail -n 1 "$name.log")
  found=$(python -c "import sys; from importlib.metadata import version as v; print(*map(v, sys.argv[1:]))" "${packages[@]}")
  read -ra versions <<< "$found"
  row "$python" "${versions[@]}" "${result//=/}"
  deactivate
done
errors "${reports[@]}"
exit $failed
