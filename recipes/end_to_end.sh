#!/bin/bash
# The commands of docs/end_to_end.md, one after the other, in a new folder: bash recipes/end_to_end.sh [FOLDER]
set -euo pipefail
page=$(cd "$(dirname "$0")/.." && pwd)/docs/end_to_end.md
folder=${1:-story}
mkdir "$folder" || { echo "Name a folder that is not there yet: bash $0 FOLDER" >&2; exit 2; }
cd "$folder"
trap 'kill $(jobs -p) 2>/dev/null || true' EXIT # a server that is still there when a command fails
commands=$(sed -n '/^```bash$/,/^```$/{/^```/d;p;}' "$page")
set -x
eval "$commands"
