//! `luks` opens containers made by QEMU, shows what QEMU and nbdkit show, and writes what they can
//! read.
#![cfg(feature = "luks")]

use std::fs;
use std::path::{Path, PathBuf};

use crate::common::{on_workers, read, write};
use crate::peers::{content, open, run, through_nbdkit};
use blockhaul_block::{Device, DeviceExt, Kind};
use blockhaul_catalog::Intent;

const SIZE: usize = 1 << 20;

/// Makes a container with a passphrase, filled with bytes.
fn container(dir: &Path, options: &str, bytes: &[u8]) -> Option<PathBuf> {
    let qemu_img = blockhaul_testkit::tools::PeerProgram::require("qemu-img")?;
    let plain = dir.join("plain");
    let secret = dir.join("secret.luks");
    fs::write(&plain, bytes).unwrap();
    let mut command = qemu_img.command();
    command.args(["convert", "-f", "raw", "-O", "luks"]);
    command.args(["--object", "secret,data=open sesame,id=sec0"]);
    command
        .args(["-o", &format!("key-secret=sec0,iter-time=10{options}")])
        .arg(&plain)
        .arg(&secret);
    run(&mut command);
    Some(secret)
}

/// The contents of a container as QEMU reads them.
fn through_qemu(dir: &Path, path: &Path) -> Vec<u8> {
    let qemu_img = blockhaul_testkit::tools::PeerProgram::find("qemu-img").unwrap();
    let out = dir.join("out");
    let image = format!("driver=luks,file.filename={},key-secret=sec0", path.display());
    let mut command = qemu_img.command();
    command.args(["convert", "--object", "secret,data=open sesame,id=sec0", "--image-opts"]);
    command.args([&image, "-O", "raw"]).arg(&out);
    run(&mut command);
    fs::read(&out).unwrap()
}

#[test]
fn containers_of_qemu_are_read_and_written() {
    assert!(crate::common::layer("luks").is_err(), "no passphrase");
    let dir = tempfile::tempdir().unwrap();
    let bytes = content(SIZE);
    let passphrase = dir.path().join("passphrase");
    fs::write(&passphrase, "open sesame\n").unwrap();
    let layer = format!("luks?passphrase=+{}", passphrase.display());
    for options in [
        "",
        ",cipher-alg=aes-256,cipher-mode=cbc,ivgen-alg=essiv,ivgen-hash-alg=sha256,hash-alg=sha512",
    ] {
        let Some(path) = container(dir.path(), options, &bytes) else { return };
        let layer = layer.clone();
        let mut expected = bytes.clone();
        let place = path.clone();
        let words = ["--filter=luks", "file", path.to_str().unwrap(), "passphrase=open sesame"];
        // nbdkit's filter does not support essiv.
        if !options.contains("cbc")
            && let Some(theirs) = through_nbdkit(&words)
        {
            assert!(theirs == bytes, "{options}");
        }
        on_workers(move || async move {
            let stack = open(&place, &[&layer], Intent::WRITE).await.unwrap();
            let device = stack.device();
            assert_eq!(device.facts().size, SIZE as u64);
            assert!(read(device, 0, SIZE).await == expected);
            assert!(read(device, 777, 300_000).await == expected[777..300_777]);
            write(device, 512, &[7; 4096]).await;
            write(device, 100_001, &[8; 700_000]).await;
            device.zero(900_000, 3000).await.unwrap();
            device.flush().await.unwrap();
            expected[512..][..4096].fill(7);
            expected[100_001..][..700_000].fill(8);
            expected[900_000..][..3000].fill(0);
            assert!(read(device, 0, SIZE).await == expected);
        });
        let mut expected = bytes.clone();
        expected[512..][..4096].fill(7);
        expected[100_001..][..700_000].fill(8);
        expected[900_000..][..3000].fill(0);
        assert!(through_qemu(dir.path(), &path) == expected, "{options}");
        if options.is_empty() {
            crate::peers::conform(&path, "luks?passphrase=open sesame", Intent::WRITE);
            what_is_wrong_is_refused(path);
        }
    }
}

/// QEMU needs seconds to make a container: damage this one in many ways.
fn what_is_wrong_is_refused(path: PathBuf) {
    on_workers(move || async move {
        let refused = async |layer: &str| open(&path, &[layer], Intent::READ).await.err().unwrap();
        let wrong = refused("luks?passphrase=sesame").await;
        assert_eq!(wrong.kind(), Kind::Refused);
        assert!(wrong.to_string().contains("wrong passphrase"), "{wrong}");
        let absent = refused("luks?passphrase=+/nonexistent").await;
        assert!(absent.to_string().contains("/nonexistent"), "{absent}");
        let mut bytes = fs::read(&path).unwrap();
        for (at, byte, kind) in [
            (7, 2, Kind::Unsupported),
            (7, 9, Kind::Unsupported),
            (8, b'x', Kind::Unsupported),
            (0, 0, Kind::Invalid),
        ] {
            let before = std::mem::replace(&mut bytes[at], byte);
            fs::write(&path, &bytes).unwrap();
            assert_eq!(refused("luks?passphrase=x").await.kind(), kind, "byte {at}");
            bytes[at] = before;
        }
        // Numbers that lead beyond the end, or to no end.
        for (at, byte) in
            [(104, 0xff), (108, 1), (208 + 40, 0xff), (208 + 44, 0xff), (208 + 4, 0xff)]
        {
            let before = std::mem::replace(&mut bytes[at], byte);
            fs::write(&path, &bytes).unwrap();
            assert_eq!(refused("luks?passphrase=x").await.kind(), Kind::Invalid, "byte {at}");
            bytes[at] = before;
        }
        fs::write(&path, &bytes[..500]).unwrap();
        assert_eq!(refused("luks?passphrase=x").await.kind(), Kind::Invalid);
    });
}
