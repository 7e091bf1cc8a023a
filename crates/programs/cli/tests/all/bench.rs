//! `blockhaul bench device` as people start it.

use std::process::Command;
use std::time::{Duration, Instant};

fn blockhaul() -> Command {
    Command::new(env!("CARGO_BIN_EXE_blockhaul"))
}

#[test]
fn a_device_behind_a_command_is_measured() {
    let output = blockhaul()
        .args(["bench", "device", "--time", "1s", "--json", "--max-connections", "2"])
        .args(["--max-requests", "4", "[", "blockhaul", "serve", "sample:8M", "]"])
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let found: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((&found["size"], &found["own_connections"]), (&(8 << 20).into(), &true.into()));
    let command = found["reading_advice"]["command"].as_str().unwrap();
    assert!(command.ends_with("[ blockhaul serve sample:8M ] TARGET"), "{command}");
    let keeps = found["reading_advice"]["keep_defaults"].as_bool().unwrap();
    assert_eq!(command.contains(" --connections="), !keeps, "a server has them: {command}");
    let refused = blockhaul().args(["bench", "device", "/no/such/device"]).output().unwrap();
    assert_eq!(refused.status.code(), Some(3), "as of every command that cannot open a device");
    let refused = blockhaul().args(["bench", "device", "odd:x"]).output().unwrap();
    assert_eq!(refused.status.code(), Some(2));
}

/// A device that does one request after the other, each in 200 ms, would need many minutes for all
/// measurements; one that does not answer is not waited for for ever.
#[test]
fn slow_devices_are_measured_as_far_as_the_time_does_and_dead_ones_given_up() {
    let bench = |time: &str, pread: &str| {
        let device = format!("eval:get_size=echo 64M&pread={pread}");
        let begun = Instant::now();
        let output = blockhaul().args(["bench", "device", "--time", time, &device]).output();
        assert!(begun.elapsed() < Duration::from_secs(120), "{:?}", begun.elapsed());
        output.unwrap()
    };
    let output = bench("5s", "sleep 0.2; head -c $3 /dev/zero");
    let said = output.stdout;
    let heard = output.stderr;
    let said = String::from_utf8_lossy(&said);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&heard));
    assert!(
        said.contains("left out for lack of time: ") && said.contains("For reading:"),
        "{said}"
    );
    // It fits a terminal, but for the command, which is copied as a whole.
    let long = said.lines().find(|line| line.len() > 80 && !line.contains("blockhaul copy"));
    assert_eq!(long, None, "{said}");
    let output = bench("1s", "sleep 60; head -c $3 /dev/zero");
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("a small read: no answer for"), "{said}");
}
