//! `luks`: a header determines how long its passphrase takes to check, so that is limited, runs one
//! at a time, and ends when the client is gone. Apart from the other tests: it measures the processor
//! time of its process.
#![cfg(feature = "luks")]
#![allow(clippy::unwrap_used)]

mod common;
#[path = "common/peers.rs"]
mod peers;

use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use blockhaul_block::Kind;
use blockhaul_catalog::{Intent, Layer, LayerBase};
use common::on_workers;
use peers::{open, run};

/// Processor time of this process, all threads.
fn used() -> Duration {
    let stat = fs::read_to_string("/proc/self/stat").unwrap();
    let fields = stat.rsplit(')').next().unwrap();
    let ticks =
        fields.split_whitespace().skip(11).take(2).map(|field| field.parse::<u64>().unwrap());
    // The kernel reports it in hundredths of a second.
    Duration::from_millis(ticks.sum::<u64>() * 10)
}

#[test]
fn a_header_does_not_decide_how_long_processors_are_busy() {
    let Some(qemu_img) = blockhaul_testkit::tools::PeerProgram::require("qemu-img") else { return };
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("disk.luks");
    let mut command = qemu_img.command();
    command.args(["create", "-f", "luks", "--object", "secret,data=open sesame,id=s"]);
    command.args(["-o", "key-secret=s,iter-time=10"]).arg(&path).arg("1M");
    run(&mut command);
    let good = fs::read(&path).unwrap();
    let with_rounds = |rounds: u32| {
        let mut bytes = good.clone();
        bytes[212..216].copy_from_slice(&rounds.to_be_bytes());
        fs::write(&path, bytes).unwrap();
        path.clone()
    };
    let layer = |more: &str| format!("luks?passphrase=open sesame{more}");

    let slow = with_rounds(1 << 30);
    let text = layer("");
    on_workers(move || async move {
        let error = open(&slow, &[&text], Intent::READ).await.err().unwrap();
        assert_eq!(error.kind(), Kind::Invalid);
        assert!(error.to_string().contains("1073741824 iterations"), "{error}");
        assert!(error.to_string().contains("max-iterations"), "{error}");
    });
    // A name in the header must not control the terminal.
    let mut bytes = good.clone();
    bytes[40..61].copy_from_slice(b"x\x1b]0;owned\x07\nxxxxxxxxx");
    fs::write(&path, bytes).unwrap();
    let named = path.clone();
    let text = layer("");
    on_workers(move || async move {
        let error = open(&named, &[&text], Intent::READ).await.err().unwrap();
        assert!(!error.to_string().contains(char::is_control), "{error:?}");
    });

    // Four clients of a container that takes minutes; they disconnect after a second.
    let slow = with_rounds(1 << 29);
    let text = layer("&max-iterations=1000000000");
    on_workers(move || async move {
        let opened = common::layer(&text).unwrap();
        let before = used();
        let clients = (0..4).map(|_| {
            let slow = slow.clone();
            let layer = opened.clone();
            blockhaul_io::start(async move {
                let opening = open_with(&slow, layer);
                assert!(blockhaul_io::timeout(Duration::from_secs(1), opening).await.is_err());
            })
        });
        for client in clients.collect::<Vec<_>>() {
            client.await;
        }
        let busy = used() - before;
        assert!(busy < Duration::from_millis(1500), "more than one at a time: {busy:?}");
        // A slice may be running.
        blockhaul_io::sleep(Duration::from_millis(300)).await;
        let before = used();
        blockhaul_io::sleep(Duration::from_millis(700)).await;
        let busy = used() - before;
        assert!(busy < Duration::from_millis(200), "nobody waits for it: {busy:?}");
    });

    // And the good one still opens.
    fs::write(&path, &good).unwrap();
    let path = path.clone();
    let text = layer("");
    on_workers(move || async move {
        open(&path, &[&text], Intent::READ).await.unwrap();
    });
}

/// Puts the layer over the file.
async fn open_with(path: &Path, layer: Arc<dyn Layer>) {
    let stack = open(path, &[], Intent::READ).await.unwrap();
    let below = LayerBase::alone(stack.device().clone());
    drop(layer.open(below).await);
}
