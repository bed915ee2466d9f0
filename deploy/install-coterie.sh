#!/bin/sh
# Lay Coterie itself out below a folder as it stands in an image, without the packages that it needs.
#
#   deploy/install-coterie.sh FOLDER
#
# It is compiled, and its files have one time, SOURCE_DATE_EPOCH: a second call gives the same.
set -eu

# The record of an installation names the file that it came from, so that is always the same.
/opt/packaging/bin/pip wheel --no-deps --no-build-isolation --wheel-dir /tmp/wheel .
/opt/packaging/bin/pip --python /opt/venv/bin/python install \
  --no-compile --no-deps --no-warn-script-location --root "$1" /tmp/wheel/*.whl
rm -r /tmp/wheel
python3 -m compileall -q --invalidation-mode unchecked-hash -s "$1" -p / "$1"
install -D -m 0644 deploy/probe.py "$1/opt/coterie/probe.py"
find "$1" -exec touch --no-dereference --date "@$SOURCE_DATE_EPOCH" {} +
