#!/bin/bash
# Build the base image from Debian packages, for machines that reach a Debian mirror but no image registry; and from it
# and a C compiler the image in which the compiled kernels are built.  A third tag makes one with HAProxy, for the balancer.
#
#   deploy/base-image.sh [TAG [COMPILER_TAG [BALANCER_TAG]]]        (root, on Debian 12)
#
# The tags are python:3.11-slim-bookworm and python:3.11-bookworm where none is given, and no image with HAProxy.  apt resolves the packages against
# an empty system; they are unpacked, not installed, so no maintainer script runs.
# The images carry the certificates that this machine trusts: do not push them to a registry.
set -euo pipefail

readonly TAG=${1:-python:3.11-slim-bookworm} COMPILER_TAG=${2:-python:3.11-bookworm} BALANCER_TAG=${3:-}
readonly PACKAGES=(
  base-files base-passwd bash coreutils dash debianutils diffutils dpkg findutils grep gzip hostname libc-bin
  mawk mount ncurses-base netbase passwd perl-base procps sed tar tzdata usr-is-merged util-linux
  openssl ca-certificates libstdc++6 python3 python3-venv
)
readonly COMPILER_PACKAGES=(gcc libc6-dev python3-dev) BALANCER_PACKAGES=(haproxy)

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
root=$work/root packages=$work/packages

# What is downloaded already is not downloaded again.
download() {
  mkdir -p "$packages/partial"
  : >"$work/installed" # nothing is installed: every dependency is fetched
  apt-get -qq -y --download-only --no-install-recommends \
    -o Dir::State::status="$work/installed" \
    -o Dir::State::extended_states="$work/extended" \
    -o Dir::Cache::archives="$packages" \
    -o APT::Sandbox::User=root \
    install "$@" >/dev/null
}

unpack() {
  rm -rf "$root"
  mkdir -p "$root"/usr/{bin,sbin,lib,lib64}
  local folder
  for folder in bin sbin lib lib64; do ln -s "usr/$folder" "$root/$folder"; done
  local package
  for package in "$packages"/*.deb; do
    dpkg-deb --fsys-tarfile "$package" | tar --extract --directory "$root" --keep-directory-symlink \
      --exclude './usr/share/doc/*' --exclude './usr/share/man/*' --exclude './usr/share/locale/*'
  done
}

# Do the part of the maintainer scripts that an image needs.
configure() {
  cp "$root/usr/share/base-passwd/passwd.master" "$root/etc/passwd"
  cp "$root/usr/share/base-passwd/group.master" "$root/etc/group"
  install -m 0640 /dev/null "$root/etc/shadow"
  [ -e "$root/bin/sh" ] || ln -s dash "$root/bin/sh"
  ln -sf mawk "$root/usr/bin/awk"
  ln -sf python3 "$root/usr/bin/python"
  install -d "$root"/{dev,proc,root,run,sys} "$root/etc/ssl/certs" "$root/usr/lib/ssl"
  install -d -m 1777 "$root"/{tmp,var/tmp}
  cp /etc/ssl/certs/ca-certificates.crt "$root/etc/ssl/certs/ca-certificates.crt"
  ln -sfn /etc/ssl/certs "$root/usr/lib/ssl/certs"
  ln -sfn /etc/ssl/certs/ca-certificates.crt "$root/usr/lib/ssl/cert.pem"
  chroot "$root" /sbin/ldconfig
}

# So that a scanner finds what is inside.
record() {
  install -d "$root/var/lib/dpkg"
  local package
  for package in "$packages"/*.deb; do
    dpkg-deb --field "$package" | sed '/^Package:/a Status: install ok installed'
    echo
  done >"$root/var/lib/dpkg/status"
}

# Make an image of what is downloaded.
import() {
  unpack
  configure
  record
  tar --create --directory "$root" . | docker import \
    --change 'ENV PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin LANG=C.UTF-8' \
    --change 'CMD ["python3"]' \
    --message 'Debian packages, unpacked' - "$1" >/dev/null
  echo "$1: $(docker image inspect --format '{{.Size}}' "$1") bytes"
}

download "${PACKAGES[@]}"
import "$TAG"
if [ -n "$BALANCER_TAG" ]; then
  (
    cp -r "$packages" "$work/balancer"
    packages=$work/balancer
    download "${PACKAGES[@]}" "${BALANCER_PACKAGES[@]}"
    import "$BALANCER_TAG"
  )
fi
download "${PACKAGES[@]}" "${COMPILER_PACKAGES[@]}"
import "$COMPILER_TAG"
