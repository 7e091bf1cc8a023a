//! VMDK images that are made as they are read: QEMU's tools find them in order, and read the same
//! bytes.

use blockhaul_block::DeviceExt as _;
use blockhaul_catalog::Intent;
use blockhaul_testkit::conform::{self, ConformOptions, InitialContent, Subject};
use blockhaul_testkit::rng::{self, Rng};

use crate::common::{Qemu, content, error, open, read_all, with, write};

/// A disk with data that compresses and data that does not, zeroes and holes.
fn disk(rng: &mut Rng, size: usize) -> Vec<u8> {
    let mut bytes = vec![0; size];
    for _ in 0..20 {
        let at = rng.below(size as u64) as usize;
        let len = rng.between(1, 400 << 10).min((size - at) as u64) as usize;
        let part = &mut bytes[at..at + len];
        match rng.below(3) {
            0 => rng.fill(part),
            1 => part.fill_with(|| rng.below(5) as u8),
            _ => part.fill(rng.below(3) as u8),
        }
    }
    bytes
}

/// A file with holes where there are zeroes.
fn sparse(qemu: &Qemu, bytes: &[u8]) {
    write(&qemu.file("bytes"), bytes);
    qemu.img(&["convert", "-f", "raw", "-O", "raw", "-S", "4k", "bytes", "disk"]);
}

fn spec(qemu: &Qemu, options: &str) -> String {
    format!("as-vmdk:{}{options}", qemu.file("disk").display())
}

#[test]
fn an_image_has_the_bytes_of_the_disk_and_is_in_order() {
    let Some(qemu) = Qemu::find() else { return };
    let seed = rng::seed();
    eprintln!("BLOCKHAUL_SEED={seed}");
    let mut rng = Rng::new(seed);
    // Several tables, no data, and one sector.
    for (size, options) in [
        (70 << 20, "?level=1"),
        (33 << 20, "?level=9&memory=0"),
        (5 << 20, "?memory=100k&adapter=ide"),
        (512, ""),
        ((65 << 10) + 512, ""),
        (3_000_000, ""),
    ] {
        let bytes = disk(&mut rng, size);
        sparse(&qemu, &bytes);
        let image = read_all(&spec(&qemu, options)).unwrap();
        write(&qemu.file("image"), &image);
        qemu.img(&["check", "-f", "vmdk", "image"]);
        let mut wanted = bytes;
        wanted.resize(size.next_multiple_of(512), 0);
        qemu.img(&["convert", "-f", "vmdk", "-O", "raw", "image", "converted"]);
        let found = std::fs::read(qemu.file("converted")).unwrap();
        assert!(found == wanted, "{size} {options}, seed {seed}");
        let ours = read_all(&format!("vmdk:{}", qemu.file("image").display())).unwrap();
        assert!(ours == wanted, "{size} {options}, seed {seed}");
        // Any part of it, in any order.
        let parts: Vec<_> = (0..30)
            .map(|_| {
                let at = rng.below(image.len() as u64);
                (at, rng.between(1, (image.len() as u64 - at).min(300 << 10)))
            })
            .collect();
        with(&spec(&qemu, options), move |device| async move {
            for (at, len) in parts {
                let found = device.read(at, len as usize).await.unwrap();
                assert!(found.bytes() == &image[at as usize..(at + len) as usize], "{len} at {at}");
            }
        });
    }
}

#[test]
fn an_image_without_data_has_no_tables() {
    let Some(qemu) = Qemu::find() else { return };
    write(&qemu.file("disk"), &vec![0; 40 << 20]);
    let image = read_all(&spec(&qemu, "")).unwrap();
    assert!(image.len() < 70 << 10, "{}", image.len());
    write(&qemu.file("image"), &image);
    qemu.img(&["check", "-f", "vmdk", "image"]);
    assert!(
        read_all(&format!("vmdk:{}", qemu.file("image").display())).unwrap() == vec![0; 40 << 20]
    );
}

#[test]
fn images_keep_the_contract() {
    let Some(qemu) = Qemu::find() else { return };
    sparse(&qemu, &disk(&mut Rng::new(4), 3 << 20));
    let image = read_all(&spec(&qemu, "?level=1")).unwrap();
    let content = InitialContent::oracle(move |at| image[at as usize]);
    // Each read compresses anew: at the fastest level.
    let spec = spec(&qemu, "?memory=0&level=1");
    conform::check("as-vmdk", ConformOptions::default().content(content), move || {
        let spec = spec.clone();
        async move { open(&spec, Intent::READ).await.map(Subject::from) }
    });
}

#[test]
fn a_source_that_changes_gets_an_error() {
    let Some(qemu) = Qemu::find() else { return };
    let mut rng = Rng::new(5);
    let bytes: Vec<u8> = (0..1 << 20).map(|_| rng.below(7) as u8).collect();
    write(&qemu.file("disk"), &bytes);
    let path = qemu.file("disk");
    let text = with(&spec(&qemu, "?memory=0"), move |device| async move {
        let changed: Vec<u8> = (0..1 << 20).map(|_| rng.below(200) as u8).collect();
        std::fs::write(path, changed).unwrap();
        content(&device).await.unwrap_err().to_string()
    });
    assert!(text.contains("has changed"), "{text}");
    assert!(error(&spec(&qemu, "?level=10")).contains("not 1 to 9"));
}
