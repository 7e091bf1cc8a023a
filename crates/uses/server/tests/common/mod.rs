//! A server in this process, for scripted clients on the test's own threads.
#![allow(dead_code, clippy::unwrap_used, reason = "each test uses a part")]

use std::sync::{Arc, mpsc};
use std::time::Duration;

use blockhaul_block::Device;
use blockhaul_catalog::{Exports, SharedDevice};
use blockhaul_io::{IoEngine, Listener, Pool, Runtime};
use blockhaul_server::{Limits, Offers, Server, ServerConfig};
use blockhaul_testkit::model::{CompletionOrder, Model, ModelDevice};
use blockhaul_testkit::peer::Conversation;
use blockhaul_testkit::tools::{ScratchDir, until};
use blockhaul_wire::ReplyForm;

pub const FORMS: [ReplyForm; 3] = [ReplyForm::Simple, ReplyForm::Structured, ReplyForm::Extended];

/// The error numbers of the protocol document.
pub const EPERM: u32 = 1;
pub const EIO: u32 = 5;
pub const EINVAL: u32 = 22;
pub const ENOSPC: u32 = 28;
pub const ENOTSUP: u32 = 95;
pub const ESHUTDOWN: u32 = 108;

pub struct Fixture {
    pub server: Arc<Server>,
    pub pool: Pool,
    pub scratch: ScratchDir,
    pub runtime: Runtime,
}

/// Serves a device on two workers, with 256 MiB of memory.
pub fn serve(device: Arc<dyn Device>, limits: Limits) -> Fixture {
    serve_with(device, limits, 256 << 20, IoEngine::Auto)
}

pub fn serve_with(
    device: Arc<dyn Device>,
    limits: Limits,
    memory: u64,
    engine: IoEngine,
) -> Fixture {
    serve_all(SharedDevice::new("", "", blockhaul_block::fence(device)), limits, memory, engine)
}

/// Serves storage that opens devices for each client.
pub fn serve_exports(exports: Arc<dyn Exports>) -> Fixture {
    serve_all(exports, Limits::default(), 256 << 20, IoEngine::Auto)
}

fn serve_all(exports: Arc<dyn Exports>, limits: Limits, memory: u64, engine: IoEngine) -> Fixture {
    let runtime = Runtime::start(&blockhaul_io::RuntimeConfig { workers: 2, engine }).unwrap();
    let scratch = ScratchDir::new().unwrap();
    let pool = Pool::new(memory);
    let offers = Offers::default();
    let tls = blockhaul_server::TlsPolicy::Off;
    let config = ServerConfig { exports, limits, offers, pool: pool.clone(), tls };
    let server = Server::new(config);
    let there = server.clone();
    let path = scratch.socket("server");
    runtime.block_on(move || async move {
        drop(blockhaul_io::spawn(there.listen(Listener::bind_unix(&path).unwrap())));
    });
    Fixture { server, pool, scratch, runtime }
}

/// A device of `size` bytes, each depending on its offset.
pub fn device(size: u64, completion: CompletionOrder) -> Arc<ModelDevice> {
    ModelDevice::new(Model::new(size).with_content(content(0, size as usize)), completion)
}

/// The initial contents of a [`device`] at an offset.
pub fn content(at: u64, len: usize) -> Vec<u8> {
    (at..at + len as u64).map(|at| (at % 251) as u8 + 1).collect()
}

impl Fixture {
    pub fn connect(&self) -> Conversation {
        Conversation::connect(&self.scratch.socket("server")).unwrap()
    }

    /// A client that may send requests.
    pub fn client(&self, replies: ReplyForm) -> Conversation {
        let mut client = self.connect();
        client.open("", replies).unwrap();
        client
    }

    /// A client that may also request extents.
    pub fn client_with_contexts(
        &self,
        replies: ReplyForm,
        contexts: &[&str],
    ) -> (Conversation, Vec<u32>) {
        let mut client = self.connect();
        client.hello(3).unwrap();
        client.negotiate(replies).unwrap();
        let ids = client.select("", contexts).unwrap();
        client.go("").unwrap();
        (client, ids)
    }

    /// Stops the server; returns the number of connections that were left.
    pub fn stop(&self, patience: Duration) -> usize {
        let server = self.server.clone();
        self.runtime.block_on(move || async move { server.stop(patience).await })
    }

    /// Waits until this many connections are open.
    pub fn wait_for_open(&self, count: usize) {
        until(&format!("{count} connections are open"), || self.server.open() == count);
    }

    /// Waits until each worker has gone round so often that it has received what was sent to it, and has
    /// done all that it does about it before something else happens.
    pub fn settle(&self) {
        // More than the tasks that a worker runs before it looks at its sockets again, many times.
        const TASKS: usize = 20_000;
        // One worker may pass work to the other.
        for worker in [0, 1, 0, 1] {
            let (sender, settled) = mpsc::channel();
            drop(self.runtime.workers()[worker].spawn(move || async move {
                for _ in 0..TASKS {
                    blockhaul_io::yield_now().await;
                }
                sender.send(()).unwrap();
            }));
            settled.recv().unwrap();
        }
    }

    /// Checks that other clients are still served.
    pub fn is_well(&self) {
        let mut client = self.client(ReplyForm::Structured);
        assert_eq!(client.read(100, 5000).unwrap(), content(100, 5000));
    }
}
