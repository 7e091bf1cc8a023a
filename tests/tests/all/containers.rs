//! Programs in separate PID namespaces, as in containers: their parents and clients have no process
//! number there.

use std::process::{Command, Output};

use blockhaul_testkit::tools::ScratchDir;
use blockhaul_tests::{LIMIT, bounded, lossy, program, text};

/// Runs a line of shell with the program in `$0` and a socket that is not there yet in `$1`. In it,
/// `$apart` runs a command in a PID namespace of its own, in a session without a terminal which began
/// outside.
fn run(scratch: &ScratchDir, line: &str) -> Output {
    let root = rustix::process::getuid().is_root();
    let flags = if root { "-pf" } else { "-rpf" };
    let line = format!("apart='setsid unshare {flags} --kill-child'\n{line}");
    let mut command = Command::new("sh");
    command.args(["-ec", &line]).arg(program()).arg(scratch.socket("s"));
    bounded(&mut command, LIMIT)
}

/// Whether namespaces may be made here.
fn possible(scratch: &ScratchDir) -> bool {
    let output = run(scratch, "$apart true");
    let possible = output.status.success();
    if !possible {
        println!("no PID namespace of its own: {}", lossy(&output.stderr));
    }
    possible
}

#[test]
fn a_session_that_began_outside_is_none_of_ours() {
    let scratch = ScratchDir::new().unwrap();
    if !possible(&scratch) {
        return;
    }
    let target = scratch.file("target");
    let line = format!(
        "$apart \"$0\" serve memory:1M --run \"$0 info --size \\$uri && $0 copy \\$uri {}\"",
        text(&target)
    );
    let output = run(&scratch, &line);
    assert!(output.status.success(), "{}: {}", output.status, lossy(&output.stderr));
    assert_eq!(lossy(&output.stdout).lines().next(), Some("1048576"));
    assert_eq!(std::fs::metadata(&target).unwrap().len(), 1 << 20);
}

#[test]
fn a_client_from_outside_has_a_user_and_no_process() {
    let scratch = ScratchDir::new().unwrap();
    if !possible(&scratch) {
        return;
    }
    // Who makes the namespace is root in it.
    for (rules, admitted) in [
        ("allow=uid:0&deny=all", true),
        ("deny=uid:0", false),
        ("deny=pid:0,pid:1", true),
        ("allow=pid:0,pid:1&deny=all", false),
    ] {
        let line = format!(
            "$apart \"$0\" serve -f -U \"$1\" --layer \"ip?{rules}\" memory:1M &\n\
             trap \"kill -KILL $!\" EXIT\n\
             until [ -e \"$1\" ]; do sleep 0.01; done\n\
             \"$0\" info --size \"nbd+unix://?socket=$1\""
        );
        let output = run(&scratch, &line);
        assert_eq!(output.status.success(), admitted, "{rules}: {}", lossy(&output.stderr));
        std::fs::remove_file(scratch.socket("s")).ok();
    }
}
