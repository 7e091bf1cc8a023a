//! One fuzzer for everything that reads bytes from outside: `BLOCKHAUL_FUZZ_TARGET` names the target.
//! The targets are in `blockhaul_wire::fuzz::TARGETS` and in `others`.

#![no_main]

use std::sync::OnceLock;

use libfuzzer_sys::fuzz_target;

mod others;

static TARGET: OnceLock<fn(&[u8])> = OnceLock::new();

fuzz_target!(
    init: {
        TARGET.get_or_init(chosen);
    },
    |data: &[u8]| TARGET.get_or_init(chosen)(data)
);

fn chosen() -> fn(&[u8]) {
    let name = std::env::var("BLOCKHAUL_FUZZ_TARGET").unwrap_or_default();
    let all = || blockhaul_wire::fuzz::TARGETS.iter().chain(others::TARGETS);
    let Some((_, target)) = all().find(|(known, _)| *known == name) else {
        let known: Vec<&str> = all().map(|(name, _)| *name).collect();
        eprintln!("BLOCKHAUL_FUZZ_TARGET is '{name}', not one of: {}", known.join(", "));
        std::process::exit(2);
    };
    *target
}
