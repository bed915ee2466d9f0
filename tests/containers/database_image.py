"""An image of PostgreSQL for machines without a registry: Debian's package of this machine on the base image.

It takes the variables of the official image that deploy/docker-compose.postgres.yml sets.
"""

import io
import subprocess
import tarfile
from pathlib import Path

import pytest

TAG = "coterie-test-postgres:local"

_START = """#!/bin/sh
set -eu
data=/var/lib/postgresql/data
if [ ! -s "$data/PG_VERSION" ]; then
  # shellcheck disable=SC2086
  initdb --pgdata "$data" --username "$POSTGRES_USER" --auth "$POSTGRES_HOST_AUTH_METHOD" $POSTGRES_INITDB_ARGS
  echo "create database $POSTGRES_DB" | postgres --single -D "$data" postgres
fi
shift
exec postgres -D "$data" "$@"
"""

_DOCKERFILE = """ARG BASE_IMAGE
FROM ${BASE_IMAGE}
COPY root /
RUN ldconfig \\
 && groupadd --gid 999 postgres && useradd --uid 999 --gid 999 --no-create-home --shell /bin/false postgres \\
 && install -d -o postgres -g postgres -m 0700 /var/lib/postgresql/data \\
 && rm -rf /var/run/postgresql && install -d -o postgres -g postgres -m 3777 /var/run/postgresql
ENV PATH=%s:$PATH
ENTRYPOINT ["/start"]
CMD ["postgres"]
"""


def _needed(program):
    """Return the libraries that a program loads."""
    said = subprocess.run(["ldd", program], check=True, capture_output=True, text=True).stdout
    return {Path(word) for line in said.splitlines() for word in line.split() if word.startswith("/")}


def database_image(engine, base):
    """Build the image, and return its name; skips where the package is not installed."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/postgres"))
    if not found:
        pytest.skip("PostgreSQL is not installed (Debian: apt-get install postgresql)")
    programs = found[-1].parent
    version = programs.parent.name
    share = Path("/usr/share/postgresql") / version
    files = {path for folder in (programs.parent, share) for path in folder.rglob("*") if path.is_file()}
    files |= {path for one in ("postgres", "initdb", "pg_isready") for path in _needed(programs / one)}
    context = io.BytesIO()
    with tarfile.open(fileobj=context, mode="w") as tar:
        for path in sorted(files):
            tar.add(path.resolve(), f"root{path if str(path)[:4] == '/usr' else '/usr' + str(path)}")
        for name, text, mode in [
            ("root/start", _START, 0o755),
            ("Dockerfile", _DOCKERFILE % programs, 0o644),
        ]:
            member = tarfile.TarInfo(name)
            member.size, member.mode = len(text), mode
            tar.addfile(member, io.BytesIO(text.encode()))
        # Where the server looks for its time zones and locales.
        for folder in ("/usr/share/zoneinfo",):
            if Path(folder).is_dir():
                tar.add(folder, f"root{folder}")
    context.seek(0)
    engine.client.images.build(
        fileobj=context, custom_context=True, tag=TAG, buildargs={"BASE_IMAGE": base}, rm=True
    )
    return TAG
