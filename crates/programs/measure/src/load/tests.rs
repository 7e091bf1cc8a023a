//! Loads on real servers.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use blockhaul_block::{Device, DeviceExt as _};
use blockhaul_catalog::{DeviceSpec, Intent, Registry};
use blockhaul_io::{Listener, Pool};
use blockhaul_testkit::tools::until;
use clap::Parser;

use super::*;

#[derive(Parser)]
struct Cli {
    #[command(flatten)]
    args: LoadArgs,
}

fn registry() -> Registry {
    let mut backends = blockhaul_backends::all();
    backends.extend(blockhaul_client::all(blockhaul_client::ConnectOptions::default()));
    Registry {
        backends,
        path: blockhaul_backends::PATH_SCHEME,
        command: "command",
        ..Registry::default()
    }
}

fn load(words: &[&str]) -> Result<(String, u8)> {
    let all = ["load"].iter().chain(words);
    let cli = Cli::try_parse_from(all).map_err(|error| MeasureError::usage(error.to_string()))?;
    cli.args.run(&DeviceContext { registry: registry(), spec: &|word| DeviceSpec::parse(word) })
}

fn json(words: &[&str]) -> serde_json::Value {
    let (text, status) = load(&[words, &["--json"]].concat()).unwrap();
    assert_eq!(status, 0, "{text}");
    serde_json::from_str(&text).unwrap()
}

/// A server of our own with a device in this process.
struct Served {
    runtime: Runtime,
    server: Arc<blockhaul_server::Server>,
    device: Arc<dyn Device>,
    uri: String,
    _dir: tempfile::TempDir,
}

impl Served {
    fn new(device: &str, intent: Intent) -> Served {
        let dir = tempfile::tempdir().unwrap();
        let path: PathBuf = dir.path().join("s");
        let uri = format!("nbd+unix:///?socket={}", path.display());
        let runtime =
            Runtime::start(&RuntimeConfig { workers: 1, engine: IoEngine::Auto }).unwrap();
        let spec = DeviceSpec::parse(device.as_ref()).unwrap();
        let (server, device) = runtime.block_on(move || async move {
            let stack = registry().open(&spec, Vec::new(), intent).await.unwrap();
            let device = stack.device().clone();
            let server = blockhaul_server::Server::new(blockhaul_server::ServerConfig {
                exports: blockhaul_catalog::SharedDevice::new("", "", device.clone()),
                limits: blockhaul_server::Limits::default(),
                offers: blockhaul_server::Offers::default(),
                pool: Pool::new(64 << 20),
                tls: blockhaul_server::TlsPolicy::Off,
            });
            drop(blockhaul_io::spawn(server.clone().listen(Listener::bind_unix(&path).unwrap())));
            (server, device)
        });
        Served { runtime, server, device, uri, _dir: dir }
    }

    fn read(&self, at: u64, len: usize) -> Vec<u8> {
        let device = self.device.clone();
        self.runtime
            .block_on(move || async move { device.read(at, len).await.unwrap().bytes().to_vec() })
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        let server = self.server.clone();
        self.runtime.block_on(move || async move { server.stop(Duration::from_secs(1)).await });
    }
}

#[test]
fn so_many_requests_are_made_and_counted() {
    let served = Served::new("memory:1M", Intent::WRITE);
    for pattern in ["random", "sequential"] {
        let found = json(&[
            &served.uri,
            "--count",
            "1003",
            "--connections",
            "3",
            "--requests",
            "7",
            "--pattern",
            pattern,
        ]);
        assert_eq!(found["requests"], 1003, "{found}");
        assert_eq!(found["bytes"], 1003 * 4096, "{found}");
        assert_eq!(found["latency"]["count"], 1003, "{found}");
        assert!(found["latency"]["median_us"].as_f64().unwrap() > 0.0, "{found}");
        assert!(found["own_cpu_s"].as_f64().unwrap() > 0.0, "{found}");
        assert_eq!(found["errors"], 0, "{found}");
    }
}

#[test]
fn reads_write_nothing_and_writes_stay_in_their_span() {
    let served = Served::new("memory:1M", Intent::WRITE);
    json(&[&served.uri, "--count", "100"]);
    assert!(served.read(0, 1 << 20).iter().all(|byte| *byte == 0));
    let in_order = ["--pattern", "sequential", "--span", "512k", "--size", "16k", "--count", "32"];
    let words = [&[served.uri.as_str(), "--write", "--connections", "2"][..], &in_order].concat();
    let found = json(&words);
    assert_eq!((&found["bytes"], &found["reads_percent"]), (&(512 << 10).into(), &0.into()));
    let content = served.read(0, 1 << 20);
    assert!(content[..512 << 10].chunks(16 << 10).all(|part| *part == content[..16 << 10]));
    assert!(content[..16 << 10].chunks(64).all(|part| part.iter().any(|byte| *byte != 0)));
    assert!(content[512 << 10..].iter().all(|byte| *byte == 0));
}

#[test]
fn large_requests_and_both_kinds_at_once() {
    let served = Served::new("memory:32M", Intent::WRITE);
    let found = json(&[
        &served.uri,
        "--mix",
        "50",
        "--size",
        "2M",
        "--count",
        "60",
        "--connections",
        "2",
        "--requests",
        "8",
    ]);
    assert_eq!(found["bytes"], 60 * (2 << 20), "{found}");
    let (text, status) = load(&[&served.uri, "--time", "50ms", "--size", "256k"]).unwrap();
    assert_eq!(status, 0);
    assert!(text.contains("8 connections, 64 requests on each, random reads of 262144"), "{text}");
    assert!(text.contains("own CPU") && text.contains("errors     0"), "{text}");
}

#[test]
fn what_a_server_refuses_is_counted_and_told() {
    // Its file is shorter than it was when it was opened: reads fail.
    let file = tempfile::NamedTempFile::new().unwrap();
    file.as_file().set_len(1 << 20).unwrap();
    let served = Served::new(&format!("file:{}", file.path().display()), Intent::READ);
    file.as_file().set_len(0).unwrap();
    let (text, status) = load(&[&served.uri, "--count", "10", "--connections", "1"]).unwrap();
    assert_eq!(status, 1);
    assert!(text.contains("errors     10: 10 input/output error"), "{text}");
}

#[test]
fn a_server_that_dies_is_an_error() {
    let served = Served::new("memory:1M", Intent::READ);
    let server = served.server.clone();
    let remote = served.runtime.workers()[0].clone();
    let stopping = std::thread::spawn(move || {
        let asks = |client: &blockhaul_server::ConnectedClient| {
            client.counts.requests.iter().sum::<u64>() > 0
        };
        until("requests are on their way", || {
            server.clients().iter().filter(|client| asks(client)).count() >= 2
        });
        drop(remote.spawn(move || async move { server.stop(Duration::from_secs(1)).await }));
    });
    let error = load(&[&served.uri, "--time", "60s", "--connections", "2"]).unwrap_err();
    stopping.join().unwrap();
    let text = error.to_string();
    assert!(text.contains("connection 1: "), "{text}");
    assert!(text.contains("closed the connection after") || text.contains("cannot"), "{text}");
    assert_eq!(error.status(), 1);
}

#[test]
fn wrong_options_are_refused_with_a_reason() {
    let served = Served::new("zero:1M", Intent::READ);
    let uri = served.uri.as_str();
    for (words, status, why) in [
        (&[uri, "--read", "--write"][..], 2, "cannot be used with"),
        (&[uri, "--time", "1s", "--count", "5"], 2, "cannot be used with"),
        (&[uri, "--size", "0"], 2, "above 0"),
        (&[uri, "--size", "64M"], 2, "up to 32M"),
        (&[uri, "--mix", "100"], 2, "100"),
        (&[uri, "--connections", "0"], 2, "use a number from 1 to 10000"),
        (&[uri, "--span", "2k"], 2, "2048 bytes are less than one request"),
        (&[uri, "--write", "--count", "1"], 3, "the export cannot be written"),
        (&["memory:1M"], 2, "is no NBD server: write its URI"),
        (&["nbd+unix:///?socket=/no/such/socket"], 3, "cannot connect"),
        (&["nbd://host:port/"], 2, "port"),
    ] {
        let error = load(words).unwrap_err();
        assert!(error.to_string().contains(why), "{words:?}: {error}");
        assert_eq!(error.status(), status, "{words:?}: {error}");
    }
    assert!(load(&[]).unwrap_err().to_string().contains("DEVICE"));
}
