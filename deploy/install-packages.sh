#!/bin/sh
# Install locked packages into /opt/venv of an image, without what only tests, compilers and type checkers read.
#
#   deploy/install-packages.sh LOCK
set -eu

/opt/packaging/bin/pip --python /opt/venv/bin/python install --no-compile --require-hashes -r "$1"
find /opt/venv/lib \( -type d -name tests -o -name '*.[ach]' -o -name '*.px[di]' -o -name '*.py[xi]' \) \
  -prune -exec rm -rf {} +
