//! Backups and snapshots of disks that clients write to.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use blockhaul_testkit::peer::Conversation;
use blockhaul_testkit::tools::{ScratchDir, text};
use blockhaul_wire::ReplyForm;

use crate::served_disk::{Disk, assert_holds, blockhaul, succeed};

/// On a busy machine, clients wait.
const PATIENT: &str = "--guest-timeout=60s";

#[test]
fn a_backup_is_the_disk_as_it_was_when_it_began() {
    let disk = Disk::serve(&[]);
    let target = disk.file("backup.raw");
    let said = disk.ctl_succeeds(&["backup", "a", &target, "--rate", "4M", "--verify", PATIENT]);
    assert_eq!(said, "job 1 has begun\n");
    disk.overwrite(2);
    let job = disk.job(1);
    assert_eq!((&job["state"], &job["export"]), (&"running".into(), &"a".into()), "{job}");
    assert!(job["saved"].as_u64().unwrap() > 16 << 20, "{job}");
    disk.ctl_succeeds(&["job-pause", "1"]);
    assert_eq!(disk.job(1)["state"], "paused");
    disk.ctl_succeeds(&["job-resume", "1"]);
    disk.ctl_succeeds(&["job-rate", "1", "0"]);
    let said = disk.ctl_succeeds(&["job-wait", "1", "-v"]);
    assert!(said.starts_with("backed up 32 MiB in "), "{said}");
    assert!(said.contains("verified 33554432 bytes"), "{said}");
    assert_eq!(disk.job(1)["released"], 0, "verification has read it again");
    assert_holds(&target, 1);
    assert_holds(disk.path.to_str().unwrap(), 2);
    // The next one shows the disk of now.
    let next = disk.file("next.raw");
    disk.ctl_succeeds(&["backup", "a", &next, "--wait"]);
    assert_holds(&next, 2);
    let table = disk.ctl_succeeds(&["jobs"]);
    assert_eq!(table.matches("completed").count(), 2, "{table}");
}

#[test]
fn a_backup_can_be_paused_while_it_is_verified() {
    let disk = Disk::serve(&[]);
    let target = disk.file("backup.raw");
    disk.ctl_succeeds(&["backup", "a", &target, "--rate", "16M", "--verify"]);
    disk.wait_for("a part", |job| job["done"].as_u64() > Some(8 << 20));
    disk.ctl_succeeds(&["job-rate", "1", "4M"]);
    disk.wait_for("all to be copied", |job| job["done"] == job["total"]);
    disk.ctl_succeeds(&["job-pause", "1"]);
    // Without the pause it would end at once.
    disk.ctl_succeeds(&["job-rate", "1", "0"]);
    // Another one is copied and verified from its start to its end meanwhile.
    disk.ctl_succeeds(&["backup", "a", &disk.file("other.raw"), "--verify", "--wait"]);
    assert_eq!(disk.job(1)["state"], "paused");
    disk.ctl_succeeds(&["job-resume", "1"]);
    let said = disk.ctl_succeeds(&["job-wait", "1", "-v"]);
    assert!(said.contains("verified 33554432 bytes"), "{said}");
}

#[test]
fn what_is_copied_and_flushed_is_not_saved_any_more() {
    let disk = Disk::serve(&[]);
    let target = disk.file("backup.raw");
    disk.ctl_succeeds(&["backup", "a", &target, "--wait"]);
    let job = disk.job(1);
    assert_eq!(job["released"].as_u64(), Some(32 << 20), "{job}");
    assert_holds(&target, 1);
    // The same for a reader of a snapshot.
    disk.ctl_succeeds(&["snapshot-add", "a", "now", "--discard", PATIENT]);
    let other = disk.file("other.raw");
    let now = disk.server.uri("now");
    let journal = format!("--journal={}", disk.file("journal"));
    let output =
        blockhaul(&["copy", "-v", "--no-progress", "--discard-source", &journal, &now, &other]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert_holds(&other, 1);
    let gone = blockhaul(&["compare", &now, &other]);
    assert!(text(&gone.stderr).contains("discarded by its reader"), "{gone:?}");
    assert_holds(&disk.server.uri("a"), 1);
}

#[test]
fn a_snapshot_is_an_export_until_it_is_removed() {
    let disk = Disk::serve(&[]);
    disk.ctl_succeeds(&["snapshot-add", "a", "then", PATIENT]);
    disk.overwrite(2);
    disk.ctl_succeeds(&["snapshot-add", "a", "later", "--snapshot-block", "4k", PATIENT]);
    disk.overwrite(3);
    assert_holds(&disk.server.uri("then"), 1);
    assert_holds(&disk.server.uri("later"), 2);
    assert_holds(&disk.server.uri("a"), 3);
    let refused = blockhaul(&["copy", "--no-progress", "random:4096", &disk.server.uri("then")]);
    assert!(text(&refused.stderr).contains("read-only"), "{refused:?}");
    // A layer may come and go meanwhile.
    disk.ctl_succeeds(&["layer-add", "a", "stats?file=/dev/null"]);
    disk.overwrite(4);
    disk.ctl_succeeds(&["export-remove", "then"]);
    disk.ctl_succeeds(&["layer-remove", "a", "stats"]);
    disk.overwrite(5);
    assert_holds(&disk.server.uri("later"), 2);
    disk.ctl_succeeds(&["export-remove", "later"]);
    assert_holds(&disk.server.uri("a"), 5);
    disk.ctl_fails(&["snapshot-add", "a", "a"], 2, &["two exports have the name \"a\""]);
}

#[test]
fn a_snapshot_shows_a_bitmap_of_its_moment() {
    let disk = Disk::serve(&[]);
    let target = disk.file("copied.raw");
    disk.ctl_succeeds(&["snapshot-add", "a", "full", "--start-bitmap", "monday"]);
    succeed(&["copy", "--no-progress", &disk.server.uri("full"), &target]);
    disk.ctl_succeeds(&["export-remove", "full", "--force"]);
    disk.write_part();
    let names = ["--bitmap", "monday", "--start-bitmap", "tuesday", PATIENT];
    disk.ctl_succeeds(&[&["snapshot-add", "a", "now"][..], &names].concat());
    let then = disk.file("then.raw");
    std::fs::copy(&disk.path, &then).unwrap();
    disk.overwrite(5);
    let context = ["--bitmap", "qemu:dirty-bitmap:monday"];
    let now = disk.server.uri("now");
    let said = succeed(&[&["copy", "--verbose"], &context[..], &[&now, &target]].concat());
    assert_eq!(said, "");
    succeed(&["compare", &then, &target]);
    let exports = disk.ctl_succeeds(&["exports", "--json"]);
    let exports: serde_json::Value = serde_json::from_str(&exports).unwrap();
    let bitmaps = &exports["exports"][0]["bitmaps"];
    // Both go on until they are removed.
    assert_eq!(
        (&bitmaps[0]["dirty"], &bitmaps[1]["dirty"]),
        (&(32 << 20).into(), &(32 << 20).into())
    );
    disk.ctl_fails(&["snapshot-add", "a", "x", "--bitmap", "no"], 2, &["has no bitmap \"no\""]);
}

#[test]
fn a_lost_snapshot_fails_the_job_and_not_the_client() {
    let disk = Disk::serve(&[]);
    let target = disk.file("backup.raw");
    let args = ["backup", "a", &target, "--rate", "1M", "--scratch-max", "1M"];
    disk.ctl_succeeds(&args);
    disk.overwrite(2);
    assert_holds(disk.path.to_str().unwrap(), 2);
    let words = ["the snapshot is lost", "1048576 bytes that may be saved"];
    disk.ctl_fails(&["job-wait", "1"], 4, &words);
    assert_eq!(disk.job(1)["state"], "failed");
    // It does not come back, so that no policy waits for it.
    for (number, policy) in [("2", "stop"), ("3", "ignore")] {
        disk.ctl_succeeds(&[&args[..], &["--on-source-error", policy]].concat());
        disk.overwrite(3);
        disk.ctl_fails(&["job-wait", number], 4, &words);
    }
}

#[test]
fn a_job_is_cancelled_on_request_and_by_the_end_of_the_server() {
    let disk = Disk::serve(&[]);
    let target = disk.file("backup.raw");
    let other = disk.file("other.raw");
    disk.ctl_succeeds(&["backup", "a", &target, "--rate", "1M"]);
    disk.wait_for("it copies", |job| job["done"].as_u64() > Some(0));
    disk.ctl_succeeds(&["job-cancel", "1"]);
    disk.wait_for("cancelled", |job| job["state"] == "cancelled");
    disk.ctl_fails(&["job-pause", "1"], 1, &["not copying"]);
    disk.ctl_succeeds(&["backup", "a", &other, "--rate", "1M"]);
    assert!(disk.server.stop().unwrap().success());
    assert_holds(disk.path.to_str().unwrap(), 1);
}

#[test]
fn later_backups_copy_only_what_has_changed() {
    let disk = Disk::serve(&[]);
    let target = disk.file("backup.raw");
    disk.ctl_succeeds(&["backup", "a", &target, "--start-bitmap", "daily", "--wait"]);
    disk.write_part();
    let dirty = |disk: &Disk| {
        let exports = disk.ctl_succeeds(&["exports", "--json"]);
        let exports: serde_json::Value = serde_json::from_str(&exports).unwrap();
        exports["exports"][0]["bitmaps"][0]["dirty"].as_u64().unwrap()
    };
    assert_eq!(dirty(&disk), 2 << 20);
    // A job that does not end well leaves what was dirty dirty.
    disk.ctl_succeeds(&["backup", "a", &target, "--bitmap", "daily", "--rate", "4k"]);
    assert_eq!(dirty(&disk), 0, "handed over");
    disk.ctl_succeeds(&["job-cancel", "2"]);
    disk.ctl(&["job-wait", "2"]);
    assert_eq!(dirty(&disk), 2 << 20);
    // Clients see it, too.
    let copied = disk.file("copied.raw");
    std::fs::copy(&target, &copied).unwrap();
    let context = ["--bitmap", "qemu:dirty-bitmap:daily"];
    let uri = disk.server.uri("a");
    succeed(&[&["copy", "--no-progress"], &context[..], &[&uri, &copied]].concat());
    succeed(&["compare", &copied, disk.path.to_str().unwrap()]);
    disk.ctl_succeeds(&["backup", "a", &target, "--bitmap", "daily", "--wait"]);
    let job = disk.job(3);
    assert!(job["result"].as_str().unwrap().starts_with("2097152 bytes"), "{job}");
    succeed(&["compare", &target, disk.path.to_str().unwrap()]);
    assert_eq!(dirty(&disk), 0);
    disk.ctl_fails(&["bitmap-add", "a", "daily"], 2, &["has a bitmap \"daily\" already"]);
    disk.ctl_fails(&["bitmap-add", "a", "b", "--granularity", "1000"], 2, &["power of two"]);
    disk.ctl_fails(&["backup", "a", &target, "--bitmap", "x"], 2, &["known are \"daily\""]);
    disk.write_part();
    disk.ctl_succeeds(&["bitmap-clear", "a", "daily"]);
    assert_eq!(dirty(&disk), 0);
    disk.ctl_succeeds(&["bitmap-remove", "a", "daily"]);
    let lost = blockhaul(&[&["copy", "--no-progress"], &context[..], &[&uri, &copied]].concat());
    assert!(text(&lost.stderr).contains("no bitmap"), "{lost:?}");
}

#[test]
fn wrong_requests_are_refused_before_anything_is_touched() {
    let scratch = ScratchDir::new().unwrap();
    let kept = scratch.file("kept");
    std::fs::write(&kept, b"precious").unwrap();
    let kept = kept.to_str().unwrap();
    let export = ["--export", "r=[", kept, "-r", "]"];
    let disk = Disk::serve(&export);
    disk.ctl_fails(&["backup", "r", "t"], 2, &["read-only: it does not change"]);
    let own = disk.path.to_str().unwrap();
    disk.ctl_fails(&["backup", "nosuch", kept], 3, &["there is no export \"nosuch\""]);
    disk.ctl_fails(&["backup", "a", "-"], 2, &["standard output of the server"]);
    disk.ctl_fails(&["backup", "a", kept, "--rate", "x"], 2, &["rate"]);
    disk.ctl_fails(&["backup", "a", kept, "--snapshot-block", "5000"], 2, &["power of two"]);
    disk.ctl_fails(&["backup", "a", kept, "--fleece", "/no/such"], 1, &["/no/such"]);
    disk.ctl_fails(&["backup", "a", "nosuch:x"], 2, &["unknown scheme"]);
    disk.ctl_fails(&["job-cancel", "7"], 3, &["there is no job 7"]);
    disk.ctl_fails(&["backup", "a", own, "--wait"], 2, &["are the same"]);
    assert_eq!(std::fs::read(kept).unwrap(), b"precious");
    assert_holds(own, 1);
    assert!(
        raw(&disk, r#"{"command":"backup","export":"a","target":"t","options":["--journal=j"]}"#)
            .contains("--journal cannot be used here")
    );
    assert!(
        raw(&disk, r#"{"command":"backup","export":"a","target":"t","snapshot":{"x":1}}"#)
            .contains("snapshot.x\\\" is unknown")
    );
    assert!(!Path::new("t").exists());
}

/// The reply to a line on the control socket.
fn raw(disk: &Disk, line: &str) -> String {
    use std::io::{BufRead as _, BufReader, Write as _};
    let mut stream = std::os::unix::net::UnixStream::connect(&disk.control).unwrap();
    stream.write_all(format!("{line}\n").as_bytes()).unwrap();
    let mut reply = String::new();
    BufReader::new(stream).read_line(&mut reply).unwrap();
    reply
}

#[test]
fn bitmaps_outlive_the_server_and_are_never_silently_wrong() {
    let kept = ScratchDir::new().unwrap();
    let directory = kept.path().to_str().unwrap();
    let more = ["--bitmaps", directory];
    let mut disk = Disk::serve(&more);
    let shown = |disk: &Disk| -> serde_json::Value {
        let exports = disk.ctl_succeeds(&["exports", "--json"]);
        let exports: serde_json::Value = serde_json::from_str(&exports).unwrap();
        exports["exports"][0]["bitmaps"].clone()
    };
    let target = disk.file("backup.raw");
    disk.ctl_succeeds(&["backup", "a", &target, "--start-bitmap", "daily", "--wait"]);
    disk.write_part();
    disk.ctl_succeeds(&["bitmap-add", "a", "late", "--granularity", "4k"]);
    disk.ctl_succeeds(&["bitmap-disable", "a", "late"]);
    // An orderly end.
    disk = disk.again(&more, true);
    let bitmaps = shown(&disk);
    assert_eq!((&bitmaps[0]["dirty"], &bitmaps[1]["dirty"]), (&(2 << 20).into(), &0.into()));
    assert_eq!((&bitmaps[1]["granularity"], &bitmaps[1]["enabled"]), (&4096.into(), &false.into()));
    disk.write_part();
    assert_eq!(shown(&disk)[1]["dirty"], 0, "it is disabled");
    disk.ctl_succeeds(&["bitmap-merge", "a", "late", "daily"]);
    assert_eq!(shown(&disk)[1]["dirty"], 2 << 20);
    disk.ctl_succeeds(&["backup", "a", &target, "--bitmap", "daily", "--wait"]);
    succeed(&["compare", &target, disk.path.to_str().unwrap()]);
    // A crash, before anything is written: nobody can know that.
    disk = disk.again(&more, false);
    let why = shown(&disk)[0]["inconsistent"].as_str().unwrap().to_string();
    assert!(why.contains("did not end in order"), "{why}");
    for words in [
        &["backup", "a", "t", "--bitmap", "daily"][..],
        &["backup", "a", "t", "--start-bitmap", "daily"],
        &["bitmap-add", "a", "daily"],
        &["bitmap-clear", "a", "daily"],
        &["bitmap-merge", "a", "daily", "late"],
    ] {
        disk.ctl_fails(words, 2, &["\"daily\"", "is inconsistent", "remove it"]);
    }
    let context = ["copy", "--no-progress", "--bitmap", "qemu:dirty-bitmap:daily"];
    let lost = blockhaul(&[&context[..], &[&disk.server.uri("a"), &target]].concat());
    assert!(text(&lost.stderr).contains("no bitmap"), "{lost:?}");
    // It stays so until it is removed.
    disk = disk.again(&more, true);
    assert!(shown(&disk)[0]["inconsistent"].is_string());
    disk.ctl_succeeds(&["bitmap-remove", "a", "daily"]);
    disk.ctl_succeeds(&["bitmap-remove", "a", "late"]);
    assert_eq!(shown(&disk), serde_json::json!([]));
    assert_eq!(std::fs::read_dir(directory).unwrap().count(), 0);
    // A device that clients have moved to is not the one of the command line.
    disk.ctl_succeeds(&["bitmap-add", "a", "weekly"]);
    let other = disk.file("other.raw");
    disk.ctl_succeeds(&["mirror", "a", &other, "--wait"]);
    disk.ctl_succeeds(&["job-complete", "1", "--wait"]);
    disk = disk.again(&more, true);
    let why = shown(&disk)[0]["inconsistent"].as_str().unwrap().to_string();
    assert!(why.contains("the device was") && why.contains("other.raw"), "{why}");
    // A file that is not ours.
    let own = Path::new(directory).join("bitmaps-b.json");
    std::fs::write(&own, "{}").unwrap();
    disk.ctl_fails(&["export-add", "b=memory:1M"], 1, &["bitmaps-b.json", "version 2"]);
    std::fs::remove_file(&own).unwrap();
    // One that was changed, and one of a version without a digest.
    let add = ["export-add", "b=memory:1M"];
    let remove = ["export-remove", "b"];
    disk.ctl_succeeds(&add);
    disk.ctl_succeeds(&["bitmap-add", "b", "daily", "--granularity", "4k"]);
    disk.ctl_succeeds(&remove);
    let written = std::fs::read_to_string(&own).unwrap();
    let changed = written.replace("\"granularity\":4096", "\"granularity\":8192");
    assert_ne!(written, changed);
    std::fs::write(&own, changed).unwrap();
    disk.ctl_fails(
        &add,
        1,
        &["bitmaps-b.json", "is damaged: its digest does not match", "full backup"],
    );
    let cut = written.lines().next().unwrap();
    std::fs::write(&own, format!("{cut}\n")).unwrap();
    disk.ctl_fails(&add, 1, &["bitmaps-b.json", "is damaged"]);
    let old = cut.replace("\"version\":2", "\"version\":1");
    std::fs::write(&own, format!("{old}\n")).unwrap();
    disk.ctl_succeeds(&add);
    disk.ctl_fails(&["bitmap-clear", "b", "daily"], 2, &["is inconsistent"]);
    disk.ctl_succeeds(&remove);
    std::fs::write(&own, &written).unwrap();
    disk.ctl_succeeds(&add);
    disk.ctl_succeeds(&["bitmap-clear", "b", "daily"]);
}

#[test]
fn several_disks_are_backed_up_at_one_moment_as_a_whole_or_not_at_all() {
    let more = ["--export", "b=memory:32M", "--export", "c=memory:32M"];
    let disk = Disk::serve(&more);
    // A client that writes the same number to both disks, first to b: at no moment is c ahead.
    let stop = Arc::new(AtomicBool::new(false));
    let stopped = stop.clone();
    let mut clients = ["b", "c"].map(|export| {
        let mut client = Conversation::connect(disk.server.socket()).unwrap();
        client.hello(3).unwrap();
        client.negotiate(ReplyForm::Structured).unwrap();
        client.go(export).unwrap();
        client
    });
    let writer = std::thread::spawn(move || {
        let mut count = 0_u64;
        while !stopped.load(Ordering::Relaxed) {
            count += 1;
            for client in &mut clients {
                client.write(16 << 20, &[&count.to_le_bytes()[..], &[0; 504]].concat()).unwrap();
            }
        }
        count
    });
    let number = |path: &str| -> u64 {
        use std::os::unix::fs::FileExt as _;
        let mut bytes = [0; 8];
        let file = std::fs::File::open(path).unwrap();
        file.read_exact_at(&mut bytes, 16 << 20).unwrap();
        u64::from_le_bytes(bytes)
    };
    let to_b = disk.file("b.raw");
    let to_c = disk.file("c.raw");
    let mut last = 0;
    for _ in 0..10 {
        let with = ["--with", "c", &to_c, "--wait", PATIENT];
        disk.ctl_succeeds(&[&["backup", "b", &to_b][..], &with].concat());
        let b = number(&to_b);
        let c = number(&to_c);
        assert!(b == c || b == c + 1, "{b} and {c} are not of one moment");
        assert!(b >= last, "{b} is older than {last}");
        last = b;
    }
    stop.store(true, Ordering::Relaxed);
    assert!(writer.join().unwrap() >= last);
    assert!(last > 1, "nothing was written");
    // One fails: the others end, and bitmaps are as they were.
    disk.ctl_succeeds(&["bitmap-add", "a", "daily"]);
    disk.ctl_succeeds(&["bitmap-add", "b", "daily"]);
    disk.write_part();
    let target = disk.file("a.raw");
    disk.ctl_succeeds(&["backup", "a", &target, "--wait"]);
    let group = ["--with", "b", "/no/such/b.raw", "--bitmap", "daily", "--wait"];
    let output = disk.ctl(&[&["backup", "a", &target][..], &group].concat());
    assert_ne!(output.status.code(), Some(0), "{output:?}");
    let exports = disk.ctl_succeeds(&["exports", "--json"]);
    let exports: serde_json::Value = serde_json::from_str(&exports).unwrap();
    assert_eq!(exports["exports"][0]["bitmaps"][0]["dirty"], 2 << 20);
    // Two targets that are one file, one disk twice.
    let words = ["backup", "b", &to_b, "--with", "c", &to_b, "--wait"];
    disk.ctl_fails(
        &words,
        3,
        &[
            "already open as the target of a copy by the backup of export \"b\"",
            "backup of export \"c\"",
        ],
    );
    disk.ctl_fails(&["backup", "b", &to_b, "--with", "b", &to_c], 2, &["in the group twice"]);
    assert_eq!(number(&to_b), last, "the earlier backup was touched");
}
