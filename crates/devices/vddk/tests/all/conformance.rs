//! The contract of devices.

use std::sync::atomic::{AtomicUsize, Ordering};

use blockhaul_catalog::Intent;
use blockhaul_testkit::conform::{self, ConformOptions, InitialContent, Subject};

use crate::support::{Lab, open};

#[test]
fn a_written_disk_keeps_the_contract() {
    let lab = Lab::new("jitter=300us\nalign=4096\nquery=1ms");
    let next = AtomicUsize::new(0);
    let options = ConformOptions::default().content(InitialContent::Zeroes);
    conform::check("vddk", options, move || {
        // Each check gets a disk of its own.
        let name = format!("{}.vmdk", next.fetch_add(1, Ordering::Relaxed));
        lab.zeroes(&name, (5 << 20) + 512);
        let spec = lab.spec(&name, "");
        async move { open(&spec, Intent::WRITE).await.map(Subject::from) }
    });
}

#[test]
fn a_read_only_disk_keeps_the_contract() {
    let lab = Lab::new("jitter=300us");
    lab.pattern("p.vmdk", "size=3M stride=1M data=40");
    let byte = |at: u64| {
        let word = at / 8 * 8;
        let data = at % (1 << 20) < 7 * 65536;
        if data { word.to_le_bytes()[(at % 8) as usize] } else { 0 }
    };
    let options = ConformOptions::default().content(InitialContent::oracle(byte));
    conform::check("vddk read-only", options, move || {
        let spec = lab.spec("p.vmdk", "");
        async move { open(&spec, Intent::READ).await.map(Subject::from) }
    });
}
