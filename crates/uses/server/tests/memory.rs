//! Memory and descriptors that clients use in this process. Apart from the other tests, and a single
//! test, because it measures the whole process.
#![allow(clippy::unwrap_used)]

mod common;

use std::time::Duration;

use blockhaul_server::Limits;
use blockhaul_testkit::model::CompletionOrder;
use blockhaul_testkit::tools::{status_kib, until};
use blockhaul_wire::{CommandCode, ReplyForm};
use common::{content, device, serve};
use rustix::process::{Resource, getrlimit, setrlimit};

const SIZE: u64 = 8 << 20;
const CROWD: usize = 500;

/// Memory of this process now, in bytes.
fn resident() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    status_kib(&status, "VmRSS").unwrap() << 10
}

fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

/// Number of descriptors that are sockets.
fn sockets() -> usize {
    let all = std::fs::read_dir("/proc/self/fd").unwrap();
    // That of the directory itself is gone by the time its link is read.
    let links = all.filter_map(|entry| std::fs::read_link(entry.unwrap().path()).ok());
    links.filter(|link| link.to_string_lossy().starts_with("socket:")).count()
}

#[test]
fn clients_are_cheap() {
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    setrlimit(Resource::Nofile, limit).unwrap();
    let fixture = serve(device(SIZE, CompletionOrder::Immediate), Limits::default());
    let rest = sockets();
    fixture.is_well();
    fixture.wait_for_open(0);
    // A connection is closed a moment after it is no longer counted.
    until("its socket is closed", || sockets() == rest);

    // Many idle clients.
    let memory = resident();
    let files = descriptors();
    let mut crowd: Vec<_> = (0..CROWD).map(|_| fixture.client(ReplyForm::Extended)).collect();
    assert_eq!(fixture.server.open(), CROWD);
    assert_eq!(descriptors() - files, 2 * CROWD, "one at each end");
    let cost = resident().saturating_sub(memory) / CROWD as u64;
    assert!(cost < 120 << 10, "{cost} bytes a connection");
    // All of them are served, and leave nothing behind.
    for (index, client) in crowd.iter_mut().enumerate() {
        let at = (index * 1000) as u64;
        assert_eq!(client.read(at, 1000).unwrap(), content(at, 1000));
    }
    drop(crowd);
    fixture.wait_for_open(0);
    until("all sockets are closed", || descriptors() == files);

    // Failed requests use no buffers; the server stops reading from a client that does not read
    // replies.
    let memory = resident();
    let mut flood: Vec<_> = (0..4).map(|_| fixture.client(ReplyForm::Structured)).collect();
    for client in &mut flood {
        client.patience(Duration::from_millis(300)).unwrap();
        let wrong = client.request(CommandCode::Read, SIZE, 512);
        let batch = wrong.encode(client.headers).unwrap().repeat(1000);
        let stuck = (0..2000).any(|_| client.send(&batch).is_err());
        assert!(stuck, "56 MB of requests are not taken without end");
    }
    let cost = resident().saturating_sub(memory) / 4;
    assert!(cost < 6 << 20, "{cost} bytes for a client that reads nothing");
    fixture.is_well();
    drop(flood);
    fixture.wait_for_open(0);
    assert_eq!(fixture.pool.reserved(), 0);

    options_that_are_repeated_for_ever_leak_nothing(&fixture);
}

/// The long name of each selection of contexts is freed by the next one (nbdkit 1.42 keeps all of
/// them: about 100 KiB for each of these connections).
fn options_that_are_repeated_for_ever_leak_nothing(fixture: &common::Fixture) {
    let name = "n".repeat(4000);
    let crowd = |count: usize| {
        for _ in 0..count {
            let mut client = fixture.connect();
            client.hello(3).unwrap();
            client.negotiate(ReplyForm::Structured).unwrap();
            for _ in 0..27 {
                // There is no such export, but it may exist the next time.
                assert!(client.select(&name, &["base:allocation"]).is_err());
                client.select("", &["base:allocation"]).unwrap();
            }
        }
        fixture.wait_for_open(0);
    };
    crowd(50);
    let memory = resident();
    crowd(400);
    let grown = resident().saturating_sub(memory);
    assert!(grown < 4 << 20, "{grown} bytes for 400 connections that have gone");
}
