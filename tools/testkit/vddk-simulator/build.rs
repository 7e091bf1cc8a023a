//! Builds the function that calls log functions, which take a `va_list`.

fn main() {
    println!("cargo:rerun-if-changed=src/log.c");
    cc::Build::new().file("src/log.c").warnings(true).compile("vddk_simulator_log");
}
