#!/bin/sh
# Installs the named Debian packages that are missing, if this machine lets us. Never fails: what
# stays missing is said, and the tests that need it skip with a reason.
missing=""
for package in "$@"; do
    dpkg -s "$package" >/dev/null 2>&1 || missing="$missing $package"
done
[ -n "$missing" ] || exit 0
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
    echo "installing$missing ..."
    export DEBIAN_FRONTEND=noninteractive
    apt-get -qq update >/dev/null 2>&1
    # shellcheck disable=SC2086 # the names are meant to be split
    apt-get -qq install -y --no-install-recommends $missing >/dev/null 2>&1 && exit 0
fi
echo "not installed, and the tests that need them will skip:$missing"
exit 0
