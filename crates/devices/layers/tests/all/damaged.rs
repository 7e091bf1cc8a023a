//! Files in formats of others, changed at random: a layer refuses them, or serves some bytes. None
//! panics, hangs, or takes memory for what a header claims. `BLOCKHAUL_SEED` repeats a failure.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use crate::common::on_workers;
use crate::peers::{content, open, run};
use blockhaul_catalog::Intent;
use blockhaul_testkit::mutate::{look, mutated_at_edges};
use blockhaul_testkit::rng::{Rng, seed};
use blockhaul_testkit::tools::PeerProgram;

/// Changed copies of each file; a hundred times as many with BLOCKHAUL_LONG.
const COPIES: u64 = 150;
/// Bytes at either end that are changed.
const EDGE: usize = 2048;
/// Time to open a copy and to read it.
const PATIENCE: Duration = Duration::from_secs(60);

/// Opens changed copies of a file with a layer, and reads what they have.
fn survives(name: &str, layer: &'static str, bytes: &[u8]) {
    let seed = seed();
    println!("{name}: BLOCKHAUL_SEED={seed}");
    let mut rng = Rng::new(seed);
    let rounds = if std::env::var_os("BLOCKHAUL_LONG").is_some() { 100 } else { 1 };
    let bytes = bytes.to_vec();
    let name = name.to_string();
    on_workers(move || async move {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("copy");
        // The file itself works.
        std::fs::write(&path, &bytes).unwrap();
        let whole = open(&path, &[layer], Intent::READ).await.unwrap();
        look(&**whole.device()).await.unwrap();
        let mut opened = 0;
        for copy in 0..COPIES * rounds {
            std::fs::write(&path, mutated_at_edges(&mut rng, &bytes, EDGE)).unwrap();
            let used = blockhaul_io::timeout(PATIENCE, use_copy(&path, layer));
            let used = used.await.unwrap_or_else(|_| panic!("{name}: copy {copy} hangs"));
            opened += u64::from(used);
        }
        println!("{name}: {opened} of {} copies were opened", COPIES * rounds);
    });
}

/// Whether a copy can be opened.
async fn use_copy(path: &Path, layer: &str) -> bool {
    let Ok(stack) = open(path, &[layer], Intent::READ).await else { return false };
    // Errors are expected.
    let _ = look(&**stack.device()).await;
    true
}

fn packed(program: &str, words: &[&str], name: &str) -> Option<Vec<u8>> {
    let _ = PeerProgram::require(program)?;
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("disk"), content(100_000)).unwrap();
    run(Command::new(program).current_dir(dir.path()).args(words));
    Some(std::fs::read(dir.path().join(name)).unwrap())
}

#[test]
fn gzip_files() {
    let Some(bytes) = packed("gzip", &["-k", "disk"], "disk.gz") else { return };
    survives("gz", "gz", &bytes);
}

#[test]
fn xz_files() {
    let words = ["-k", "-T1", "--block-size=20000", "disk"];
    let Some(bytes) = packed("xz", &words, "disk.xz") else { return };
    survives("xz", "xz", &bytes);
}

#[test]
fn tar_files() {
    for format in ["gnu", "pax", "ustar"] {
        let option = format!("--format={format}");
        let words = ["-cf", "disk.tar", &option, "disk"];
        let Some(bytes) = packed("tar", &words, "disk.tar") else { return };
        survives(format, "tar?tar-entry=disk", &bytes);
    }
}

/// A disk with one partition in a table of a PC, and an extended one with one more.
fn pc_disk() -> Vec<u8> {
    let mut disk = vec![0x11; 256 << 10];
    disk[..512].fill(0);
    let entry = |kind: u8, at: u32, len: u32| {
        [&[0, 0, 0, 0, kind, 0, 0, 0][..], &at.to_le_bytes(), &len.to_le_bytes()].concat()
    };
    disk[446..462].copy_from_slice(&entry(0x83, 8, 64));
    disk[462..478].copy_from_slice(&entry(0x05, 100, 200));
    disk[510..512].copy_from_slice(&[0x55, 0xaa]);
    let second = &mut disk[100 * 512..101 * 512];
    second.fill(0);
    second[446..462].copy_from_slice(&entry(0x83, 8, 64));
    second[510..512].copy_from_slice(&[0x55, 0xaa]);
    disk
}

#[test]
fn partition_tables() {
    survives("primary", "partition?partition=1", &pc_disk());
    survives("logical", "partition?partition=5", &pc_disk());
    let Some(sfdisk) = PeerProgram::require("sfdisk") else { return };
    let dir = tempfile::tempdir().unwrap();
    let disk = dir.path().join("disk");
    std::fs::write(&disk, vec![0; 2 << 20]).unwrap();
    let script = "printf 'label: gpt\\nstart=64,size=128\\n' | \"$0\" -q \"$1\"";
    run(Command::new("sh").args(["-c", script]).arg(sfdisk.program()).arg(&disk));
    survives("gpt", "partition?partition=1", &std::fs::read(&disk).unwrap());
}

#[test]
#[cfg(feature = "luks")]
fn luks_containers() {
    let Some(qemu_img) = PeerProgram::require("qemu-img") else { return };
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("disk");
    let mut command = qemu_img.command();
    command.args(["create", "-f", "luks", "--object", "secret,data=s,id=s"]);
    command.args(["-o", "key-secret=s,iter-time=10"]).arg(&path).arg("64K");
    run(&mut command);
    survives("luks", "luks?passphrase=s", &std::fs::read(&path).unwrap());
}
