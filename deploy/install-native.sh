#!/bin/sh
# Lay the compiled kernels out below a folder as they stand in an image; nothing where there is no wheel of them.
#
#   deploy/install-native.sh WHEELS FOLDER
#
# Their files have one time, SOURCE_DATE_EPOCH: a second call gives the same.
set -eu

mkdir -p "$2"
for wheel in "$1"/*.whl; do
  [ -e "$wheel" ] || exit 0
  /opt/packaging/bin/pip --python /opt/venv/bin/python install \
    --no-compile --no-deps --no-warn-script-location --root "$2" "$wheel"
done
python3 -m compileall -q --invalidation-mode unchecked-hash -s "$2" -p / "$2"
find "$2" -exec touch --no-dereference --date "@$SOURCE_DATE_EPOCH" {} +
