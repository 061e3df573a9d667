#!/usr/bin/env bash
# Builds what the tests on a real Kubernetes control plane need, from the published Go modules
# that the go.mod and go.sum files in tools/k8s pin, and prints the directory they are in:
#
#   export KUBEBUILDER_ASSETS=$(tools/kube-assets.sh)
#
# One binary at a time, so that a half-finished run goes on where it stopped; finished ones stay
# in POPMQ_KUBE_CACHE (~/.cache/popmq-kube), named by release and pins.  Exit 77: there is no Go.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")/k8s" && pwd)

if ! command -v go >/dev/null; then
    echo "kube-assets: no Go toolchain, so no control plane to test on" \
        "(Go 1.26 or later: https://go.dev/dl)" >&2
    exit 77
fi

release=$(sed -n 's/^require k8s.io\/kubernetes //p; s/^\tk8s.io\/kubernetes \(v[^ ]*\).*/\1/p' "$here/go.mod" | head -n 1)
pins=$(cat "$here"/go.* "$here"/*/go.* "$here"/kwok-stages/* "${BASH_SOURCE[0]}" | sha256sum | cut -c 1-12)
out=${POPMQ_KUBE_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/popmq-kube}/$release-$pins
mkdir -p "$out"
exec 9>"$out/.lock"
flock 9 # a second run on this machine waits, then finds everything built

export CGO_ENABLED=0 GOTOOLCHAIN=local GOWORK=off
export GOFLAGS="-buildvcs=false -mod=readonly -trimpath"

# Without these the server calls itself v0.0.0, and clients that look at versions take old paths.
stamp=""
for package in k8s.io/component-base/version k8s.io/client-go/pkg/version; do
    minor=${release#v1.}
    stamp+=" -X $package.gitVersion=$release -X $package.gitMajor=1 -X $package.gitMinor=${minor%%.*}"
    stamp+=" -X $package.gitCommit=module -X $package.gitTreeState=clean"
done

build() { # folder of the module, package, name, linker flags
    [ -x "$out/$3" ] && return
    local begun=$SECONDS
    (cd "$here/$1" && nice -n 10 go build -ldflags "-s -w ${4:-}" -o "$out/$3.new" "$2")
    mv "$out/$3.new" "$out/$3"
    echo "kube-assets: built $3 in $((SECONDS - begun)) s" >&2
}

# A bare kwok knows no stages: its own come with its module, ours let a test break a pod.
stages() {
    [ -s "$out/kwok-stages.yaml" ] && return
    local own name
    own=$(cd "$here/kwok" && go list -m -f '{{.Dir}}' sigs.k8s.io/kwok)/kustomize/stage
    for name in node/fast/node-initialize node/heartbeat-with-lease/node-heartbeat-with-lease \
        pod/fast/pod-ready pod/fast/pod-complete pod/fast/pod-delete; do
        cat "$own/$name.yaml"
        echo "---"
    done >"$out/kwok-stages.new"
    cat "$here"/kwok-stages/*.yaml >>"$out/kwok-stages.new"
    mv "$out/kwok-stages.new" "$out/kwok-stages.yaml"
}

build . k8s.io/kubernetes/cmd/kube-apiserver kube-apiserver "$stamp"
build etcd go.etcd.io/etcd/server/v3 etcd
build . k8s.io/kubernetes/cmd/kube-controller-manager kube-controller-manager "$stamp"
build . k8s.io/kubernetes/cmd/kube-scheduler kube-scheduler "$stamp"
build . k8s.io/kubernetes/cmd/kubectl kubectl "$stamp"
build kwok sigs.k8s.io/kwok/cmd/kwok kwok
stages
build helm helm.sh/helm/v3/cmd/helm helm
echo "$out"
