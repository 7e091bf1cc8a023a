//! Files that other programs have locked.

use std::fs::File;
use std::path::PathBuf;
use std::time::Duration;

use blockhaul_block::Kind;
use blockhaul_catalog::Intent;

use crate::descriptions::open;

/// Locked by programs that allow no other writer.
const LETS_NONE_WRITE: u64 = 201;

/// A file that is locked, and the description that has locked it.
fn locked() -> (tempfile::TempDir, PathBuf, File) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("disk");
    std::fs::write(&path, [7; 4096]).unwrap();
    let other = File::options().read(true).write(true).open(&path).unwrap();
    blockhaul_os::lock_shared(&other, LETS_NONE_WRITE).unwrap();
    (folder, path, other)
}

#[test]
fn the_lock_of_a_program_that_has_just_ended_is_waited_for() {
    let (_folder, path, other) = locked();
    let ending = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(50));
        drop(other);
    });
    open(&path, Intent::WRITE).unwrap();
    ending.join().unwrap();
}

#[test]
fn a_program_that_does_not_end_is_not_waited_for_long() {
    let (_folder, path, other) = locked();
    let refused = open(&path, Intent::WRITE).map(drop).unwrap_err();
    assert_eq!(refused.kind(), Kind::InUse, "{refused}");
    drop(other);
}
