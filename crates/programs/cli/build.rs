//! Exports the functions that plugins call (crate `cabi`) from the program.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    for pattern in ["nbdkit_*", "blockhaul_*"] {
        println!("cargo:rustc-link-arg-bins=-Wl,--export-dynamic-symbol={pattern}");
    }
}
