#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Makes the server read configuration and certificates again whenever one of the given files has changed; clients stay
# connected. Runs beside the server, in its process namespace and under its user. The first time it does so whatever was
# there: a file may have changed since the server read it.
set -eu

state() { cat "$@" | md5sum; }

known=
while :; do
    sleep "${EVERY_S:-10}"
    now=$(state "$@")
    if [ "$now" != "$known" ] && kill -HUP "$(cat "$PID_FILE")"; then
        known=$now
    fi
done
