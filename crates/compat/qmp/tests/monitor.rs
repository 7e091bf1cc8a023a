//! A monitor without the program: its host, a client, and commands without a client.
#![allow(clippy::unwrap_used, reason = "a test that fails")]

use std::io::{BufRead as _, BufReader, Write as _};
use std::net::{Ipv4Addr, SocketAddr};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use blockhaul_block::{Error, Kind};
use blockhaul_catalog::Registry;
use blockhaul_io::{Listener, Pool, Runtime, RuntimeConfig};
use blockhaul_jobs::{ExportTable, ExportTableConfig, JobStatus, Jobs};
use blockhaul_qmp::{ListenerFuture, Monitor, MonitorConfig, MonitorHost};
use blockhaul_server::{Limits, Offers, Server, TlsPolicy};
use serde_json::{Value, json};

/// Time for one answer.
const PATIENCE: Duration = Duration::from_secs(30);

/// A host that records its calls.
#[derive(Clone, Default)]
struct TestHost {
    stops: Arc<AtomicUsize>,
    hosts: Arc<Mutex<Vec<Option<String>>>>,
}

impl MonitorHost for TestHost {
    fn stop(&self) {
        self.stops.fetch_add(1, Ordering::Relaxed);
    }

    fn bind_tcp(&self, host: Option<String>, port: u16) -> ListenerFuture {
        self.hosts.lock().unwrap().push(host.clone());
        Box::pin(async move {
            if host.is_none() {
                let error = Error::new(Kind::Refused, "not on all addresses");
                return Err(error.with_remedy("name one"));
            }
            Ok(vec![Listener::bind_tcp(SocketAddr::from((Ipv4Addr::LOCALHOST, port))).unwrap()])
        })
    }
}

/// A monitor of a server without exports, the table of its exports, and its jobs. On a worker.
async fn parts(host: TestHost) -> (Arc<Monitor>, Arc<ExportTable>, Arc<Jobs>) {
    let registry = Registry {
        backends: blockhaul_backends::all(),
        path: blockhaul_backends::PATH_SCHEME,
        ..Registry::default()
    };
    let table = Arc::new(ExportTable::new(ExportTableConfig::new(registry)));
    let server = Server::new(blockhaul_server::ServerConfig {
        exports: table.open().await.unwrap(),
        limits: Limits::default(),
        offers: Offers::default(),
        pool: Pool::new(64 << 20),
        tls: TlsPolicy::default(),
    });
    let jobs = Arc::new(Jobs::default());
    let monitor = Monitor::new(MonitorConfig {
        server,
        table: table.clone(),
        jobs: jobs.clone(),
        listens_anyway: false,
        host: Box::new(host),
    });
    (monitor, table, jobs)
}

async fn monitor(host: TestHost) -> Arc<Monitor> {
    parts(host).await.0
}

async fn run(monitor: &Monitor, command: Value) {
    monitor.run(&command.to_string()).await.unwrap();
}

#[test]
fn a_layer_over_a_node_closes_the_disk_of_that_node_after_a_mirror() {
    let runtime = Runtime::start(&RuntimeConfig::default()).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let file = |name: &str| {
        let path = dir.path().join(name);
        std::fs::write(&path, vec![0; 64 << 10]).unwrap();
        path.display().to_string()
    };
    let files = ["s", "t"].map(|name| (name, file(name)));
    runtime.block_on(async move || {
        let (monitor, table, jobs) = parts(TestHost::default()).await;
        let add = |name: &str, file: &str| {
            let node = json!({ "driver": "file", "node-name": name, "filename": file });
            json!({ "execute": "blockdev-add", "arguments": node })
        };
        for (name, file) in &files {
            run(&monitor, add(name, file)).await;
        }
        let mirror = json!({ "job-id": "m", "device": "s", "target": "t", "sync": "full" });
        run(&monitor, json!({ "execute": "blockdev-mirror", "arguments": mirror })).await;
        let job = jobs.named("m").unwrap();
        while job.status() != JobStatus::Ready {
            assert!(!job.is_over(), "{:?}", job.outcome());
            blockhaul_io::sleep(Duration::from_millis(1)).await;
        }
        let id = json!({ "id": "m" });
        run(&monitor, json!({ "execute": "job-complete", "arguments": id })).await;
        job.over().await;
        assert_eq!(job.outcome(), Some((None, false)));
        let open = || table.exports().iter().map(|disk| disk.storage()).collect::<Vec<_>>();
        let [(_, source), (_, target)] = &files;
        assert_eq!(open(), [target.as_str(), source.as_str()]);

        let layer = json!({ "driver": "raw", "node-name": "r", "file": "s" });
        run(&monitor, json!({ "execute": "blockdev-add", "arguments": layer })).await;
        // The new node has the file of the source; the target stays open.
        assert_eq!(open(), [target.as_str(), source.as_str()]);
        // The nodes keep their disks when others are removed and added.
        let delete =
            |name: &str| json!({ "execute": "blockdev-del", "arguments": { "node-name": name } });
        run(&monitor, delete("r")).await;
        assert_eq!(open(), [target.as_str()]);
        run(&monitor, delete("t")).await;
        assert!(open().is_empty());
        run(&monitor, add("t", target)).await;
        run(&monitor, delete("s")).await;
        assert_eq!(open(), [target.as_str()]);
    });
}

/// Sends a command, and reads its answer.
fn ask(client: &mut BufReader<UnixStream>, command: &Value) -> Value {
    client.get_mut().write_all(command.to_string().as_bytes()).unwrap();
    read(client)
}

fn read(client: &mut BufReader<UnixStream>) -> Value {
    let mut line = String::new();
    client.read_line(&mut line).unwrap();
    serde_json::from_str(&line).unwrap()
}

#[test]
fn a_monitor_serves_a_client_without_the_program() {
    let runtime = Runtime::start(&RuntimeConfig::default()).unwrap();
    let host = TestHost::default();
    let own = host.clone();
    let monitor = runtime.block_on(move || monitor(own));
    let add =
        r#"{"execute": "blockdev-add", "arguments": {"driver": "null-co", "node-name": "n"}}"#;
    let shared = monitor.clone();
    let added =
        runtime.block_on(move || async move { (shared.run(add).await, shared.run(add).await) });
    assert_eq!(added.0, Ok(()));
    let twice = added.1.unwrap_err().to_string();
    assert_eq!(twice, "blockdev-add: Duplicate nodes with node-name='n'");

    let (client, socket) = UnixStream::pair().unwrap();
    client.set_read_timeout(Some(PATIENCE)).unwrap();
    monitor.serve_connection(socket.into(), &runtime.remote());
    let mut client = BufReader::new(client);
    assert!(read(&mut client)["QMP"]["version"].is_object());
    let class = |answer: Value| answer["error"]["class"].as_str().unwrap().to_string();
    assert_eq!(class(ask(&mut client, &json!({ "execute": "quit" }))), "CommandNotFound");
    ask(&mut client, &json!({ "execute": "qmp_capabilities" }));

    let start = |host: &str| {
        let address = json!({ "type": "inet", "host": host, "port": "0" });
        json!({ "execute": "nbd-server-start", "arguments": { "addr": address } })
    };
    let refused = ask(&mut client, &start(""));
    assert_eq!(refused["error"]["desc"], "not on all addresses");
    assert_eq!(ask(&mut client, &start("localhost")), json!({ "return": {} }));
    assert_eq!(*host.hosts.lock().unwrap(), [None, Some("localhost".to_string())]);
    let export = json!({ "type": "nbd", "id": "e", "node-name": "n" });
    let export = json!({ "execute": "block-export-add", "arguments": export });
    assert_eq!(ask(&mut client, &export), json!({ "return": {} }));
    let exports = ask(&mut client, &json!({ "execute": "query-block-exports" }));
    assert_eq!(exports["return"][0]["node-name"], "n");

    assert_eq!(host.stops.load(Ordering::Relaxed), 0);
    assert_eq!(ask(&mut client, &json!({ "execute": "quit" })), json!({ "return": {} }));
    assert_eq!(host.stops.load(Ordering::Relaxed), 1);
    monitor.stop();
    let mut rest = String::new();
    assert_eq!(client.read_line(&mut rest).unwrap(), 0, "{rest}");
}
