//! `tar`, `gz` and `xz` show the contents of packed files, as nbdkit's filters do.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;

use crate::common::{on_workers, read, write};
use crate::peers::{content, open, run, through_nbdkit};
use blockhaul_block::{Can, Device, DeviceExt, Kind};
use blockhaul_catalog::{Intent, Registry};
use blockhaul_io::Reservation;
use blockhaul_testkit::require_peer;

/// Reads a device in pieces, forward and at random, several at once.
async fn check_content(device: &Arc<dyn Device>, expected: &[u8]) {
    assert_eq!(device.facts().size, expected.len() as u64);
    let size = expected.len() as u64;
    let mut next = 0;
    while next < size {
        let len = (size - next).min(333_333);
        assert!(
            read(device, next, len as usize).await == expected[next as usize..][..len as usize]
        );
        next += len;
    }
    let mut rng = blockhaul_testkit::rng::Rng::new(blockhaul_testkit::rng::seed());
    let asked: Vec<_> = (0..40)
        .map(|_| {
            let at = rng.below(size);
            let len = (1 + rng.below(100_000)).min(size - at);
            (
                at,
                len,
                device.submit(blockhaul_block::Request::read(
                    at,
                    Reservation::unpooled(len as usize),
                )),
            )
        })
        .collect();
    for (at, len, pending) in asked {
        let blockhaul_block::Reply::Data(data) = pending.await.unwrap() else { panic!("no data") };
        assert!(data.bytes() == &expected[at as usize..][..len as usize], "{len} bytes at {at}");
    }
}

fn tar(dir: &Path, words: &[&str]) {
    run(Command::new("tar").current_dir(dir).args(words));
}

#[test]
fn a_member_of_a_tar_file_is_found_in_every_format() {
    require_peer!("tar");
    let dir = tempfile::tempdir().unwrap();
    let bytes = content(300_001);
    let long = format!("{}/disk.img", ["a-folder-with-a-long-name"; 7].join("/"));
    fs::create_dir_all(dir.path().join(&long).parent().unwrap()).unwrap();
    fs::write(dir.path().join("before"), content(100_000)).unwrap();
    fs::write(dir.path().join("disk"), &bytes).unwrap();
    fs::write(dir.path().join(&long), &bytes).unwrap();
    for format in ["gnu", "pax", "ustar"] {
        let name = format!("{format}.tar");
        let format = format!("--format={format}");
        tar(dir.path(), &["-cf", &name, &format, "before", "disk", &long]);
        let path = dir.path().join(&name);
        for member in ["disk", &long] {
            let path = path.clone();
            let bytes = bytes.clone();
            let layer = format!("tar?tar-entry={member}");
            on_workers(move || async move {
                let stack = open(&path, &[&layer], Intent::READ).await.unwrap();
                check_content(stack.device(), &bytes).await;
            });
        }
        // With GNU's long names nbdkit's filter shows another place.
        let words = ["--filter=tar", "file", path.to_str().unwrap(), "tar-entry=disk"];
        if let Some(theirs) = through_nbdkit(&words) {
            assert!(theirs == bytes, "{name}");
        }
    }
    crate::peers::conform(&dir.path().join("pax.tar"), "tar?tar-entry=disk", Intent::WRITE);
    // Written through the layer, and read by tar.
    let path = dir.path().join("gnu.tar");
    on_workers(move || async move {
        let stack = open(&path, &["tar?tar-entry=disk"], Intent::WRITE).await.unwrap();
        write(stack.device(), 299_990, b"overwritten").await;
        assert_eq!(
            stack
                .device()
                .write(300_000, blockhaul_io::Data::copy_of(b"xx"))
                .await
                .unwrap_err()
                .kind(),
            Kind::NoSpace
        );
        let limited = open(&path, &["tar?tar-entry=disk&tar-limit=64k"], Intent::READ).await;
        assert!(limited.err().unwrap().to_string().contains("tar-limit"));
        let absent = open(&path, &["tar?tar-entry=dis"], Intent::READ).await.err().unwrap();
        assert_eq!(absent.kind(), Kind::NotFound);
    });
    let shown = run(Command::new("tar").current_dir(dir.path()).args(["-xOf", "gnu.tar", "disk"]));
    assert_eq!(&shown[..299_990], &bytes[..299_990]);
    assert_eq!(&shown[299_990..], b"overwritten");
    // Members that tar stores in another form.
    fs::File::create(dir.path().join("sparse")).unwrap().set_len(1 << 20).unwrap();
    for (format, name) in [("gnu", "s1.tar"), ("pax", "s2.tar")] {
        tar(dir.path(), &["-cSf", name, &format!("--format={format}"), "sparse", "before"]);
        let path = dir.path().join(name);
        on_workers(move || async move {
            let refused = open(&path, &["tar?tar-entry=sparse"], Intent::READ).await.err().unwrap();
            assert!(refused.to_string().contains("sparse"), "{refused}");
            assert!(open(&path, &["tar?tar-entry=before"], Intent::READ).await.is_ok());
        });
    }
}

/// An archive of members of these names and contents, in the order given.
fn archive(members: &[(&str, &[u8])]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for (name, content) in members {
        let mut header = [0; 512];
        header[..name.len()].copy_from_slice(name.as_bytes());
        header[124..135].copy_from_slice(format!("{:011o}", content.len()).as_bytes());
        header[156] = b'0';
        header[148..156].fill(b' ');
        let sum: u32 = header.iter().map(|&byte| u32::from(byte)).sum();
        header[148..155].copy_from_slice(format!("{sum:06o}\0").as_bytes());
        bytes.extend(header);
        bytes.extend_from_slice(content);
        bytes.resize(bytes.len().next_multiple_of(512), 0);
    }
    bytes.resize(bytes.len() + 1024, 0);
    bytes
}

#[test]
fn members_of_an_ova_are_found_in_any_order_and_with_a_dot_before_them() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("vm.ova");
    let ova = [
        ("./._disk.vmdk", &b"AppleDouble"[..]),
        ("./disk.vmdk", b"the disk"),
        ("._vm.ovf", b"AppleDouble"),
        ("././vm.ovf", b"description"),
        ("vm.mf", b"checksums"),
    ];
    let find = |entry: &'static str, members: &[(&str, &[u8])]| {
        fs::write(&path, archive(members)).unwrap();
        let path = path.clone();
        let (found, result) = std::sync::mpsc::channel();
        on_workers(move || async move {
            let content = async {
                let layer = format!("tar?tar-entry={entry}");
                let stack = open(&path, &[&layer], Intent::READ).await;
                let device = stack.map_err(|error| error.to_string())?.device().clone();
                Ok::<_, String>(read(&device, 0, device.facts().size as usize).await)
            };
            found.send(content.await).unwrap();
        });
        result.recv().unwrap()
    };
    for (entry, content) in [
        ("disk.vmdk", "the disk"),
        ("./disk.vmdk", "the disk"),
        ("._disk.vmdk", "AppleDouble"),
        ("vm.ovf", "description"),
        ("./vm.mf", "checksums"),
    ] {
        let mut reversed = ova;
        reversed.reverse();
        for members in [ova, reversed] {
            assert!(find(entry, &members).unwrap() == content.as_bytes(), "{entry}");
        }
    }
    // The name as it is comes before others.
    let both = [("./a", &b"one"[..]), ("a", b"two"), ("././a", b"three")];
    assert!(find("a", &both).unwrap() == b"two");
    assert!(find("./a", &both).unwrap() == b"one");
    assert!(find("./././a", &both).unwrap() == b"one");
    let refused = find("disk", &ova).unwrap_err();
    assert!(refused.contains(r#"its members are "./._disk.vmdk", "./disk.vmdk""#), "{refused}");
    let members: Vec<_> = (0..100).map(|n| format!("{n}\n")).collect();
    let members: Vec<_> = members.iter().map(|name| (name.as_str(), &b""[..])).collect();
    let refused = find("x", &members).unwrap_err();
    assert!(refused.contains(r#""8\n", "9\n", …"#) && !refused.contains("10"), "{refused}");
    assert!(find("x", &[]).unwrap_err().contains("no members"));
}

#[test]
fn what_is_no_tar_file_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("x.tar");
    for bytes in [content(10_000), vec![], vec![7; 512], vec![0; 2048]] {
        fs::write(&path, &bytes).unwrap();
        let path = path.clone();
        on_workers(move || async move {
            let refused = open(&path, &["tar?tar-entry=x"], Intent::READ).await.err().unwrap();
            assert!(matches!(refused.kind(), Kind::Invalid | Kind::NotFound), "{refused}");
        });
    }
    assert!(crate::common::layer("tar").is_err());
}

#[test]
fn xz_files_are_read_at_random() {
    require_peer!("xz");
    let dir = tempfile::tempdir().unwrap();
    let bytes = content(1_500_000);
    fs::write(dir.path().join("one"), &bytes[..700_000]).unwrap();
    fs::write(dir.path().join("two"), &bytes[700_000..]).unwrap();
    let script = "xz -k --block-size=65536 --check=crc32 one && xz -k --check=sha256 -9 two && \
                  cat one.xz two.xz > both.xz && head -c 8 /dev/zero >> both.xz && \
                  cat one two | xz -0 --x86 --lzma2 > whole.xz";
    run(Command::new("sh").current_dir(dir.path()).args(["-c", script]));
    // nbdkit's filter fails an assertion if streams have other checksums, or another filter.
    let plain = dir.path().join("one.xz");
    if let Some(theirs) = through_nbdkit(&["--filter=xz", "file", plain.to_str().unwrap()]) {
        assert!(theirs == bytes[..700_000]);
    }
    for (name, bytes) in [("one.xz", &bytes[..700_000]), ("both.xz", &bytes), ("whole.xz", &bytes)]
    {
        let path = dir.path().join(name);
        let bytes = bytes.to_vec();
        on_workers(move || async move {
            for layer in ["xz", "xz?xz-max-depth=1"] {
                let stack = open(&path, &[layer], Intent::READ).await.unwrap();
                let can = stack.device().facts().can;
                assert!(can.contains(Can::MULTI_CONN) && !can.contains(Can::WRITE));
                check_content(stack.device(), &bytes).await;
            }
            let refused = open(&path, &["xz?xz-max-block=60k"], Intent::READ).await.err().unwrap();
            assert!(refused.to_string().contains("xz --block-size"), "{refused}");
        });
    }
    crate::peers::conform(&dir.path().join("both.xz"), "xz", Intent::READ);
    let packed = fs::read(dir.path().join("one.xz")).unwrap();
    let path = dir.path().join("bad.xz");
    for at in [0, 5, 6, packed.len() - 1, packed.len() - 9, packed.len() - 30] {
        let mut bad = packed.clone();
        bad[at] ^= 0x55;
        fs::write(&path, &bad).unwrap();
        let path = path.clone();
        on_workers(move || async move {
            let refused = open(&path, &["xz"], Intent::READ).await.err();
            assert_eq!(refused.unwrap().kind(), Kind::Invalid, "byte {at}");
        });
    }
    // Damage within a block is detected by its checksum, and affects only that block.
    let mut bad = packed.clone();
    bad[300] ^= 1;
    fs::write(&path, &bad).unwrap();
    on_workers(move || async move {
        let stack = open(&path, &["xz"], Intent::READ).await.unwrap();
        assert_eq!(stack.device().read(10, 10).await.unwrap_err().kind(), Kind::Io);
        assert_eq!(read(stack.device(), 100_000, 10).await, bytes[100_000..][..10]);
    });
}

/// The end of the first block's data in an xz file of one block: its length is in the index.
fn end_of_data(packed: &[u8]) -> usize {
    let footer = packed.len() - 12;
    let size = u32::from_le_bytes(packed[footer + 4..footer + 8].try_into().unwrap());
    let index = &packed[footer - 4 * (size as usize + 1)..];
    assert_eq!(index[..2], [0, 1], "one block");
    let bytes = index[2..].iter().enumerate();
    let mut unpadded = 0;
    for (at, byte) in bytes {
        unpadded |= usize::from(byte & 0x7f) << (7 * at);
        if byte & 0x80 == 0 {
            break;
        }
    }
    12 + unpadded
}

#[test]
fn xz_blocks_without_a_check_end_where_they_should() {
    require_peer!("xz");
    let dir = tempfile::tempdir().unwrap();
    let bytes = content(5003);
    fs::write(dir.path().join("disk"), &bytes).unwrap();
    run(Command::new("xz").current_dir(dir.path()).args(["-k0", "--check=none", "disk"]));
    let good = fs::read(dir.path().join("disk.xz")).unwrap();
    let path = dir.path().join("bad.xz");
    let end = end_of_data(&good);
    assert_eq!(good[end - 1], 0, "the mark of the end");
    let mut bad = good.clone();
    bad[end - 1] = 1;
    for (packed, expected) in [(good, Some(bytes)), (bad, None)] {
        fs::write(&path, &packed).unwrap();
        let unpacked = Command::new("xz").arg("-dc").arg(&path).output().unwrap();
        assert_eq!(unpacked.status.success(), expected.is_some(), "xz itself");
        let path = path.clone();
        on_workers(move || async move {
            let stack = open(&path, &["xz"], Intent::READ).await.unwrap();
            match expected {
                Some(expected) => check_content(stack.device(), &expected).await,
                None => drop(stack.device().read(0, 10).await.unwrap_err()),
            }
        });
    }
    // An empty file is not an xz file, unlike a compressed file of no bytes.
    run(Command::new("sh").args(["-c", "xz < /dev/null > \"$0\"", path.to_str().unwrap()]));
    let none = fs::read(&path).unwrap();
    for (packed, is_good) in [(none, true), (Vec::new(), false), (vec![0; 4], false)] {
        fs::write(&path, packed).unwrap();
        let path = path.clone();
        on_workers(move || async move {
            let opened = open(&path, &["xz"], Intent::READ).await;
            assert_eq!(
                opened.as_ref().ok().map(|stack| stack.device().facts().size == 0),
                is_good.then_some(true)
            );
            assert!(opened.err().is_none_or(|error| error.kind() == Kind::Invalid));
        });
    }
}

#[test]
fn gzip_files_are_read_at_random() {
    require_peer!("gzip");
    let dir = tempfile::tempdir().unwrap();
    let bytes = content(9_000_000);
    fs::write(dir.path().join("one"), &bytes[..4_000_001]).unwrap();
    fs::write(dir.path().join("two"), &bytes[4_000_001..]).unwrap();
    let script = "gzip -k1 one && gzip -k9 two && cat one.gz two.gz > both.gz && \
                  head -c 999 /dev/zero >> both.gz";
    run(Command::new("sh").current_dir(dir.path()).args(["-c", script]));
    let plain = dir.path().join("one.gz");
    if let Some(theirs) = through_nbdkit(&["--filter=gzip", "file", plain.to_str().unwrap()]) {
        assert!(theirs == bytes[..4_000_001]);
    }
    let path = dir.path().join("both.gz");
    crate::peers::conform(&path, "gz", Intent::READ);
    on_workers(move || async move {
        // Minimum memory: the index has only a few places.
        for layer in ["gz", "gz?gz-memory=1M"] {
            let stack = open(&path, &[layer], Intent::READ).await.unwrap();
            assert!(!stack.device().facts().can.contains(Can::WRITE));
            check_content(stack.device(), &bytes).await;
        }
    });
    let packed = fs::read(&plain).unwrap();
    let path = dir.path().join("bad.gz");
    let mut bad = packed.clone();
    bad[packed.len() / 2] ^= 1;
    // A second member whose beginning is damaged, behind zeroes, and cut off.
    let second = |front: &[u8], member: &[u8]| [&packed[..], front, member].concat();
    let damaged = second(b"", &[&b"\x1e"[..], &packed[1..]].concat());
    let behind = second(&[0; 512], &packed);
    let short = second(b"", &packed[..1]);
    let others = [&damaged[..], &behind, &short];
    let cut = [&packed[..packed.len() - 1], &packed[..1000], b"", b"PK", &bad];
    for bytes in cut.into_iter().chain(others) {
        fs::write(&path, bytes).unwrap();
        let path = path.clone();
        on_workers(move || async move {
            let refused = open(&path, &["gz"], Intent::READ).await.err().unwrap();
            assert_eq!(refused.kind(), Kind::Invalid, "{refused}");
        });
    }
    assert!(crate::common::layer("gz?gz-memory=1k").is_err());
}

#[test]
fn layers_stand_on_each_other() {
    require_peer!("tar");
    let dir = tempfile::tempdir().unwrap();
    let bytes = content(500_000);
    fs::write(dir.path().join("disk"), &bytes).unwrap();
    tar(dir.path(), &["-czf", "x.tgz", "disk"]);
    let path = dir.path().join("x.tgz");
    on_workers(move || async move {
        let layers = ["gz", "tar?tar-entry=disk", "cache?cache-on-read=true"];
        let stack = open(&path, &layers, Intent::READ).await.unwrap();
        check_content(stack.device(), &bytes).await;
    });
}

#[test]
fn a_packed_file_that_is_cut_anywhere_is_refused_or_has_all_of_it() {
    require_peer!("gzip");
    require_peer!("xz");
    require_peer!("tar");
    let dir = tempfile::tempdir().unwrap();
    let mut bytes = vec![0; 700];
    blockhaul_testkit::rng::Rng::new(1).fill(&mut bytes);
    fs::write(dir.path().join("disk"), &bytes).unwrap();
    let script = "gzip -k disk && xz -k --block-size=300 disk && tar cf disk.tar disk";
    run(Command::new("sh").current_dir(dir.path()).args(["-c", script]));
    for (name, layer) in [("disk.gz", "gz"), ("disk.xz", "xz"), ("disk.tar", "tar?tar-entry=disk")]
    {
        let packed = fs::read(dir.path().join(name)).unwrap();
        let bytes = bytes.clone();
        let path = dir.path().join("cut");
        on_workers(move || async move {
            let mut refused = 0;
            // Each place near the end, and a few of the others.
            let size = packed.len();
            for end in (0..size).filter(|end| end % 80 == 0 || end + 12 > size) {
                fs::write(&path, &packed[..end]).unwrap();
                match open(&path, &[layer], Intent::READ).await {
                    Ok(stack) => {
                        let size = stack.device().facts().size;
                        assert_eq!(size, 700, "{layer}: cut at {end}");
                        assert!(read(stack.device(), 0, 700).await == bytes, "{layer}: {end}");
                    }
                    Err(_) => refused += 1,
                }
            }
            assert!(refused > 8, "{layer}: {refused}");
        });
    }
}

/// Layers over storage that must not change while it is read; those over raw bytes are not.
#[test]
fn layers_that_read_contents_in_a_format() {
    let registry = Registry { layers: blockhaul_layers::all(), ..Registry::default() };
    for (layer, reads_image) in [
        ("gz", true),
        ("xz", true),
        ("luks?passphrase=secret", true),
        ("tar?tar-entry=disk", false),
        ("partition?partition=1", false),
        ("offset?offset=1M", false),
        ("cow", false),
    ] {
        assert_eq!(registry.layer(layer).unwrap().reads_image(), reads_image, "{layer}");
    }
}
