//! A change of the configuration of a running server, in its order.
#![allow(clippy::unwrap_used)]

use std::sync::Arc;

use blockhaul_catalog::{ExportClient, Exports, Registry};
use blockhaul_io::{Runtime, RuntimeConfig};
use blockhaul_jobs::{ExportTable, ExportTableConfig};
use blockhaul_server::{Limits, Server, ServerConfig};
use blockhaul_server_config::{RunningConfig, ServerConfigFile};

const FILE: &str = "[tls]\npsk = 'k'\n[[export]]\nname = 'a'\ndevice = 'memory:1M'\n";

fn parse(text: &str) -> ServerConfigFile {
    ServerConfigFile::parse("f.toml".as_ref(), text).unwrap()
}

/// The names that a client without a name sees; `None`: no rule is about it.
async fn seen(exports: &Arc<dyn Exports>) -> Option<Vec<String>> {
    let visit = exports.admit(ExportClient::default()).await.unwrap();
    let listed = visit.list(true).await.ok()?;
    Some(listed.into_iter().map(|one| one.name).collect())
}

/// The result of work that waits for nothing.
fn at_once<T>(work: impl Future<Output = T>) -> T {
    let mut context = std::task::Context::from_waker(std::task::Waker::noop());
    match std::pin::pin!(work).poll(&mut context) {
        std::task::Poll::Ready(done) => done,
        std::task::Poll::Pending => panic!("it waits"),
    }
}

/// Nobody proves an identity of the new rules by an old key, and nobody sees a new export under the old rules.
#[test]
fn keys_are_exchanged_before_rules_and_rules_before_exports() {
    let runtime =
        Runtime::start(&RuntimeConfig { workers: 1, ..RuntimeConfig::default() }).unwrap();
    runtime.block_on(|| async {
        let registry = Registry { backends: blockhaul_backends::all(), ..Registry::default() };
        let old = parse(FILE);
        let mut config = ExportTableConfig::new(registry);
        config.full_names = true;
        old.describe_exports(&mut config).unwrap();
        let table = Arc::new(ExportTable::new(config));
        let running = RunningConfig::new(old, Limits::default(), table.clone());
        let exports = running.guard(table.open().await.unwrap());
        let server = Server::new(ServerConfig::new(exports.clone()));
        assert_eq!(seen(&exports).await, Some(vec!["a".to_string()]));
        let more = "[[export]]\nname = 'b'\ndevice = 'memory:1M'\n";
        let new = parse(&format!("{FILE}{more}[[client]]\npsk = 'bob'\n"));
        let mut at_exchange = None;
        let secure = || at_exchange = Some((at_once(seen(&exports)), table.find("b").is_some()));
        running.change(new, &server, secure).await.unwrap();
        assert_eq!(at_exchange, Some((Some(vec!["a".to_string()]), true)), "the old rules");
        assert_eq!(seen(&exports).await, None, "the new rules");
        // With an export that cannot be opened, no key is exchanged either.
        let wrong = parse(&format!("{FILE}{more}[[export]]\nname = 'c'\ndevice = 'nowhere'\n"));
        let error = running.change(wrong, &server, || panic!("exchanged")).await.unwrap_err();
        assert!(error.to_string().starts_with("f.toml:10: export \"c\": "), "{error}");
        assert!(table.find("c").is_none() && seen(&exports).await.is_none());
    });
}
