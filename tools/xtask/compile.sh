#!/bin/bash
# The compiler of .ci/run (RUSTC_WORKSPACE_WRAPPER): cargo gives it rustc's path and arguments. Clippy checks and
# compiles in one pass; `cargo clippy` beside a build would do the first half of it twice. Code that only tests
# contain is not optimized, because that takes longer than to run it as it is. Bash passes on variables whose names have a
# hyphen, such as CARGO_BIN_EXE_blockhaul-simulate.
rustc=$1
shift
case " $* " in
*' --test '*)
    for argument; do
        shift
        [ "$argument" != opt-level=1 ] || argument=opt-level=0
        set -- "$@" "$argument"
    done
    ;;
esac
exec "${rustc%rustc}clippy-driver" "$rustc" "$@"
