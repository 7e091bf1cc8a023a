//! One fuzzer for all parsers: `BLOCKHAUL_FUZZ_TARGET` names the entry of
//! `blockhaul_wire::fuzz::TARGETS` that gets the inputs. A new target needs no change here.

#![no_main]

use std::sync::OnceLock;

use libfuzzer_sys::fuzz_target;

static TARGET: OnceLock<fn(&[u8])> = OnceLock::new();

fuzz_target!(
    init: {
        TARGET.get_or_init(chosen);
    },
    |data: &[u8]| TARGET.get_or_init(chosen)(data)
);

fn chosen() -> fn(&[u8]) {
    let name = std::env::var("BLOCKHAUL_FUZZ_TARGET").unwrap_or_default();
    let found = blockhaul_wire::fuzz::TARGETS.iter().find(|(known, _)| *known == name);
    let Some((_, target)) = found else {
        let known: Vec<&str> =
            blockhaul_wire::fuzz::TARGETS.iter().map(|(name, _)| *name).collect();
        eprintln!("BLOCKHAUL_FUZZ_TARGET is '{name}', not one of: {}", known.join(", "));
        std::process::exit(2);
    };
    *target
}
