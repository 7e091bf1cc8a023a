//! Disks of KubeVirt, as the page backs them up, from a server that answers as its export server does.

use std::fs;
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};

use blockhaul_testkit::peer::{ExportFault, ExportServer, ExportedDisk};
use blockhaul_testkit::tools::{self, PeerProgram, ScratchDir, text};

use crate::served_disk::{LIMIT, OURS, blockhaul, succeed};
use crate::tls_relay::{self, Clients};

const PAGE: &str = include_str!("../../../../../docs/increments.md");
const SIZE: usize = 8 << 20;
const TOKEN: &str = "token-of-the-secret";

/// Two thirds of a disk, and zeroes.
fn contents(seed: u8) -> Vec<u8> {
    (0..SIZE).map(|at| if at < SIZE / 3 * 2 { (at / 4096) as u8 ^ seed } else { 0 }).collect()
}

fn exported(bytes: &[u8], map: Vec<(u64, u64, &'static str)>) -> ExportedDisk {
    ExportedDisk { bytes: bytes.to_vec(), map, token: TOKEN.to_owned() }
}

/// The map of a full backup.
fn full(bytes: &[u8]) -> ExportedDisk {
    let data = (SIZE / 3 * 2) as u64;
    exported(bytes, vec![(data, 0, "data"), (SIZE as u64 - data, 3, "hole,zero")])
}

#[test]
fn full_and_incremental_backups_are_pulled_as_the_page_says() {
    let scratch = ScratchDir::new().unwrap();
    let file = |name: &str| scratch.file(name).display().to_string();
    fs::write(scratch.file("token"), TOKEN).unwrap();
    let token = file("token");
    // The page's lines, with names for what the backup says.
    let line = |part: &str| {
        let mut lines =
            PAGE.lines().filter(|line| line.starts_with("blockhaul pull") && line.contains(part));
        let line = lines
            .next()
            .unwrap()
            .replace("\"$CHECKPOINT\"", "backup-2")
            .replace("\"$BASE\"", "backup-1");
        line.split(' ').skip(1).map(str::to_owned).collect::<Vec<_>>()
    };
    let pull = |server: &ExportServer, words: &[String], more: &[&str]| {
        let source = format!("kubevirt:{}/map?token-file={token}", server.url());
        let disk =
            format!("[[disk]]\nname = 'disk1'\nsource = '{source}'\nstore = '{}'\n", file("store"));
        fs::write(scratch.file("vm1.toml"), disk).unwrap();
        let mut command = Command::new(OURS);
        command.args(words).args(more).current_dir(scratch.path());
        let output = tools::output(&mut command, LIMIT).unwrap();
        assert!(output.status.success(), "{words:?}: {}", text(&output.stderr));
        text(&output.stdout)
    };
    let mut disk = contents(1);
    fs::write(scratch.file("monday"), &disk).unwrap();
    let server = ExportServer::start(full(&disk), |_, _| ExportFault::None);
    let first = ["pull", "vm1.toml", "--checkpoint", "backup-1"].map(str::to_owned);
    let said = pull(&server, &first, &["--point", "monday"]);
    assert!(said.contains("monday is a full backup of 8388608 bytes"), "{said}");

    // Another backup has another server.
    disk[65536..196_608].fill(0xee);
    disk[1 << 20..2 << 20].fill(0);
    fs::write(scratch.file("tuesday"), &disk).unwrap();
    let map = vec![
        (65536, 0, "clean"),
        (131_072, 1, "dirty"),
        ((1 << 20) - 196_608, 0, "clean"),
        (1 << 20, 3, "dirty,zero"),
        ((SIZE / 3 * 2) as u64 - (2 << 20), 0, "clean"),
        ((SIZE - SIZE / 3 * 2) as u64, 2, "zero"),
    ];
    let server = ExportServer::start(exported(&disk, map), |_, _| ExportFault::None);
    let next = line("kubevirt:dirty");
    let said = pull(&server, &next, &["--point", "tuesday"]);
    assert!(said.contains("tuesday is an increment of monday: 1179648 of 8388608"), "{said}");
    let source = format!("kubevirt:{}?token-file={token}", server.url());
    let map = succeed(&["map", "--context", "kubevirt:dirty", &source]);
    assert!(map.contains("131072"), "{map}");
    let copy = file("copy");
    fs::copy(scratch.file("monday"), &copy).unwrap();
    succeed(&["copy", "--bitmap", "kubevirt:dirty", &source, &copy]);
    assert!(fs::read(&copy).unwrap() == disk);

    // A volume whose bitmap was lost is exported in full.
    disk[0] ^= 1;
    fs::write(scratch.file("wednesday"), &disk).unwrap();
    let server = ExportServer::start(full(&disk), |_, _| ExportFault::None);
    let lost: Vec<_> = next
        .iter()
        .map(|word| word.replace("backup-2", "backup-3").replace("backup-1", "backup-2"))
        .collect();
    let said = pull(&server, &lost, &["--point", "wednesday"]);
    assert!(
        said.contains("full backup") && said.contains("no bitmap \"kubevirt:dirty\""),
        "{said}"
    );
    for point in ["monday", "tuesday", "wednesday"] {
        let target = file("target");
        succeed(&["restore", &file("store"), &target, "--point", point]);
        assert!(fs::read(&target).unwrap() == fs::read(scratch.file(point)).unwrap(), "{point}");
    }
    // An increment of another backup.
    let other = [
        "pull",
        &file("vm1.toml"),
        "--bitmap",
        "kubevirt:dirty",
        "--parent",
        "other",
        "--point",
        "x",
    ];
    let disk = exported(&disk, vec![(SIZE as u64, 1, "dirty")]);
    let server = ExportServer::start(disk, |_, _| ExportFault::None);
    let job = fs::read_to_string(scratch.file("vm1.toml")).unwrap();
    let (before, after) = job.split_once("http://").unwrap();
    let after = after.split_once("/map").unwrap().1;
    fs::write(scratch.file("vm1.toml"), format!("{before}{}/map{after}", server.url())).unwrap();
    let output = blockhaul(&other);
    let said = text(&output.stderr);
    assert!(
        output.status.code() == Some(2) && said.contains("began with another backup"),
        "{said}"
    );
}

#[test]
fn a_token_without_tls_is_warned_about_unless_it_stays_on_this_machine() {
    let scratch = ScratchDir::new().unwrap();
    let file = |name: &str| scratch.file(name).display().to_string();
    fs::write(scratch.file("token"), TOKEN).unwrap();
    let server = ExportServer::start(full(&contents(1)), |_, _| ExportFault::None);
    // The same machine, by an address that does not say so.
    let other = server.url().replace("127.0.0.1", "0.0.0.0");
    for (url, warnings) in [(server.url(), 0), (other, 1)] {
        let source = format!("kubevirt:{url}?token-file={}", file("token"));
        let output = blockhaul(&["copy", "--no-progress", &source, &file("target")]);
        let said = text(&output.stderr);
        assert!(output.status.success(), "{said}");
        assert_eq!(said.matches("is sent without TLS").count(), warnings, "{said}");
    }
}

#[test]
fn a_copy_over_https_outlives_faults_of_the_server() {
    let Some(python) = PeerProgram::require("python3") else { return };
    let scratch = ScratchDir::new().unwrap();
    let file = |name: &str| scratch.file(name).display().to_string();
    fs::write(scratch.file("token"), TOKEN).unwrap();
    let pki = file("pki");
    succeed(&["tls", "init", "--host", "virt-export-backup1.ns.svc", &pki]);
    let disk = contents(7);
    // Every fourth answer with data is none.
    let count = AtomicUsize::new(0);
    let server = ExportServer::start(full(&disk), move |_, target| {
        let number =
            if target.contains("/data?") { count.fetch_add(1, Ordering::SeqCst) } else { 1 };
        match number % 12 {
            0 => ExportFault::Bytes(b"HTTP/1.1 500 Oh\r\nContent-Length: 0\r\n\r\n".to_vec()),
            4 => ExportFault::Cut(1000),
            8 => ExportFault::Length(-1),
            _ => ExportFault::None,
        }
    });
    let socket = scratch.socket("t");
    let port = server.address().port().to_string();
    let _tls = tls_relay::start(&python, &socket, &port, &pki, Clients::All, None);
    let spec = |more: &str| {
        format!(
            "kubevirt:https://proxy.example/apis/ns/exports/disk0/data?token-file={}&socket={}{more}",
            file("token"),
            socket.display()
        )
    };
    let fine = spec(&format!("&ca={pki}/ca-cert.pem&tls-hostname=virt-export-backup1.ns.svc"));
    let output =
        blockhaul(&["copy", "--retry-delay", "10ms", "--retries", "20", &fine, &file("target")]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert!(fs::read(scratch.file("target")).unwrap() == disk);
    assert!(server.most_at_once() <= 4);
    // Another name, and another authority.
    for more in
        [format!("&ca={pki}/ca-cert.pem"), "&tls-hostname=virt-export-backup1.ns.svc".to_owned()]
    {
        let output = blockhaul(&["info", &spec(&more)]);
        let said = text(&output.stderr);
        assert!(output.status.code() == Some(1) && said.contains("certificate"), "{said}");
        assert!(!said.contains(TOKEN), "{said}");
    }
}
