//! Copies that are stopped and continued, as from a shell with Ctrl-Z and `fg`, or with the machine.

use std::fs;
use std::process::{Command, Stdio};
use std::time::Duration;

use blockhaul_testkit::image;
use blockhaul_testkit::tools::{ScratchDir, until, wait_within};
use blockhaul_tests::{LIMIT, assert_same, blockhaul, done, garbage, lossy, serve, text};

/// While it was stopped the server has answered. It is not given up for a silence that there was not.
#[test]
fn a_copy_that_was_stopped_for_longer_than_its_timeout_goes_on() {
    let scratch = ScratchDir::new().unwrap();
    let source = scratch.file("source");
    let target = scratch.file("target");
    garbage(&source, 32 << 20).unwrap();
    // A request is in flight whenever it is stopped.
    let server = serve(&scratch, "s", &["-r", "--layer", "delay?read=250ms", text(&source)]);
    let fixed = ["--request-size=1M", "-R2", "-C1"];
    let mut copy = blockhaul(&["copy", "--timeout=6", "--retries=0"]);
    let copy = copy.args(fixed).args([&server.uri(""), text(&target)]).stderr(Stdio::piped());
    let mut copy = copy.spawn().unwrap();
    until("something is copied", || image::space(&target).map_or(0, |space| space.allocated) > 0);
    let signal = |name| done(Command::new("kill").args(["-s", name, &copy.id().to_string()]));
    signal("STOP");
    // Each of its threads stops when it is its turn.
    let stat = format!("/proc/{}/stat", copy.id());
    until("it stops under way", || fs::read_to_string(&stat).unwrap().contains(") T "));
    // Longer than its timeout, which itself is longer than a busy machine holds a server up.
    std::thread::sleep(Duration::from_secs(8));
    signal("CONT");
    assert!(wait_within(&mut copy, LIMIT).is_some(), "it does not go on");
    let output = copy.wait_with_output().unwrap();
    assert!(output.status.success(), "{}", lossy(&output.stderr));
    assert_same(&source, &target, "a copy that was stopped");
}
