#!/bin/bash
# Lock the dependencies: exact versions and hashes of everything that an image or a developer installs.
#
#   requirements/compile.sh [pip-compile options, such as --upgrade]
set -euo pipefail
cd "$(dirname "$0")/.."

# No index, no header: both differ from machine to machine.  The project itself is what the locks are for.
lock() {
  local out=requirements/$1.txt
  shift
  pip-compile --quiet --generate-hashes --strip-extras --no-header --no-emit-index-url --no-emit-trusted-host \
    --no-emit-find-links --no-allow-unsafe --unsafe-package coterie --output-file "$out" "$@"
  # After the last pin come remarks about the project itself, which no lock can name.
  sed -i -e '/^# The following packages are considered to be unsafe/,$d' \
    -e '/^# WARNING: The following packages were not pinned/,$d' "$out"
}

# The others take the versions that the tests ran with.
lock dev "$@" --extra dev --extra fast pyproject.toml
lock base "$@" --constraint requirements/dev.txt --extra fast --extra traces --extra oidc pyproject.toml
lock privacy "$@" --constraint requirements/dev.txt --extra fast --extra traces --extra privacy pyproject.toml
lock paillier "$@" --constraint requirements/dev.txt --extra fast --extra traces --extra paillier pyproject.toml
lock web "$@" --constraint requirements/dev.txt --extra fast --extra traces --extra web pyproject.toml
lock postgres "$@" --constraint requirements/dev.txt --extra fast --extra traces --extra privacy --extra postgres --extra objects pyproject.toml
lock operator "$@" --constraint requirements/dev.txt --extra fast --extra privacy --extra report --extra web pyproject.toml
lock data "$@" --constraint requirements/dev.txt --extra data --extra fast --extra privacy --extra report pyproject.toml
lock build "$@" --constraint requirements/dev.txt --only-build-deps --build-deps-for wheel --build-deps-for editable pyproject.toml
lock native "$@" --constraint requirements/dev.txt --only-build-deps --build-deps-for wheel native/pyproject.toml
# LensKit wants pandas below 3, and PyTorch mpmath below 1.4: the versions of all others are those of the tests.  PyTorch
# itself is in no lock (torch.txt); compile where pip finds the one without CUDA, whose libraries would be locked, too.
mkdir -p build
awk '/^[a-zA-Z0-9]/ && !/^(pandas|mpmath)==/ { print $1 }' requirements/dev.txt >build/without-lenskit.txt
lock lenskit "$@" --constraint build/without-lenskit.txt --constraint requirements/torch.txt --unsafe-package torch \
  --extra fast --extra lenskit pyproject.toml
# Not what typer draws with, nor the parser of C that cffi has for others.
lock device "$@" --constraint requirements/dev.txt --unsafe-package rich \
  --unsafe-package pygments --unsafe-package markdown-it-py --unsafe-package mdurl --unsafe-package pycparser \
  --unsafe-package greenlet requirements/device.in
lock device-build "$@" --constraint requirements/dev.txt requirements/device-build.in
lock audit "$@" requirements/audit.in
lock kubernetes "$@" requirements/kubernetes.in
lock docs "$@" requirements/docs.in
