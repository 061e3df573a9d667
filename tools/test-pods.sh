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

tools/build-image.sh popmq localhost/popmq:1
tools/build-image.sh operator localhost/popmq-operator:1
paused=$(buildah from --pull-never localhost/popmq:1)
buildah config --entrypoint '["/bin/sleep", "infinity"]' --cmd '' "$paused"
buildah commit --quiet --rm "$paused" localhost/pause:1 >/dev/null
for name in popmq popmq-operator pause; do
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
