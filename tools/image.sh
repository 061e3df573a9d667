#!/usr/bin/env bash
# The steps of the Dockerfile; the tests take them too, where there is no container runtime.
#
#   tools/image.sh user ROOT                      the user that every role runs as, and its folder
#   tools/image.sh install SOURCE PREFIX EXTRAS   popmq and what it needs, for that user to read
set -euo pipefail

# As in the operator's pods (operator/popmq/operator/resources/pods.py).  It has a name because
# kopf asks for the name of its user, and dies where there is none.
user=10001

case ${1:-} in
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
    python3 -m pip --python "$prefix/bin/python" install --quiet "$source[$extras]"
    ;;
*)
    sed -n '2,5s/^# \{0,1\}//p' "$0" >&2
    exit 2
    ;;
esac
