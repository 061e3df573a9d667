#!/usr/bin/env bash
# The steps of the Dockerfile; the tests take them too, where there is no container runtime.
#
#   tools/image.sh python                         check that the base image's Python is a fast build
#   tools/image.sh compiler                       get what compiles the hot modules, if that is possible
#   tools/image.sh user ROOT                      the user that every role runs as, and its folder
#   tools/image.sh install SOURCE PREFIX EXTRAS   popmq and what it needs, for that user to read
#   tools/image.sh sbom PREFIX                    write PREFIX/sbom.cdx.json, the list of its packages
set -euo pipefail

# As in the operator's pods (operator/popmq/operator/resources/pods.py).  It has a name because
# kopf asks for the name of its user, and dies where there is none.
user=10001

# A Python that was compiled without profile-guided optimization costs popmq a fifth more CPU.
# Distributions optimize their packages by other means than this option, so their names are asked.
fast_python() {
    local real
    "$1" -c 'import sys, sysconfig
sys.exit("--enable-optimizations" not in (sysconfig.get_config_var("CONFIG_ARGS") or ""))' && return
    real=$("$1" -c 'import os, sys; print(os.path.realpath(sys.executable))')
    { dpkg -S "$real" || rpm -qf "$real" || apk info --who-owns "$real"; } >/dev/null 2>&1
}

# A C compiler, and the headers of that Python (hatch_build.py).
can_compile() {
    command -v cc >/dev/null && python3 -c 'import os, sys, sysconfig
sys.exit(not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")))'
}

case ${1:-} in
python)
    python=$(command -v python3) || { echo "image: the base image has no python3" >&2; exit 1; }
    fast_python "$python" || {
        echo "image: $python is neither a package of the distribution nor configured with" \
            "--enable-optimizations, so popmq would need a fifth more CPU: choose another base" \
            "image (--build-arg BASE=...)" >&2
        exit 1
    }
    ;;
compiler)
    if ! can_compile && command -v apt-get >/dev/null; then
        apt-get update -qq
        # The headers of a Python that is no package came with it.
        headers=$(dpkg -S "$(readlink -f "$(command -v python3)")" >/dev/null 2>&1 && echo python3-dev)
        apt-get install -qq -y --no-install-recommends gcc libc6-dev $headers >/dev/null
    fi
    can_compile || echo "image: no C compiler or no headers of Python: popmq's hot modules are not" \
        "compiled, and take 1.7 times the CPU" >&2
    ;;
user)
    root=${2%/}
    grep -q "^popmq:" "$root/etc/passwd" ||
        echo "popmq:x:$user:$user:popmq:/tmp:/usr/sbin/nologin" >>"$root/etc/passwd"
    grep -q "^popmq:" "$root/etc/group" || echo "popmq:x:$user:" >>"$root/etc/group"
    install -d -o "$user" -g "$user" -m 0750 "$root/var/lib/popmq"
    ;;
install)
    source=$2 prefix=$3 extras=$4
    # Without pip: the image installs nothing later.
    [ -x "$prefix/bin/python" ] || python3 -m venv --without-pip "$prefix"
    can_compile && export POPMQ_COMPILED=1
    python3 -m pip --python "$prefix/bin/python" install --quiet --no-compile "$source[$extras]"
    # What no role imports is not compiled: rich's languages, and, of the Kubernetes client, the
    # asyncio half, which the operator alone uses.
    skipped='/pygments/(lexers|styles|formatters)/'
    [[ ,$extras, == *,operator,* ]] || skipped+='|/kubernetes/aio/'
    "$prefix/bin/python" -m compileall -q -x "$skipped" "$prefix/lib"
    ;;
sbom)
    prefix=$2
    scratch=$(mktemp -d)
    trap 'rm -rf "$scratch"' EXIT
    python3 -m venv --without-pip "$scratch"
    python3 -m pip --python "$scratch/bin/python" install --quiet 'cyclonedx-bom>=7.3,<8'
    "$scratch/bin/cyclonedx-py" environment "$prefix/bin/python" --output-reproducible \
        --output-format JSON --output-file "$prefix/sbom.cdx.json"
    ;;
*)
    sed -n '2,8s/^# \{0,1\}//p' "$0" >&2
    exit 2
    ;;
esac
