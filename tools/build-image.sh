#!/usr/bin/env bash
# The Dockerfile built by buildah where there is no registry to pull a base image from:
#
#   tools/build-image.sh TARGET TAG      for instance: reports localhost/popmq-reports:1
#
# Needs root, and the packages buildah and debootstrap of a Debian.  BASE names another base image
# that buildah has; otherwise one with Debian's Python is made, once.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
target=$1 tag=$2
work=${POPMQ_PODS:-${XDG_CACHE_HOME:-$HOME/.cache}/popmq-pods}
mkdir -p "$work"

base=${BASE:-localhost/popmq-base:1}
if [ -z "${BASE:-}" ] && ! buildah inspect --type image "$base" >/dev/null 2>&1; then
    release=$(. /etc/os-release && echo "$VERSION_CODENAME")
    [ -e "$work/root/usr/bin/pip3" ] ||
        debootstrap --variant=minbase --include=python3,python3-venv,python3-pip,ca-certificates \
            "$release" "$work/root" >"$work/debootstrap.log"
    made=$(buildah from scratch)
    buildah add "$made" "$work/root" / >/dev/null
    buildah commit --quiet --rm "$made" "$base" >/dev/null
fi

# PIP_CERT: whom this machine trusts, should its registry need it.
certificates=/etc/ssl/certs/ca-certificates.crt
buildah bud --format docker --isolation chroot --network host --layers --pull-never --quiet --target "$target" \
    --volume "$certificates:/run/certificates.crt:ro" \
    --build-arg "BASE=$base" --build-arg PIP_CERT=/run/certificates.crt --tag "$tag" .
