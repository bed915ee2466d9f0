#!/bin/sh
# Install locked packages into /opt/venv of an image, without what only tests, compilers and type checkers read.
#
#   deploy/install-packages.sh [--compile] LOCK FOLDER
#
# New files are also laid out below FOLDER, for a layer of their own, and compiled if that is asked.  All files have the
# time SOURCE_DATE_EPOCH, so a second installation gives the same layer.
set -eu

compile=
[ "$1" != --compile ] || { compile=yes; shift; }
lock=$1 folder=$2

there() { find /opt/venv \( -type f -o -type l \) -print | LC_ALL=C sort; }

before=$(mktemp) after=$(mktemp)
there > "$before"
/opt/packaging/bin/pip --python /opt/venv/bin/python install --no-compile --require-hashes -r "$lock"
find /opt/venv/lib \( -type d -name tests -o -name '*.[ach]' -o -name '*.px[di]' -o -name '*.py[xi]' \) \
  -prune -exec rm -rf {} +
there > "$after"
mkdir -p "$folder"
LC_ALL=C comm -13 "$before" "$after" | tar --create --files-from - | tar --extract --directory "$folder"
rm "$before" "$after"
[ -z "$compile" ] || python3 -m compileall -q --invalidation-mode unchecked-hash -s "$folder" -p / "$folder/opt/venv/lib"
find "$folder" -exec touch --no-dereference --date "@$SOURCE_DATE_EPOCH" {} +
