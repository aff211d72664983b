#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Installs HAMi from an offline bundle (`./dev images --bundle`): checks every file, imports the images into containerd,
# applies the rendered manifests. Needs sha256sum; ctr on nodes; kubectl where manifests are applied.
set -eu

usage() {
    cat <<'END'
usage: install.sh [--overlay dev|prod] [--import-only | --apply-only] [--dry-run]

Check the files of this bundle, import its images into this node's containerd, and apply its manifests.

  --overlay NAME   manifests to apply: dev (default) or prod
  --import-only    only import the images: run this on every node
  --apply-only     only apply the manifests: run this once, with access to the cluster
  --dry-run        check the files, print the other commands, change nothing

CTR and KUBECTL name these programs with their options, such as CTR="ctr --address /run/k3s/containerd/containerd.sock".
END
}

fail() {
    printf '%s\n' "install.sh: $*" >&2
    exit 1
}

overlay=dev imports=yes applies=yes dry_run=no
while [ $# -gt 0 ]; do
    case $1 in
    --overlay)
        [ $# -gt 1 ] || fail "--overlay needs dev or prod"
        overlay=$2
        shift
        ;;
    --import-only) applies=no ;;
    --apply-only) imports=no ;;
    --dry-run) dry_run=yes ;;
    --help | -h)
        usage
        exit 0
        ;;
    *)
        usage >&2
        exit 2
        ;;
    esac
    shift
done
[ "$imports$applies" != nono ] || fail "--import-only and --apply-only exclude each other"

cd -- "$(dirname -- "$0")"
manifest=manifests/$overlay.yaml
[ -f "$manifest" ] || fail "no overlay $overlay in this bundle: write --overlay dev or --overlay prod"

# Programs may have options, so these words are split.
ctr=${CTR:-ctr} kubectl=${KUBECTL:-kubectl}
[ "$imports" = no ] || command -v "${ctr%% *}" >/dev/null ||
    fail "${ctr%% *} is not in PATH: install containerd's ctr, or name it: CTR=/path/to/ctr"
[ "$applies" = no ] || command -v "${kubectl%% *}" >/dev/null ||
    fail "${kubectl%% *} is not in PATH: install kubectl, or name it: KUBECTL=/path/to/kubectl"

run() {
    if [ "$dry_run" = yes ]; then
        printf '%s\n' "would run: $*"
    else
        "$@"
    fi
}

sha256sum --quiet --check SHA256SUMS ||
    fail "a file differs from SHA256SUMS: copy the bundle again; nothing was changed"

if [ "$imports" = yes ]; then
    while read -r archive reference digest; do
        # shellcheck disable=SC2086
        run $ctr --namespace k8s.io images import "$archive" </dev/null ||
            fail "$archive was not imported: is containerd running, and are you root?"
        # The manifests name images by digest: kubelet finds them by that name only.
        # shellcheck disable=SC2086
        run $ctr --namespace k8s.io images tag --force "$reference" "${reference%:*}@$digest" </dev/null ||
            fail "$reference is not what $archive holds: make the bundle again"
    done <images.txt
fi

if [ "$applies" = yes ]; then
    # shellcheck disable=SC2086
    run $kubectl apply --filename "$manifest" ||
        fail "$manifest was not applied: correct the cause above and run it again with --apply-only"
fi
