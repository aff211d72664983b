#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Lets apt install from the archive as it was when the base image was made: Debian's images name that snapshot in a
# comment above each address of their sources. Fails where the file names none.
set -eu

sources=$1
if ! grep -q '^# http[^ ]*snapshot[^ ]*$' "$sources"; then
    echo "$sources names no snapshot: take a Debian image as BASE, or build with --build-arg APT=current" >&2
    exit 1
fi
sed -i -e '/^# http[^ ]*snapshot[^ ]*$/ { s/^# /URIs: /; n; d; }' "$sources"
