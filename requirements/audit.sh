#!/bin/bash
# The supply chain: known vulnerabilities of what is locked, secrets in the repository, bills of materials.
#
#   requirements/audit.sh [FOLDER]        (default: build/sbom)
#
# `make audit` installs the tools into .venv-audit first; those on the PATH are taken where it is missing.  Ends with
# another status than 0 when something was found.  Where the database of vulnerabilities cannot be reached, that part is
# left out, with the reason.
set -euo pipefail
cd "$(dirname "$0")/.."

readonly MATERIALS=${1:-build/sbom}
# Published test vectors, hashes of data sets and of packages look like secrets; stubs are generated.
readonly NO_SECRETS='^(spec/vectors|docs/results|coterie/wire/v1)/|^docs/(live-page|three-machines)\.md$|^requirements/.*\.txt$|^tests/unit/test_(compiled_masks|identity|masking|sealed)\.py$'

PATH="$PWD/.venv-audit/bin:$PATH"
missing=()
for tool in pip-audit detect-secrets-hook cyclonedx-py; do
  command -v "$tool" >/dev/null || missing+=("$tool")
done
if [ ${#missing[@]} -gt 0 ]; then
  echo "not on the PATH: ${missing[*]}; \`make audit\` installs them into .venv-audit" >&2
  exit 2
fi

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
failed=0

vulnerabilities() {
  local lock
  for lock in requirements/*.txt; do
    # A lock without hashes is for comparisons: it is in no image.
    grep -q -- '--hash=' "$lock" || continue
    if pip-audit --vulnerability-service osv --disable-pip --require-hashes --progress-spinner off \
      --requirement "$lock" >"$work/audit" 2>&1; then
      echo "$lock: no known vulnerability"
    elif grep -q 'ConnectionError\|NameResolutionError\|ConnectTimeout\|ServiceError' "$work/audit"; then
      echo "not checked for vulnerabilities: their database (OSV) cannot be reached from here"
      return
    else
      echo "$lock:"
      cat "$work/audit"
      failed=1
    fi
  done
}

# Reads names of files, each ended by a zero byte.
scan() {
  xargs -0 -n 150 -P "$(nproc)" detect-secrets-hook --no-verify
}

secrets() {
  # A scan that finds nothing may be one that looks at nothing.
  openssl genpkey -algorithm ed25519 -out "$work/planted.pem"
  git ls-files -z | grep -zvE "$NO_SECRETS" >"$work/files"
  if printf '%s\0' "$work/planted.pem" | scan >/dev/null 2>&1; then
    echo "the scan for secrets does not find a private key"
    failed=1
  elif scan <"$work/files"; then
    echo "$(tr -cd '\0' <"$work/files" | wc -c) files without a secret"
  else
    failed=1
  fi
}

materials() {
  mkdir -p "$MATERIALS"
  local lock
  for lock in base privacy paillier postgres operator data; do
    cyclonedx-py requirements --pyproject pyproject.toml --output-reproducible --validate \
      --output-file "$MATERIALS/$lock.cdx.json" "requirements/$lock.txt" 2>"$work/materials" || {
      cat "$work/materials"
      failed=1
    }
  done
  echo "bills of materials (CycloneDX) in $MATERIALS: $(cd "$MATERIALS" && echo *.cdx.json)"
}

vulnerabilities
secrets
materials
exit "$failed"
