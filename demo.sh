#!/usr/bin/env bash
# Builds kvferry and shows it at work: a prefill and a decode worker answer a question, with the timing of the KV's
# handoff between them. Needs Rust and a C linker; NIXL is fetched if it can be. Arguments go to `bench demo`, for
# instance: ./demo.sh --question "How does the KV cache move?"   ./demo.sh --keep
set -euo pipefail

repo=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
say() { printf '\n== %s\n' "$*" >&2; }
die() {
    printf 'demo: %s\n' "$*" >&2
    exit 1
}

command -v cargo >/dev/null || die "cargo is missing: install Rust from https://rustup.rs, then open a new shell"
command -v cc >/dev/null || die "there is no C linker (cc): apt-get install build-essential"
# Cargo takes a relative folder as relative to where it runs, which is the repository below.
case ${CARGO_TARGET_DIR:-/} in
/*) ;;
*) export CARGO_TARGET_DIR="$PWD/$CARGO_TARGET_DIR" ;;
esac

say "1/3 NIXL, the library that moves the KV"
"$repo/scripts/nixl-setup" >&2 ||
    say "NIXL could not be set up (see above): going on with the plain socket transport, which needs no library"

say "2/3 building (the first time takes minutes)"
# In the repository, so that its toolchain file is heeded.
(cd "$repo" && cargo build --release --locked --bin serve --bin bench) >&2
# Asked for rather than guessed: it may come from the environment or from Cargo's own configuration.
target=$(cd "$repo" && cargo metadata --format-version 1 --no-deps --locked --offline |
    sed -n 's/.*"target_directory":"\([^"]*\)".*/\1/p')
[ -x "$target/release/bench" ] || die "no bench in '$target/release' after the build"

say "3/3 bench demo"
status=0
"$target/release/bench" demo "$@" || status=$?
say "took $((SECONDS / 60)) min $((SECONDS % 60)) s in all"
exit "$status"
