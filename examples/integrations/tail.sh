#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Prints events as they come, subject and payload on one line, speaking the NATS protocol over a plain TCP connection: no
# client library, no program but bash. At least once: an event is acknowledged after it was printed.
set -euo pipefail
LC_ALL=C # lengths are bytes
host=${NATS_HOST:-127.0.0.1} port=${NATS_PORT:-4222}
consumer=${HAMI_CONSUMER:-tail} filter=${HAMI_FILTER:-hami.v1.event.>} batch=50

exec 3<>"/dev/tcp/$host/$port"
send() { printf '%s\r\n' "$@" >&3; }
publish() { send "PUB $1 ${2:+$2 }${#3}" "$3"; }
pull() {
    left=$batch
    publish "\$JS.API.CONSUMER.MSG.NEXT.HAMI_EVENTS.$consumer" events "{\"batch\":$batch,\"expires\":30000000000}"
}

send "CONNECT {\"verbose\":false,\"pedantic\":false,\"headers\":true,\"no_responders\":true,\"lang\":\"bash\",\"version\":\"1\",\"protocol\":1${NATS_USER:+,\"user\":\"$NATS_USER\",\"pass\":\"$NATS_PASSWORD\"}}"
send "SUB events 1" "SUB made 2"
publish "\$JS.API.CONSUMER.DURABLE.CREATE.HAMI_EVENTS.$consumer" made \
    "{\"stream_name\":\"HAMI_EVENTS\",\"config\":{\"durable_name\":\"$consumer\",\"ack_policy\":\"explicit\",\"filter_subject\":\"$filter\",\"ack_wait\":2000000000}}"
while IFS= read -r line <&3; do
    read -r verb subject _ rest <<<"${line%$'\r'}"
    case $verb in
    PING) send PONG ;;
    -ERR) printf '%s\n' "$subject $rest" >&2 && exit 1 ;;
    MSG | HMSG)
        read -ra sizes <<<"$rest" # [reply] [length of the headers] length of all
        IFS= read -rN "${sizes[-1]}" content <&3
        IFS= read -r _ <&3
        if [[ $subject == made ]]; then
            [[ $content != *'"error"'* ]] || { printf '%s\n' "$content" >&2 && exit 1; }
            pull
        elif [[ ${sizes[0]} == \$JS.ACK.* ]]; then
            skip=0
            [[ $verb == MSG ]] || skip=${sizes[1]}
            printf '%s %s\n' "$subject" "${content:skip}"
            publish "${sizes[0]}" "" +ACK
            ((left -= 1)) || pull
        elif [[ $content == NATS/1.0\ 40[48]* ]]; then
            pull # the last request has run out without so many events
        else
            printf '%s\n' "${content%%$'\r'*}" >&2 && exit 1
        fi
        ;;
    esac
done
