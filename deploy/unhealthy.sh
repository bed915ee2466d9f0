#!/bin/sh
# Name each service of a federation that is not healthy, with the last answer of its probe: compose itself says a
# container's id only.  Ends with 1 if there are any.
#
#   deploy/unhealthy.sh [options of compose, such as -f FILE or --project-name NAME]
set -eu
[ $# -gt 0 ] || cd "$(dirname "$0")"

if docker compose version > /dev/null 2>&1; then compose="docker compose"; else compose=docker-compose; fi

# Compose of version 2 lists only what runs, unless it is asked for all.
containers=$($compose "$@" ps --all --quiet)
[ -n "$containers" ] || { echo "no container of this federation is there"; exit 1; }
# A service without a probe, or one that has ended well, has nothing to say.
found=$(
  for container in $containers; do
    docker inspect --format \
      '{{index .Config.Labels "com.docker.compose.service"}}: {{.State.Status}}{{if eq .State.Status "exited"}} with {{.State.ExitCode}}{{end}}{{with .State.Health}}, {{.Status}}: {{$said := "not asked yet"}}{{range .Log}}{{$said = .Output}}{{end}}{{$said}}{{end}}' \
      "$container" | tr '\n' ' ' | sed 's/ *$//'
    echo
  done | grep -v -E '^[^:]*: (running, healthy:|running$|exited with 0)' || true
)
[ -n "$found" ] || exit 0
echo "$found"
exit 1
