//! A program that embeds several servers: storage that stops its server stops only that one, in
//! order, and neither the program nor its other servers.
#![allow(clippy::unwrap_used)]

use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use blockhaul_catalog::{AnyLayer, DeviceSpec, Intent, Registry, SharedDevice, Shutdown, guarded};
use blockhaul_io::{Listener, Pool, Runtime, RuntimeConfig, Task, Ticket};
use blockhaul_server::{Limits, Offers, Server, TlsPolicy};
use blockhaul_testkit::peer::Conversation;
use blockhaul_testkit::tools::ScratchDir;
use blockhaul_wire::ReplyForm;

/// Time limit for what happens at once.
const SOON: Duration = Duration::from_secs(60);

/// A server of the program's.
struct Embedded {
    server: Arc<Server>,
    /// Resolves when the server is asked to stop.
    requested: Ticket<String>,
    listening: Task<()>,
}

/// Serves a device on a socket, with a gate if one is named.
async fn serve(device: &str, gate: Option<&str>, socket: &Path) -> Embedded {
    let (shutdown, requested) = Shutdown::channel();
    let mut backends = blockhaul_backends::all();
    backends.extend(blockhaul_cabi::all());
    backends.extend(blockhaul_script::all());
    let gates = blockhaul_nbdkit_devices::gates::all();
    let registry = Registry { backends, gates, shutdown, ..Registry::default() };
    let spec = DeviceSpec::parse(device.as_ref()).unwrap();
    let exports = match registry.exports(&spec, &[], Intent::READ).await.unwrap() {
        Some(own) => own,
        None => {
            let stack = registry.open(&spec, Vec::new(), Intent::READ).await.unwrap();
            SharedDevice::new("", "", stack.device().clone())
        }
    };
    let gates: Vec<_> = gate
        .into_iter()
        .map(|gate| match registry.layer_or_gate(gate).unwrap() {
            AnyLayer::Gate(gate) => gate,
            AnyLayer::Layer(_) => panic!("{gate} is no gate"),
        })
        .collect();
    let limits = Limits::default();
    let server = Server::new(blockhaul_server::ServerConfig {
        exports: guarded(exports, &gates).unwrap(),
        pool: Pool::new(limits.all_bytes),
        limits,
        offers: Offers::default(),
        tls: TlsPolicy::Off,
    });
    let listening =
        blockhaul_io::spawn(server.clone().listen(Listener::bind_unix(socket).unwrap()));
    Embedded { server, requested, listening }
}

/// Runs a client on a thread.
async fn client<T: Send + 'static>(
    socket: &Path,
    work: impl FnOnce(&mut Conversation) -> T + Send + 'static,
) -> T {
    let socket = socket.to_path_buf();
    let done = blockhaul_io::offload(move || {
        let mut client = Conversation::connect(&socket).unwrap();
        client.open("", ReplyForm::Structured).unwrap();
        work(&mut client)
    });
    done.await.unwrap()
}

/// Whether a server is asked to stop within a moment. The ticket is lost if that is impossible.
async fn is_asked(server: &mut Embedded) -> bool {
    let asked = blockhaul_io::timeout(Duration::from_millis(50), &mut server.requested).await;
    matches!(asked, Ok(Ok(_)))
}

/// Reads a range that makes the storage stop its server, with another server running: only that one
/// stops.
async fn ends_one(device: &str, at: u64, scratch: &ScratchDir, reason: &str) {
    let one = scratch.socket("one");
    let other = scratch.socket("other");
    let ending = serve(device, None, &one).await;
    let mut lasting = serve("pattern:1M", None, &other).await;

    let last = client(&one, move |client| client.read(at, 16)).await;
    assert_eq!(last.as_deref().map(<[u8]>::len), Ok(16), "{device}: the request has its answer");
    let why = blockhaul_io::timeout(SOON, ending.requested).await;
    let why = why.expect("the request reaches the program").unwrap();
    assert!(why.contains(reason), "{device}: {why}");
    // The program decides: it stops this server in order.
    assert_eq!(ending.server.stop(SOON).await, 0);
    blockhaul_io::timeout(SOON, ending.listening).await.expect("its listener closes");

    client(&other, |client| client.read(0, 16).map(drop).unwrap()).await;
    assert!(!is_asked(&mut lasting).await, "{device}: nobody asks for the end of the other server");
    assert_eq!(lasting.server.stop(SOON).await, 0);
    lasting.listening.await;
    for socket in [one, other] {
        std::fs::remove_file(socket).unwrap();
    }
}

fn run<F: Future<Output = ()> + 'static>(work: impl FnOnce(ScratchDir) -> F + Send + 'static) {
    let runtime =
        Runtime::start(&RuntimeConfig { workers: 2, ..RuntimeConfig::default() }).unwrap();
    runtime.block_on(move || work(ScratchDir::new().unwrap()));
}

/// The plugin under this name: a process holds each shared object only once.
fn plugin(name: &str, scratch: &ScratchDir) -> Option<String> {
    let source = Path::new("crates/devices/cabi/tests/embedded.c");
    let folder = scratch.file(&format!("plugin-{name}"));
    std::fs::create_dir(&folder).unwrap();
    let out = blockhaul_tests::compile(source, &format!("NAME=\"{name}\""), scratch)?;
    let path = folder.join("plugin.so");
    std::fs::rename(out, &path).unwrap();
    Some(path.to_str().unwrap().to_string())
}

#[test]
fn a_plugin_ends_its_server_by_a_callback() {
    run(|scratch| async move {
        let Some(plugin) = plugin("callback", &scratch) else { return };
        ends_one(&format!("nbdkit:{plugin}"), 512, &scratch, "plugin callback").await;
    });
}

#[test]
fn a_plugin_ends_its_server_on_a_thread_of_its_own() {
    run(|scratch| async move {
        let Some(plugin) = plugin("thread", &scratch) else { return };
        ends_one(&format!("nbdkit:{plugin}"), 1024, &scratch, "a thread of a plugin").await;
    });
}

#[test]
fn of_two_plugins_each_ends_its_own_server() {
    run(|scratch| async move {
        let (Some(a), Some(b)) = (plugin("a", &scratch), plugin("b", &scratch)) else { return };
        let at_a = scratch.socket("a");
        let at_b = scratch.socket("b");
        let mut first = serve(&format!("nbdkit:{a}"), None, &at_a).await;
        let second = serve(&format!("nbdkit:{b}"), None, &at_b).await;
        client(&at_b, |client| client.read(1024, 16).map(drop).unwrap()).await;
        assert!(blockhaul_io::timeout(SOON, second.requested).await.unwrap().is_ok());
        assert!(!is_asked(&mut first).await, "the thread was of the other plugin");
        assert_eq!(second.server.stop(SOON).await, 0);
        client(&at_a, |client| client.read(512, 16).map(drop).unwrap()).await;
        assert!(blockhaul_io::timeout(SOON, first.requested).await.unwrap().is_ok());
        assert_eq!(first.server.stop(SOON).await, 0);
    });
}

#[test]
fn a_script_ends_its_server() {
    run(|scratch| async move {
        let script = scratch.file("script.sh");
        let text = "#!/bin/sh\ncase $1 in get_size) echo 4096;; pread) head -c $3 /dev/zero; \
                    test $4 = 0 || exit 4;; *) exit 2; esac\n";
        std::fs::write(&script, text).unwrap();
        std::fs::set_permissions(&script, std::fs::Permissions::from_mode(0o700)).unwrap();
        ends_one(&format!("sh:{}", script.display()), 512, &scratch, "script.sh").await;
    });
}

#[test]
fn a_gate_ends_its_server_with_its_last_client() {
    run(|scratch| async move {
        let one = scratch.socket("one");
        let other = scratch.socket("other");
        let ending = serve("pattern:1M", Some("exitlast"), &one).await;
        let lasting = serve("pattern:1M", None, &other).await;
        client(&one, |client| client.read(0, 16).map(drop).unwrap()).await;
        let why = blockhaul_io::timeout(SOON, ending.requested).await.unwrap().unwrap();
        assert_eq!(why, "exitlast: the last client has left");
        assert_eq!(ending.server.stop(SOON).await, 0);
        client(&other, |client| client.read(0, 16).map(drop).unwrap()).await;
        assert_eq!(lasting.server.stop(SOON).await, 0);
    });
}
