//! `blockhaul doctor`: whether this machine has what devices and commands need.

use blockhaul_inspect::{HostFact, HostState, host_facts};
use serde_json::json;

use crate::exit::{CommandResult, FAILED};
use crate::{args, out};

/// Runs `blockhaul doctor`.
pub fn run(args: &args::DoctorArgs) -> CommandResult {
    let facts = host_facts();
    let success = facts.iter().all(|fact| fact.state != HostState::Wrong);
    let version = env!("CARGO_PKG_VERSION");
    let text = if args.json {
        format!("{:#}\n", json!({ "version": version, "success": success, "facts": facts }))
    } else {
        let lines = facts.iter().map(line).collect::<String>();
        format!("good     blockhaul: {version}\n{lines}")
    };
    out::print(text.as_bytes())?;
    Ok(if success { 0 } else { FAILED })
}

/// One line: state, name, value and remedy.
fn line(fact: &HostFact) -> String {
    let state = match fact.state {
        HostState::Good => "good",
        HostState::Limited => "limited",
        HostState::Wrong => "wrong",
    };
    let remedy = fact.remedy.as_ref().map(|remedy| format!("; {remedy}")).unwrap_or_default();
    format!("{state:<8} {}: {}{remedy}\n", fact.name, out::one_line(&fact.value))
}
