#!/bin/sh
# Start a federation and print how long it takes until every service is healthy; it goes on running.
#
#   deploy/up-seconds.sh [options of compose, such as -f FILE]
#
# Build the images first.  A service is healthy once a run has taken it in, so the run is started, too.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
[ $# -gt 0 ] || cd "$(dirname "$0")"

if docker compose version > /dev/null 2>&1; then compose="docker compose"; else compose=docker-compose; fi
began=$(date +%s%N)
elapsed() { echo "$(($(date +%s%N) - began))" | sed 's/^/00000000000/; s/^0*\([0-9]*[0-9]\)\([0-9]\)[0-9]\{8\}$/\1.\2/'; }

# Services that cannot become healthy: those that end by themselves, and Prometheus, which has no probe.
unhealthy() {
  $compose "$@" ps --quiet | xargs docker inspect --format \
    '{{with .State.Health}}{{.Status}}{{else}}-{{end}} {{.State.Status}} {{index .Config.Labels "com.docker.compose.service"}}' |
    awk '$1 != "healthy" && $1 != "-" && !($2 == "exited") { print $3 }'
}

if ! $compose "$@" up --detach; then
  "$here/unhealthy.sh" "$@" >&2 || true # compose has said a container's id
  exit 1
fi
echo "started after $(elapsed) s"
while waiting=$(unhealthy "$@") && [ -n "$waiting" ]; do
  if [ "$(($(date +%s%N) - began))" -gt 300000000000 ]; then
    echo "not healthy after 300 s:" $waiting >&2
    "$here/unhealthy.sh" "$@" >&2 || true
    exit 1
  fi
  sleep 0.2
done
echo "all healthy after $(elapsed) s"
