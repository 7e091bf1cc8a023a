//! `blockhaul bench` alone, for work on the harness: `cargo run -p blockhaul-bench --example bench`.

use std::process::ExitCode;

use clap::Parser;

#[derive(Parser)]
#[command(name = "bench")]
struct Cli {
    #[command(flatten)]
    args: bench::Args,
}

fn main() -> ExitCode {
    bench::main(Cli::parse().args)
}
