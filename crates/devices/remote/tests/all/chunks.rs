//! Disks in chunks in a local directory: the contract of devices, descriptions, and the layout that the page describes.

use std::fs;
use std::path::Path;

use blockhaul_block::{DeviceExt as _, Kind};
use blockhaul_testkit::conform::{self, ConformOptions, InitialContent, Subject};
use blockhaul_testkit::rng::Rng;

use super::*;

async fn open_as(spec: String, intent: Intent) -> Result<Stack> {
    let options = RemoteOptions {
        connect_timeout: Duration::from_secs(10),
        timeout: Duration::from_secs(10),
    };
    let registry = Registry { backends: blockhaul_remote::all(options), ..Registry::default() };
    registry.open(&DeviceSpec::parse(spec.as_ref())?, Vec::new(), intent).await
}

/// The disk in a directory, by the page alone.
fn left(folder: &Path) -> Vec<u8> {
    let manifest = fs::read_to_string(folder.join("manifest")).unwrap();
    let field = |name: &str| {
        let line = manifest.lines().find_map(|line| line.strip_prefix(name));
        line.unwrap().trim().to_owned()
    };
    let size: usize = field("size").parse().unwrap();
    let chunk: usize = field("chunk").parse().unwrap();
    let mut bytes = vec![0; size.next_multiple_of(chunk)];
    for line in manifest.lines().filter_map(|line| line.strip_prefix("page ")) {
        let (number, version) = line.split_once(' ').unwrap();
        let number: u64 = number.parse().unwrap();
        let page = fs::read(folder.join(format!("index/{number:016x}-{version}"))).unwrap();
        assert_eq!(&page[..8], b"BHINDEX1");
        let id: String = page[8..24].iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!((id, &page[24..32]), (field("id"), &number.to_be_bytes()[..]));
        for (place, entry) in page[32..].chunks_exact(8).enumerate() {
            let version: String = entry.iter().map(|byte| format!("{byte:02x}")).collect();
            if version.bytes().any(|digit| digit != b'0') {
                let place = number as usize * 16384 + place;
                let name = folder.join(format!("chunks/{place:016x}-{version}"));
                bytes[place * chunk..][..chunk].copy_from_slice(&fs::read(name).unwrap());
            }
        }
    }
    bytes.truncate(size);
    bytes
}

#[test]
fn the_contract_of_devices_holds() {
    for (size, more) in [("1000001", "size=64K&cache=128K"), ("8M", "size=1M")] {
        let options = ConformOptions::default().content(InitialContent::Zeroes);
        conform::check("chunks", options, move || async move {
            // In memory: many disks are made, and each flush is one of the file system.
            let scratch = tempfile::tempdir_in("/dev/shm").unwrap();
            let folder = scratch.path().join("disk");
            let spec = format!("chunks:{}?create={size}&{more}", folder.display());
            let stack = open_as(spec, Intent::WRITE).await?;
            Ok(Subject::from(stack).durable(move || left(&folder)).keep(scratch))
        });
    }
}

#[test]
fn descriptions_are_checked_before_anything_is_made() {
    on_a_worker(|| async {
        let scratch = tempfile::tempdir().unwrap();
        let place = scratch.path().join("disk").display().to_string();
        for (spec, intent, kind) in [
            (format!("chunks:{place}"), Intent::WRITE, Kind::NotFound),
            (format!("chunks:{place}?create=1M"), Intent::READ, Kind::NotFound),
            (format!("chunks:{place}?create=1M&size=3M"), Intent::WRITE, Kind::Usage),
            (format!("chunks:{place}?create=1M&size=4K"), Intent::WRITE, Kind::Usage),
            (format!("chunks:{place}?create=1000T"), Intent::WRITE, Kind::Usage),
            (format!("chunks:{place}?create=1M&lease=1ms"), Intent::WRITE, Kind::Usage),
            (format!("chunks:{place}?create=1M&endpoint=http://h"), Intent::WRITE, Kind::Usage),
            ("chunks:?create=1M".to_owned(), Intent::WRITE, Kind::Usage),
            ("chunks:https://h/p?create=1M".to_owned(), Intent::WRITE, Kind::Usage),
            ("chunks:s3://bucket?create=1M".to_owned(), Intent::WRITE, Kind::Usage),
            ("chunks:s3://b/p?account=1".to_owned(), Intent::WRITE, Kind::Usage),
        ] {
            let error = open_as(spec.clone(), intent).await.err().unwrap();
            assert_eq!(error.kind(), kind, "{spec}: {error}");
            assert!(!scratch.path().join("disk").exists(), "{spec}");
        }
        fs::create_dir(scratch.path().join("disk")).unwrap();
        fs::write(scratch.path().join("disk/other"), "text").unwrap();
        let error =
            open_as(format!("chunks:{place}?create=1M"), Intent::WRITE).await.err().unwrap();
        assert_eq!(error.kind(), Kind::InUse, "{error}");
        fs::remove_file(scratch.path().join("disk/other")).unwrap();
        drop(open_as(format!("chunks:{place}?create=1M"), Intent::WRITE).await.unwrap());
        for wrong in ["create=2M", "size=64K"] {
            let error =
                open_as(format!("chunks:{place}?{wrong}"), Intent::WRITE).await.err().unwrap();
            assert!(error.is_complete() && error.kind() == Kind::Usage, "{error}");
        }
        let first = open_as(format!("chunks:{place}?create=1M"), Intent::WRITE).await.unwrap();
        let refused = open_as(format!("chunks:{place}/"), Intent::WRITE).await.err().unwrap();
        assert_eq!(refused.kind(), Kind::InUse, "{refused}");
        drop(first);
        fs::write(scratch.path().join("disk/manifest"), "blockhaul chunks 2\n").unwrap();
        let error = open_as(format!("chunks:{place}"), Intent::READ).await.err().unwrap();
        assert!(error.is_complete() && error.kind() == Kind::Invalid, "{error}");
    });
}

/// A copy of the directory is what a killed program leaves.
#[test]
fn a_directory_holds_the_disk_of_the_last_flush_at_any_time() {
    on_a_worker(|| async {
        let scratch = tempfile::tempdir().unwrap();
        let folder = scratch.path().join("disk");
        let spec = format!("chunks:{}?create=3M&size=64K&cache=256K", folder.display());
        let stack = open_as(spec.clone(), Intent::WRITE).await.unwrap();
        let device = stack.device();
        let mut rng = Rng::new(rng_seed());
        let mut bytes = vec![0; 3 << 20];
        for _ in 0..12 {
            for _ in 0..8 {
                let at = rng.below(3 << 20);
                let len = rng.between(1, 200_000.min((3 << 20) - at));
                let range = at as usize..(at + len) as usize;
                if rng.chance(30) {
                    device.zero(at, len).await.unwrap();
                    bytes[range].fill(0);
                } else {
                    rng.fill(&mut bytes[range.clone()]);
                    let mut buf = blockhaul_io::Buf::unpooled(len as usize);
                    buf.copy_from_slice(&bytes[range]);
                    device.write(at, buf.into()).await.unwrap();
                }
            }
            let before = left(&folder);
            device.flush().await.unwrap();
            assert!(left(&folder) == bytes && before.len() == bytes.len());
        }
        bytes[..9].fill(9);
        let mut buf = blockhaul_io::Buf::unpooled(9);
        buf.fill(9);
        device.write(0, buf.into()).await.unwrap();
        drop(stack);
        assert!(left(&folder) == bytes, "a disk that is closed is flushed");
        let stack = open_as(spec, Intent::READ).await.unwrap();
        let read = stack.device().read(0, 3 << 20).await.unwrap();
        assert!(read.bytes() == bytes);
    });
}

fn rng_seed() -> u64 {
    let seed = blockhaul_testkit::rng::seed();
    println!("BLOCKHAUL_SEED={seed:#x}");
    seed
}
