//! Backing files: chains, loops, and names that are not followed.

use blockhaul_block::ContextSet;

use crate::common::{Qemu, content, error, extents, facts, read_all, with, write};

const CLUSTER: u64 = 64 << 10;

/// A chain of images 0 to `len - 1`, each with a cluster of its own number.
fn chain(qemu: &Qemu, len: u64) {
    for number in 0..len {
        let name = format!("{number}.qcow2");
        let backing = match number {
            0 => "cluster_size=64k".to_string(),
            _ => format!("backing_file={}.qcow2,backing_fmt=qcow2", number - 1),
        };
        qemu.create(&name, &backing, (len + 1) * CLUSTER);
        let at = number * CLUSTER;
        qemu.io("qcow2", &name, &[format!("write -P {} {at} {CLUSTER}", number + 1)]);
    }
}

#[test]
fn a_chain_may_be_long() {
    let Some(qemu) = Qemu::find() else { return };
    chain(&qemu, 24);
    let wanted = qemu.raw("23.qcow2");
    with(&qemu.spec("23.qcow2", "names=allow"), move |device| async move {
        assert!(content(&device).await.unwrap() == wanted);
        assert_eq!(device.facts().files.len(), 24);
        let depth = extents(&device, ContextSet::empty().with(1)).await.unwrap();
        let states: Vec<_> = depth.runs().iter().map(|run| (run.len, run.state)).collect();
        let mut expected: Vec<_> = (1..=24).rev().map(|depth| (CLUSTER, depth)).collect();
        expected.push((CLUSTER, 0));
        assert_eq!(states, expected);
    });
}

#[test]
fn a_loop_is_refused() {
    let Some(qemu) = Qemu::find() else { return };
    chain(&qemu, 3);
    qemu.img(&["rebase", "-u", "-F", "qcow2", "-b", "2.qcow2", "0.qcow2"]);
    let text = error(&qemu.spec("2.qcow2", "names=allow"));
    assert!(text.contains("loop") && text.contains("2.qcow2"), "{text}");
    qemu.img(&["rebase", "-u", "-F", "qcow2", "-b", "0.qcow2", "0.qcow2"]);
    assert!(error(&qemu.spec("0.qcow2", "names=allow")).contains("loop"));
    // By another way to itself.
    std::os::unix::fs::symlink("0.qcow2", qemu.file("link")).unwrap();
    qemu.img(&["rebase", "-u", "-F", "qcow2", "-b", "link", "0.qcow2"]);
    assert!(error(&qemu.spec("0.qcow2", "names=allow")).contains("loop"));
}

#[test]
fn a_name_in_an_image_is_not_followed_unless_allowed() {
    let Some(qemu) = Qemu::find() else { return };
    write(&qemu.file("secret"), &[0x5e; 65536]);
    qemu.create("top", "backing_file=secret,backing_fmt=raw", CLUSTER);
    for options in ["", "names=refuse"] {
        let text = error(&qemu.spec("top", options));
        assert!(text.contains("secret") && text.contains("names=allow"), "{text}");
    }
    assert!(read_all(&qemu.spec("top", "names=allow")).unwrap() == [0x5e; 65536]);
    // The user names the device.
    assert!(read_all(&qemu.spec("top", "backing=zero:64k")).unwrap() == [0; 65536]);
    qemu.create("with-data", "data_file=data,data_file_raw=on", CLUSTER);
    let text = error(&qemu.spec("with-data", ""));
    assert!(text.contains("data-file=DEVICE"), "{text}");
    let options = format!("data-file={}", qemu.file("data").display());
    assert_eq!(facts(&qemu.spec("with-data", &options)).size, CLUSTER);
}

#[test]
fn a_raw_disk_is_not_taken_for_an_image_because_of_what_its_guest_wrote() {
    let Some(qemu) = Qemu::find() else { return };
    // The guest of `base`, a raw disk, has written an image that names a file of the host.
    write(&qemu.file("secret"), &[0x5e; 65536]);
    qemu.create("base", "backing_file=secret,backing_fmt=raw", CLUSTER);
    let mut disk = std::fs::read(qemu.file("base")).unwrap();
    disk.resize(disk.len().next_multiple_of(512), 0);
    write(&qemu.file("base"), &disk);
    qemu.create("top", "backing_file=base,backing_fmt=raw", disk.len() as u64);
    assert!(read_all(&qemu.spec("top", "names=allow")).unwrap() == disk);
    // The top image does not tell the format: the extension is overwritten by an unknown one.
    let mut bytes = std::fs::read(qemu.file("top")).unwrap();
    let place = bytes.windows(4).position(|four| four == [0xe2, 0x79, 0x2a, 0xca]).unwrap();
    bytes[place..place + 4].copy_from_slice(&[1, 2, 3, 4]);
    write(&qemu.file("top"), &bytes);
    let text = error(&qemu.spec("top", "names=allow"));
    assert!(text.contains("backing-format=qcow2 or backing-format=raw"), "{text}");
    let raw = read_all(&qemu.spec("top", "names=allow&backing-format=raw")).unwrap();
    assert!(raw == disk);
    let image = read_all(&qemu.spec("top", "names=allow&backing-format=qcow2")).unwrap();
    assert!(image[..65536] == [0x5e; 65536]);
}

#[test]
fn a_backing_file_of_another_format_is_refused_by_name() {
    let Some(qemu) = Qemu::find() else { return };
    qemu.img(&["create", "-q", "-f", "parallels", "base", "1M"]);
    qemu.create("top", "backing_file=base,backing_fmt=parallels", 1 << 20);
    let text = error(&qemu.spec("top", "names=allow"));
    assert!(text.contains("\"parallels\"") && text.contains("backing=DEVICE"), "{text}");
}

#[test]
fn an_error_names_the_image_of_the_chain() {
    let Some(qemu) = Qemu::find() else { return };
    chain(&qemu, 2);
    let mut bytes = std::fs::read(qemu.file("0.qcow2")).unwrap();
    // The first entry of the L1 table, whose offset is at byte 40.
    let l1 = u64::from_be_bytes(bytes[40..48].try_into().unwrap()) as usize;
    bytes[l1..l1 + 8].copy_from_slice(&0x1234_5600_0000_u64.to_be_bytes());
    write(&qemu.file("0.qcow2"), &bytes);
    let text = error(&qemu.spec("1.qcow2", "names=allow"));
    assert!(text.contains("0.qcow2") && text.contains("L1 entry 0"), "{text}");
}

/// The name of a node in JSON.
fn json_name(driver: &str, file: &str) -> String {
    format!(r#"json:{{"driver":"{driver}","file":{{"driver":"file","filename":"{file}"}}}}"#)
}

#[test]
fn backing_files_named_in_json_are_those_of_qemu() {
    let Some(qemu) = Qemu::find() else { return };
    qemu.create("base.qcow2", "cluster_size=64k", 3 * CLUSTER);
    qemu.io("qcow2", "base.qcow2", &["write -P 1 0 64k".into()]);
    qemu.img(&["convert", "-O", "raw", "base.qcow2", "base.raw"]);
    let [image, raw] = ["base.qcow2", "base.raw"].map(|name| qemu.file(name).display().to_string());
    for (name, format) in [
        (json_name("qcow2", &image), "qcow2"),
        (
            format!("json:{{'driver':'qcow2','file.driver':'file','file.filename':'{image}'}}"),
            "qcow2",
        ),
        (
            format!(
                r#"json:{{"driver":"qcow2","file.filename":"{image}","node-name":"n","discard":"unmap"}}"#
            ),
            "qcow2",
        ),
        (json_name("raw", &raw), "raw"),
        (format!(r#"json:{{"driver":"file","filename":"{raw}"}}"#), "file"),
        // The format in the header hides that in the name.
        (json_name("raw", &image), "qcow2"),
        (json_name("qcow2", &image), "raw"),
    ] {
        // QEMU does not check what is in the name.
        qemu.img(&["create", "-q", "-u", "-f", "qcow2", "-F", format, "-b", &name, "top", "192k"]);
        qemu.io("qcow2", "top", &["write -P 2 64k 64k".into()]);
        assert!(read_all(&qemu.spec("top", "names=allow")).unwrap() == qemu.raw("top"), "{name}");
        let text = error(&qemu.spec("top", ""));
        assert!(text.contains("names=allow"), "{text}");
    }
    // The name alone tells the format.
    qemu.create("top", "cluster_size=64k", 3 * CLUSTER);
    let bare = |name: &str| {
        let mut header = std::fs::read(qemu.file("top")).unwrap();
        header[8..16].copy_from_slice(&4096_u64.to_be_bytes());
        header[16..20].copy_from_slice(&u32::try_from(name.len()).unwrap().to_be_bytes());
        header[4096..4096 + name.len()].copy_from_slice(name.as_bytes());
        write(&qemu.file("top"), &header);
    };
    for driver in ["qcow2", "raw"] {
        bare(&json_name(driver, &image));
        assert!(read_all(&qemu.spec("top", "names=allow")).unwrap() == qemu.raw("top"), "{driver}");
    }
    bare(&format!(r#"json:{{"file":{{"driver":"file","filename":"{image}"}}}}"#));
    assert!(error(&qemu.spec("top", "names=allow")).contains("backing-format=qcow2"));
    // Another chain, by the same rules.
    bare(&json_name("qcow2", &qemu.file("top").display().to_string()));
    assert!(error(&qemu.spec("top", "names=allow")).contains("loop"));
}

#[test]
fn names_in_json_that_are_not_known_are_refused_by_their_driver() {
    let Some(qemu) = Qemu::find() else { return };
    for (name, why) in [
        (r#"json:{"driver":"qcow2","file":{"driver":"https","url":"https://h/a"}}"#, "'https'"),
        (r#"json:{"driver":"rbd","pool":"p","image":"i"}"#, "'rbd'"),
        (r#"json:{"driver":"raw","offset":512,"file":{"filename":"/etc/passwd"}}"#, "'offset'"),
        ("json:{", "EOF"),
        (r#"json:{"driver":"qcow2","file":"node"}"#, "node"),
    ] {
        qemu.img(&["create", "-q", "-u", "-f", "qcow2", "-F", "raw", "-b", name, "top", "192k"]);
        let text = error(&qemu.spec("top", "names=allow"));
        assert!(text.contains(why) && text.contains("backing=DEVICE"), "{text}");
        // The user names the device.
        assert!(read_all(&qemu.spec("top", "backing=zero:192k")).unwrap() == vec![0; 192 << 10]);
    }
}
