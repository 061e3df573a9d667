#!/usr/bin/env bash
# Prints the operator's plain manifests, rendered from the Helm chart (make manifests).
# HELM names the helm to use; otherwise that of make kube-assets.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
helm=${HELM:-$(tools/kube-assets.sh)/helm}
echo "# Written by make manifests from charts/popmq: the operator, for kubectl apply."
echo "apiVersion: v1
kind: Namespace
metadata:
  name: popmq-system"
"$helm" template popmq charts/popmq --namespace popmq-system --kube-version 1.30.0 \
    --set operator.clusterWide=true,crds.enabled=false
