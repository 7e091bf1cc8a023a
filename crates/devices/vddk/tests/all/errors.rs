//! What goes wrong while a disk is opened is one clear line.

use blockhaul_catalog::Intent;

use crate::support::{Lab, open, run};

/// The error of opening a disk.
fn error(lab: &Lab, more: &str) -> String {
    let spec = lab.spec("p.vmdk", more);
    let error = run(move || async move {
        match open(&spec, Intent::READ).await {
            Ok(_) => panic!("it was opened"),
            Err(error) => error.to_string(),
        }
    });
    assert!(!error.contains('\n') && !error.contains("hidden"), "{error}");
    error
}

fn lab(settings: &str) -> Lab {
    let lab = Lab::new(settings);
    lab.pattern("p.vmdk", "size=1G stride=1M data=50");
    lab
}

const REMOTE: &str = "&server=esx&user=root&password=hidden&vm=moref%3D7&thumbprint=aa";

#[test]
fn a_missing_or_foreign_library() {
    let lab = lab("");
    let other = lab.path("lib64/libvixDiskLib.so.5");
    std::fs::rename(lab.library(), &other).unwrap();
    let text = error(&lab, "");
    assert!(text.contains("libvixDiskLib.so.5: versions 6.5 to 9 are supported"), "{text}");
    std::fs::remove_file(&other).unwrap();
    let text = error(&lab, "");
    assert!(text.contains("no libvixDiskLib.so.9, .8, .7 or .6 in"), "{text}");
    std::fs::write(lab.library(), "not a library").unwrap();
    let text = error(&lab, "");
    assert!(text.contains("cannot load") && text.contains("libvixDiskLib.so.8"), "{text}");
}

/// Renames a function of the library: nobody finds it any more.
fn without(lab: &Lab, function: &[u8]) {
    let mut bytes = std::fs::read(lab.library()).unwrap();
    let parts = bytes.windows(function.len()).enumerate();
    let places: Vec<_> = parts.filter(|(_, part)| *part == function).map(|(at, _)| at).collect();
    assert!(!places.is_empty());
    for at in places {
        bytes[at + function.len() - 1] = b'_';
    }
    std::fs::write(lab.library(), bytes).unwrap();
}

#[test]
fn missing_functions() {
    let incomplete = lab("");
    without(&incomplete, b"VixDiskLib_ReadAsync");
    let text = error(&incomplete, "");
    assert!(text.contains("it has no function VixDiskLib_ReadAsync"), "{text}");
    // Queries and parameters are in newer versions only.
    let old = lab("version=6");
    without(&old, b"VixDiskLib_QueryAllocatedBlocks");
    without(&old, b"VixDiskLib_AllocateConnectParams");
    std::fs::rename(old.library(), old.path("lib64/libvixDiskLib.so.6")).unwrap();
    let spec = old.spec("p.vmdk", REMOTE);
    run(move || async move {
        let stack = open(&spec, Intent::READ).await.unwrap();
        let facts = stack.device().facts();
        assert_eq!((facts.size, facts.block.preferred), (1 << 30, 4096));
        assert!(
            facts.emulated.contains(blockhaul_block::Can::EXTENTS) || facts.contexts.is_empty()
        );
    });
    old.assert_clean();
}

#[test]
fn what_the_server_refuses() {
    let cases = [
        ("password=other", "cannot connect to esx as root: VixDiskLib_ConnectEx: Insufficient"),
        ("thumbprint=bb", "The SSL certificate thumbprint does not match (error 18002)"),
        ("fail=ConnectEx:1-:18000", "Cannot connect to host (error 18000)"),
        ("locked=p.vmdk", "cannot open the disk: VixDiskLib_Open: The file is already in use"),
        ("fail=Open:1-:4", "cannot open the disk: VixDiskLib_Open: A file was not found (error 4)"),
        ("fail=GetInfo:1:1", "cannot read the size of the disk: VixDiskLib_GetInfo: Unknown error"),
    ];
    for (settings, expected) in cases {
        let lab = lab(settings);
        let text = error(&lab, REMOTE);
        assert!(
            text.contains(expected) && text.starts_with("vddk:[store] machine/p.vmdk"),
            "{text}"
        );
        lab.assert_clean();
    }
    let lab = lab("snapshot=snapshot-1");
    let text = error(&lab, &format!("{REMOTE}&snapshot=snapshot-2"));
    assert!(
        text.contains("esx as root, snapshot snapshot-2: VixDiskLib_ConnectEx: A file was"),
        "{text}"
    );
}

#[test]
fn a_library_that_does_not_start() {
    let text = error(&lab("fail=InitEx:1:1"), "");
    assert!(text.contains("VixDiskLib_InitEx failed (error 1)"), "{text}");
}
