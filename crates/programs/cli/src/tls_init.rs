//! `blockhaul tls`: makes keys and certificates.

use std::path::PathBuf;

use crate::args;
use crate::exit::{CommandFailure, CommandResult, FAILED, USAGE};
use crate::out;

/// Runs `blockhaul tls`.
pub fn run(args: &args::TlsArgs) -> CommandResult {
    match &args.command {
        args::TlsCommand::Init(args) => init(args),
    }
}

fn init(args: &args::TlsInit) -> CommandResult {
    let failed = |error: blockhaul_tls::TlsError| {
        let status =
            if error.kind() == blockhaul_tls::TlsErrorKind::Setup { USAGE } else { FAILED };
        CommandFailure::new(status, error.to_string())
    };
    if !args.psk.is_empty() {
        blockhaul_tls::make::keys(&args.place, &args.psk).map_err(failed)?;
        return tell(args, std::slice::from_ref(&args.place));
    }
    let hosts = if args.host.is_empty() { own_names() } else { args.host.clone() };
    let wanted = blockhaul_tls::make::CertificateConfig {
        hosts,
        client: args.client.clone(),
        days: args.days,
    };
    let files = blockhaul_tls::make::certificates(&args.place, &wanted).map_err(failed)?;
    tell(args, &files)
}

/// Prints the names of the files.
fn tell(args: &args::TlsInit, files: &[PathBuf]) -> CommandResult {
    let names: Vec<_> = files.iter().map(|file| file.display().to_string()).collect();
    let lines = names.iter().map(|name| format!("{name}\n"));
    out::result(args.json, &serde_json::json!({ "files": names }), &lines.collect::<String>())?;
    Ok(0)
}

/// The names of this machine, and its loopback addresses.
fn own_names() -> Vec<String> {
    let name = rustix::system::uname().nodename().to_string_lossy().into_owned();
    let local = ["localhost", "127.0.0.1", "::1"].map(str::to_string);
    let own = Some(name).filter(|name| !name.is_empty() && name != "localhost");
    own.into_iter().chain(local).collect()
}
