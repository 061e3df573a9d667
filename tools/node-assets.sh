#!/usr/bin/env bash
# What make test-pods needs beside tools/kube-assets.sh: kubelet and kube-proxy of the same release,
# in the same directory, which it prints.  Exit 77: there is no Go.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
out=$(./kube-assets.sh)
exec 9>"$out/.lock"
flock 9

export CGO_ENABLED=0 GOTOOLCHAIN=local GOWORK=off
export GOFLAGS="-buildvcs=false -mod=readonly -trimpath"
release=$(basename "$out")
release=${release%-*}
stamp=""
for package in k8s.io/component-base/version k8s.io/client-go/pkg/version; do
    stamp+=" -X $package.gitVersion=$release -X $package.gitCommit=module -X $package.gitTreeState=clean"
done
for name in kubelet kube-proxy; do
    [ -x "$out/$name" ] && continue
    begun=$SECONDS
    (cd k8s && nice -n 10 go build -ldflags "-s -w $stamp" -o "$out/$name.new" "k8s.io/kubernetes/cmd/$name")
    mv "$out/$name.new" "$out/$name"
    echo "node-assets: built $name in $((SECONDS - begun)) s" >&2
done
echo "$out"
