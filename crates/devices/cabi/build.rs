//! Builds the shim for C's variadic functions, and exports the plugin interface from test programs.

fn main() {
    println!("cargo:rerun-if-changed=src/shim.c");
    // Debian's directories are named by the architecture's triplet.
    let architecture = std::env::var("CARGO_CFG_TARGET_ARCH").unwrap_or_default();
    println!("cargo:rustc-env=CABI_TRIPLET={architecture}-linux-gnu");
    cc::Build::new()
        .file("src/shim.c")
        .warnings(true)
        .link_lib_modifier("+whole-archive")
        .compile("blockhaul_cabi_shim");
    for pattern in ["nbdkit_*", "blockhaul_*"] {
        println!("cargo:rustc-link-arg=-Wl,--export-dynamic-symbol={pattern}");
    }
}
