#!/usr/bin/env bash
# Puts --tsp-size into the training scripts of a Megatron-LM checkout, or takes it out again:
#
#     scripts/patch_megatron.sh CHECKOUT
#     scripts/patch_megatron.sh --revert CHECKOUT
#
# Run twice it does nothing the second time. It changes nothing unless all of this holds: the
# checkout is of a version that patches/ has, its tracked files are as committed, and each file to
# be patched is, to the byte, the one that the patch was made for. Exit code 2 if not.
set -euo pipefail

fail() {
    printf 'patch_megatron: error: %s\n' "$*" >&2
    exit 2
}

revert=
[ "${1:-}" != --revert ] || { revert=1; shift; }
[ $# -eq 1 ] || fail "usage: scripts/patch_megatron.sh [--revert] CHECKOUT"
here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

[ -d "$1" ] || fail "no folder $1"
checkout=$(cd "$1" && pwd)
top=$(git -C "$checkout" rev-parse --show-toplevel 2>/dev/null) || fail "$1 is not a git checkout"
[ "$(cd "$top" && pwd -P)" = "$(cd "$checkout" && pwd -P)" ] ||
    fail "$1 is inside the checkout $top: give that"

info=$checkout/megatron/core/package_info.py
[ -f "$info" ] || fail "$1 is not Megatron-LM: it has no megatron/core/package_info.py"
number() { sed -n "s/^$1 = \([0-9][0-9]*\).*/\1/p" "$info"; }
version=core_v$(number MAJOR).$(number MINOR).0
[ -d "$here/patches/$version" ] || {
    known=$(cd "$here/patches" && printf '%s ' core_v*/)
    fail "no patches for $version; there are some for ${known//\//}"
}
patches=("$here/patches/$version"/*.patch)

# Which file a patch is of, and the hashes of that file without and with it.
target() { sed -n 's|^+++ b/||p' "$1"; }
hashes() { sed -n 's/^index \([0-9a-f]*\)\.\.\([0-9a-f]*\).*/\1 \2/p' "$1"; }

with=() without=() files=()
for patch in "${patches[@]}"; do
    file=$(target "$patch")
    files+=("$file")
    read -r before after < <(hashes "$patch")
    [ -f "$checkout/$file" ] || fail "$1 has no $file"
    if [ ! -w "$checkout/$file" ] || [ ! -w "$checkout" ]; then
        fail "$checkout/$file is not writable"
    fi
    case $(git -C "$checkout" hash-object --no-filters -- "$file") in
        "$before") without+=("$file") ;;
        "$after") with+=("$file") ;;
        *) fail "$file is not that of $version; use python -m megatron_tsp.run, or undo its changes" ;;
    esac
done
if [ ${#with[@]} -gt 0 ] && [ ${#without[@]} -gt 0 ]; then
    fail "half applied: ${with[*]} is patched and ${without[*]} is not; git checkout ${with[*]}"
fi
others=("${with[@]/#/:(exclude)}")
dirty=$(git -C "$checkout" status --porcelain --untracked-files=no -- . "${others[@]}")
[ -z "$dirty" ] || fail "uncommitted changes in $1: $(head -n 1 <<<"$dirty"); commit or stash them"

options=(--unidiff-zero --whitespace=nowarn)
if [ -n "$revert" ]; then
    [ ${#with[@]} -gt 0 ] || { echo "patch_megatron: nothing to revert"; exit 0; }
    options+=(--reverse)
else
    [ ${#without[@]} -gt 0 ] || { echo "patch_megatron: applied already"; exit 0; }
fi
git -C "$checkout" apply --check "${options[@]}" "${patches[@]}" ||
    fail "git cannot apply the patches; nothing is changed"
git -C "$checkout" apply "${options[@]}" "${patches[@]}" ||
    fail "git failed while it applied the patches; git -C $checkout checkout ${files[*]}"
for patch in "${patches[@]}"; do
    file=$(target "$patch")
    read -r before after < <(hashes "$patch")
    [ -n "$revert" ] || before=$after
    [ "$(git -C "$checkout" hash-object --no-filters -- "$file")" = "$before" ] ||
        fail "$file is not as it should be; git -C $checkout checkout ${files[*]}"
done
echo "patch_megatron: ${revert:+un}patched ${files[*]} in $checkout"
