//! `--vhost-user`: virtual machines as clients of an export.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use blockhaul_block::OpKind;
use blockhaul_io::{Listener, WorkerHandle};
use blockhaul_server::{AttachedClient, Server};
use blockhaul_vhost::{RequestWatcher, VhostConfig};

/// Interval of attempts to accept a connection after one has failed.
const AGAIN: Duration = Duration::from_millis(100);

/// Serves an export to the front ends that connect, until it is cancelled.
pub async fn listen(server: Arc<Server>, listener: Listener, export: String) {
    let next = AtomicUsize::new(0);
    loop {
        match listener.accept().await {
            Ok(socket) => {
                let server = server.clone();
                let export = export.clone();
                let worker = WorkerHandle::to(next.fetch_add(1, Ordering::Relaxed));
                drop(worker.spawn(move || attend(server, socket, export)));
            }
            Err(error) => {
                log::warn!(error:% = error; "cannot accept a virtual machine: {error}");
                blockhaul_io::sleep(AGAIN).await;
            }
        }
    }
}

/// Serves one front end. Why it cannot be served is logged where that is found.
async fn attend(server: Arc<Server>, socket: OwnedFd, export: String) {
    let Ok(attached) = server.attach(socket, &export).await else { return };
    let attached = Arc::new(attached);
    let again = attached.clone();
    let config = VhostConfig {
        device: attached.device().clone(),
        flushes: attached.flushes().clone(),
        pool: attached.pool(),
        name: match attached.export() {
            "" => "blockhaul".to_string(),
            name => name.to_string(),
        },
        watch: Arc::new(RequestCounter(attached.clone())),
        reopen: Some(Box::new(move || {
            let attached = again.clone();
            Box::pin(async move { attached.reopen().await })
        })),
    };
    let result = blockhaul_vhost::serve(attached.stream().clone(), config).await;
    attached.log_end(&result);
}

/// Counts requests as those of other clients.
struct RequestCounter(Arc<AttachedClient>);

impl RequestWatcher for RequestCounter {
    fn begun(&self) {
        self.0.begun();
    }

    fn ended(&self) {
        self.0.ended();
    }

    fn answered(&self, kind: OpKind, bytes: Option<u64>) {
        self.0.answered(kind, bytes);
    }

    fn took(&self, kind: OpKind, time: Duration, count: u64) {
        self.0.took(kind, time, count);
    }
}
