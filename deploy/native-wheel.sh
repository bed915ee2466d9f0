#!/bin/sh
# Build the wheel of the compiled kernels, with locked packages, where a C compiler and Python's headers are.
#
#   deploy/native-wheel.sh yes|no FOLDER
#
# With `no` nothing is built, and the folder stays empty.
set -eu

mkdir -p "$2"
case $1 in
  yes) ;;
  no) exit 0 ;;
  *) echo "KERNELS=$1: expected yes or no" >&2; exit 2 ;;
esac
/opt/packaging/bin/pip install --require-hashes -r requirements/native.txt
/opt/packaging/bin/pip wheel --no-deps --no-build-isolation --wheel-dir "$2" ./native
