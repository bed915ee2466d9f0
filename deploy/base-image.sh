#!/bin/bash
# Build the base image from Debian packages, for machines that reach a Debian mirror but no image registry.
#
#   deploy/base-image.sh [TAG]        (default: python:3.11-slim-bookworm; root, on Debian 12)
#
# apt resolves the packages against an empty system; they are unpacked, not installed, so no maintainer script runs.
# The image carries the certificates that this machine trusts: do not push it to a registry.
set -euo pipefail

readonly TAG=${1:-python:3.11-slim-bookworm}
readonly PACKAGES=(
  base-files base-passwd bash coreutils dash debianutils diffutils dpkg findutils grep gzip hostname libc-bin
  mawk mount ncurses-base netbase passwd perl-base procps sed tar tzdata usr-is-merged util-linux
  openssl ca-certificates libstdc++6 python3 python3-venv
)

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
root=$work/root packages=$work/packages

download() {
  mkdir -p "$packages/partial"
  : >"$work/installed" # nothing is installed: every dependency is fetched
  apt-get -qq -y --download-only --no-install-recommends \
    -o Dir::State::status="$work/installed" \
    -o Dir::State::extended_states="$work/extended" \
    -o Dir::Cache::archives="$packages" \
    -o APT::Sandbox::User=root \
    install "${PACKAGES[@]}" >/dev/null
}

unpack() {
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

download
unpack
configure
record
tar --create --directory "$root" . | docker import \
  --change 'ENV PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin LANG=C.UTF-8' \
  --change 'CMD ["python3"]' \
  --message 'Debian packages, unpacked' - "$TAG" >/dev/null
echo "$TAG: $(docker image inspect --format '{{.Size}}' "$TAG") bytes"
