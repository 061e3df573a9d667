#!/usr/bin/env bash
# popmq's image in real pods: containerd, runc and kubelets on this machine, for make test-pods.
#
# Needs root, Go, and the packages containerd, runc, containernetworking-plugins, iptables, conntrack,
# buildah and debootstrap of a Debian.  BASE names another base image that buildah has.  Everything
# runs in namespaces that end with the tests.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
work=${POPMQ_PODS:-${XDG_CACHE_HOME:-$HOME/.cache}/popmq-pods}
mkdir -p "$work"

# Without a registry: a base with Debian's Python, made once.
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
buildah bud --isolation chroot --network host --layers --pull-never --quiet \
    --volume "$certificates:/run/certificates.crt:ro" \
    --build-arg "BASE=$base" --build-arg PIP_CERT=/run/certificates.crt --tag localhost/popmq:1 .
paused=$(buildah from --pull-never localhost/popmq:1)
buildah config --entrypoint '["/bin/sleep", "infinity"]' --cmd '' "$paused"
buildah commit --quiet --rm "$paused" localhost/pause:1 >/dev/null
for name in popmq pause; do
    rm -f "$work/$name.tar"
    buildah push --quiet "localhost/$name:1" "oci-archive:$work/$name.tar:localhost/$name:1"
done

KUBEBUILDER_ASSETS=$(tools/node-assets.sh)
export KUBEBUILDER_ASSETS POPMQ_PODS_IMAGES="$work"
# Not where pytest tidies up: what containers have mounted goes with the namespace only.
scratch=$(mktemp -d /tmp/popmq-pods.XXXXXX)
trap 'rm -rf "$scratch"' EXIT
unshare --mount --net --pid --fork --mount-proc --kill-child --propagation private \
    sh -c '.venv/bin/python -m pytest -q -s -p no:cacheprovider -o tmp_path_retention_policy=all \
        --basetemp="$0/run" tests/pods "$@"; exit $?' "$scratch" "$@"
