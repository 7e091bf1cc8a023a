//! The example fulfils the contract of devices, and its own program serves it.
#![allow(clippy::unwrap_used)]

use std::ffi::OsStr;
use std::process::Command;
use std::time::Duration;

use blockhaul_block::DeviceExt as _;
use blockhaul_catalog::{DeviceSpec, Intent, Registry};
use blockhaul_io::{Data, Runtime};
use blockhaul_testkit::conform::{self, ConformOptions, InitialContent};
use blockhaul_testkit::tools::PeerServer;

#[test]
fn the_device_keeps_the_contract() {
    let latency = Duration::from_millis(2);
    let options = ConformOptions {
        latency: Some(latency),
        rounds: 1,
        steps: 30,
        ..ConformOptions::default()
    };
    conform::check("slow-memory", options.content(InitialContent::Zeroes), || async {
        let registry = Registry { backends: blockhaul_examples::all(), ..Registry::default() };
        registry.open(&spec("slow-memory:3M?delay=2ms"), Vec::new(), Intent::WRITE).await
    });
}

#[test]
fn the_program_serves_what_is_written() {
    let scratch = tempfile::tempdir().unwrap();
    let socket = scratch.path().join("s");
    let mut program = Command::new(env!("CARGO_BIN_EXE_slow-memory"));
    program.arg(&socket).args(["slow-memory:9M?delay=1ms", "rate?rate=1G"]);
    let program = PeerServer::start(program, &socket).unwrap();
    let uri = program.uri("");
    let runtime = Runtime::start(&blockhaul_io::RuntimeConfig::default()).unwrap();
    let answer = runtime.block_on(move || async move {
        let backends = blockhaul_client::all(blockhaul_client::ConnectOptions::default());
        let registry = Registry { backends, ..Registry::default() };
        let stack = registry.open(&spec(&uri), Vec::new(), Intent::WRITE).await?;
        let device = stack.device();
        let written: Vec<u8> = (0..3 << 20).map(|index: usize| (index % 251) as u8).collect();
        device.write(2_000_001, Data::copy_of(&written)).await?;
        device.flush().await?;
        let read = device.read(2_000_001, written.len()).await?;
        Ok::<_, blockhaul_block::Error>((device.facts().size, read.bytes() == &written[..]))
    });
    drop(program);
    assert_eq!(answer.unwrap(), (9 << 20, true));
}

#[test]
fn the_program_says_what_is_wrong() {
    for (args, code, wanted) in [
        (&["s"][..], 2, "usage:"),
        (&["s", "slow-memory:x"], 1, "x"),
        (&["s", "slow-memory:1M?delay=soon"], 1, "delay"),
        (&["/none/s", "slow-memory:1M"], 1, "slow-memory: "),
    ] {
        let output = Command::new(env!("CARGO_BIN_EXE_slow-memory")).args(args).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(code), "{args:?}: {said}");
        assert!(said.contains(wanted), "{args:?}: {said}");
    }
}

fn spec(text: &str) -> DeviceSpec {
    DeviceSpec::parse(OsStr::new(text)).unwrap()
}
