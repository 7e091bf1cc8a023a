//! `blockhaul mount`: what programs see in the file is what is on the device, and a mount ends as it should.
//! Tests that mount need root and FUSE.

use std::fs::{self, File, OpenOptions};
use std::io::ErrorKind;
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use blockhaul_testkit::rng::{Rng, seed};
use blockhaul_testkit::tools::{self, PeerServer, ScratchDir, SkipReason, until};
use rustix::fs::{FallocateFlags, SeekFrom, fallocate, seek};

const LIMIT: Duration = Duration::from_secs(120);
const OURS: &str = env!("CARGO_BIN_EXE_blockhaul");
const MIB: u64 = 1 << 20;

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn ours(args: &[&str]) -> Output {
    tools::output(Command::new(OURS).args(args), LIMIT).unwrap()
}

fn words(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// Whether this machine lets us mount; a reason is printed if not.
fn can_mount() -> bool {
    let reason = if !rustix::process::geteuid().is_root() {
        "needs root"
    } else if OpenOptions::new().read(true).write(true).open("/dev/fuse").is_err() {
        "/dev/fuse cannot be opened"
    } else {
        return true;
    };
    tools::skip_or_fail(&SkipReason::new(reason));
    false
}

fn is_mounted(target: &Path) -> bool {
    let table = fs::read_to_string("/proc/self/mountinfo").unwrap();
    table.lines().any(|line| line.split(' ').nth(4) == target.to_str())
}

/// A mount in a directory, which ends when this is dropped.
struct Mount {
    child: Child,
    target: PathBuf,
}

impl Mount {
    fn of(scratch: &ScratchDir, args: &[&str]) -> Mount {
        let target = scratch.file("mnt");
        // It may be there from an earlier mount.
        let _ = fs::create_dir(&target);
        Mount::over(target, args)
    }

    fn over(target: PathBuf, args: &[&str]) -> Mount {
        let mut command = Command::new(OURS);
        command.arg("mount").args(args).arg(&target).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        until("it is mounted", || {
            if let Some(status) = child.try_wait().unwrap() {
                let mut said = String::new();
                let mut stderr = child.stderr.take().unwrap();
                std::io::Read::read_to_string(&mut stderr, &mut said).unwrap();
                panic!("{args:?} ended with {status}: {said}");
            }
            is_mounted(&target)
        });
        Mount { child, target }
    }

    fn disk(&self) -> PathBuf {
        if self.target.is_dir() { self.target.join("disk") } else { self.target.clone() }
    }

    fn open(&self) -> File {
        OpenOptions::new().read(true).write(true).open(self.disk()).unwrap()
    }

    fn signal(&self, name: &str) {
        let pid = self.child.id().to_string();
        assert!(Command::new("kill").args(["-s", name, &pid]).status().unwrap().success());
    }

    /// Ends it by a signal; its exit status.
    fn end(mut self) -> Option<i32> {
        self.signal("TERM");
        let status = tools::wait_within(&mut self.child, LIMIT).expect("it ends after a signal");
        assert!(!is_mounted(&self.target));
        status.code()
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        if self.child.try_wait().is_ok_and(|status| status.is_none()) {
            self.signal("TERM");
            let _ = tools::wait_within(&mut self.child, Duration::from_secs(20));
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
        if is_mounted(&self.target) {
            let _ = Command::new("umount").arg("-l").arg(&self.target).status();
        }
    }
}

/// A sparse file with random data in places.
fn image(scratch: &ScratchDir, size: u64) -> PathBuf {
    let path = scratch.file("disk.raw");
    let file = File::create(&path).unwrap();
    file.set_len(size).unwrap();
    let mut rng = Rng::new(seed());
    for at in [0, size / 3, size / 2] {
        let mut bytes = vec![0; (MIB.min(size / 8)) as usize];
        rng.fill(&mut bytes);
        file.write_all_at(&bytes, at).unwrap();
    }
    path
}

#[test]
fn the_file_has_the_content_and_the_holes_of_the_device() {
    if !can_mount() {
        return;
    }
    let scratch = ScratchDir::on_disk().unwrap();
    let image = image(&scratch, 64 * MIB);
    for cache in ["none", "open", "keep"] {
        let mount = Mount::of(&scratch, &["--cache", cache, words(&image)]);
        assert_eq!(fs::read(mount.disk()).unwrap(), fs::read(&image).unwrap(), "{cache}");
        let names: Vec<_> = fs::read_dir(&mount.target)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        assert_eq!(names, ["disk", "info.json"]);
        let info = fs::read_to_string(mount.target.join("info.json")).unwrap();
        assert!(info.contains("\"export-size\": 67108864"), "{info}");
        assert_eq!(fs::metadata(mount.disk()).unwrap().mode() & 0o777, 0o400);
        let copy = scratch.file("copy");
        let source = mount.disk();
        let always = "--sparse=always";
        let copied = Command::new("cp").arg(always).args([&source, &copy]).status().unwrap();
        assert!(copied.success());
        assert_eq!(fs::read(&copy).unwrap(), fs::read(&image).unwrap());
        assert!(fs::metadata(&copy).unwrap().blocks() * 512 <= 4 * MIB, "cp keeps the holes");
        let same = ours(&["compare", words(&mount.disk()), words(&image)]);
        assert_eq!(same.status.code(), Some(0), "{}", text(&same.stderr));
        assert_eq!(mount.end(), Some(0));
    }
}

/// The files in a directory, in order.
fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).unwrap();
    entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
}

#[test]
fn several_devices_are_files_of_one_directory() {
    if !can_mount() {
        return;
    }
    let scratch = ScratchDir::on_disk().unwrap();
    let image = image(&scratch, 4 * MIB);
    let own = ["-e", "b c=[", "memory:64k", "--layer", "offset?offset=4k&range=8k", "]"];
    let read_only = ["-e", "r%2525=[", "pattern:1M", "-r", "]"];
    let args = [&["-w", "-e", "a", words(&image)], &own[..], &read_only].concat();
    let mount = Mount::of(&scratch, &args);
    assert_eq!(names(&mount.target), ["a", "b c", "r%25", "info.json"]);
    let [a, b, r] = ["a", "b c", "r%25"].map(|name| mount.target.join(name));
    let size = |path: &Path| fs::metadata(path).unwrap().len();
    assert_eq!([&a, &b, &r].map(|path| size(path)), [4 * MIB, 8 << 10, MIB]);
    assert_eq!(fs::read(&a).unwrap(), fs::read(&image).unwrap());
    let changed = OpenOptions::new().write(true).open(&a).unwrap();
    let other = OpenOptions::new().write(true).open(&b).unwrap();
    changed.write_all_at(b"of a", 512).unwrap();
    other.write_all_at(b"of b", 512).unwrap();
    changed.sync_all().unwrap();
    assert_eq!(fs::read(&image).unwrap()[512..516], *b"of a", "after fsync");
    assert_eq!(fs::read(&b).unwrap()[512..516], *b"of b");
    drop((changed, other));
    let refused = OpenOptions::new().write(true).open(&r).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::ReadOnlyFilesystem, "it is, and the others are not");
    let info = fs::read_to_string(mount.target.join("info.json")).unwrap();
    let info: serde_json::Value = serde_json::from_str(&info).unwrap();
    let exports = info["exports"].as_array().unwrap();
    let facts = exports.iter().map(|one| (&one["export-name"], &one["export-size"]));
    let facts: Vec<_> =
        facts.map(|(name, size)| (name.as_str().unwrap(), size.as_u64().unwrap())).collect();
    assert_eq!(facts, [("a", 4 * MIB), ("b c", 8 << 10), ("r%25", MIB)]);
    let output = Command::new("stat").args(["-f", "-c", "%b %S"]).arg(&mount.target).output();
    assert_eq!(text(&output.unwrap().stdout), "1282 4096\n", "statfs has the sum of the sizes");
    assert_eq!(mount.end(), Some(0));
    assert_eq!(fs::read(&image).unwrap()[512..516], *b"of a");
}

#[test]
fn one_named_device_has_its_name_and_may_cover_a_file() {
    if !can_mount() {
        return;
    }
    let scratch = ScratchDir::new().unwrap();
    let folder = scratch.file("mnt");
    fs::create_dir(&folder).unwrap();
    let script = "test \"$disk\" = \"$target/vm.raw\" && stat -c %s \"$disk\"";
    let args = ["mount", "-e", "vm.raw=memory:3M", words(&folder), "--run", script];
    assert_eq!(text(&ours(&args).stdout), "3145728\n");
    let file = scratch.file("file");
    fs::write(&file, "").unwrap();
    let script = "stat -c %s \"$disk\"";
    let output = ours(&["mount", "-e", "vm.raw=memory:3M", words(&file), "--run", script]);
    assert_eq!(text(&output.stdout), "3145728\n", "{}", text(&output.stderr));
}

#[test]
fn the_files_of_a_directory_are_disks() {
    if !can_mount() {
        return;
    }
    let scratch = ScratchDir::on_disk().unwrap();
    let images = scratch.file("images");
    fs::create_dir_all(images.join("folder")).unwrap();
    let mut rng = Rng::new(seed());
    let mut contents = Vec::new();
    for number in 0..100 {
        let mut bytes = vec![0; rng.between(1, 9) as usize * 4096];
        rng.fill(&mut bytes);
        fs::write(images.join(format!("{number:03}.raw")), &bytes).unwrap();
        contents.push(bytes);
    }
    fs::write(scratch.file("secret"), "secret").unwrap();
    std::os::unix::fs::symlink("../secret", images.join("out")).unwrap();
    fs::write(images.join("info.json"), "an image of that name").unwrap();
    let device = format!("dir:{}", words(&images));
    let mount = Mount::of(&scratch, &["-w", "-e", "more=memory:1M", &device]);
    let expected: Vec<_> = (0..100).map(|number| format!("{number:03}.raw")).collect();
    let expected = [&expected[..], &["more".into(), "info.json".into()]].concat();
    assert_eq!(names(&mount.target), expected, "neither directories nor links");
    assert_eq!(fs::read(images.join("info.json")).unwrap(), b"an image of that name");
    let info = fs::read_to_string(mount.target.join("info.json")).unwrap();
    assert_eq!(info.matches("\"export-name\"").count(), 101);
    for (name, content) in expected.iter().zip(&contents) {
        assert_eq!(fs::read(mount.target.join(name)).unwrap(), *content, "{name}");
    }
    let written = mount.target.join("042.raw");
    let file = OpenOptions::new().write(true).open(&written).unwrap();
    file.write_all_at(b"changed", 100).unwrap();
    drop(file);
    assert_eq!(mount.end(), Some(0), "the last writes are flushed");
    assert_eq!(fs::read(images.join("042.raw")).unwrap()[100..107], *b"changed");
    assert_eq!(fs::read(images.join("041.raw")).unwrap(), contents[41]);
    // Layers are over each of them, and without -w nothing is written.
    let mount = Mount::of(&scratch, &["--layer", "offset?offset=1k&range=1k", &device]);
    let one = mount.target.join("007.raw");
    assert_eq!(fs::read(&one).unwrap(), contents[7][1024..2048]);
    let refused = OpenOptions::new().write(true).open(&one).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::ReadOnlyFilesystem);
}

#[test]
fn a_file_is_covered_while_the_device_is_mounted_over_it() {
    if !can_mount() {
        return;
    }
    let scratch = ScratchDir::new().unwrap();
    let target = scratch.file("target");
    fs::write(&target, "below").unwrap();
    let mount = Mount::over(target.clone(), &["pattern:1M"]);
    assert_eq!(fs::metadata(&target).unwrap().len(), MIB);
    let start = fs::read(&target).unwrap();
    assert_eq!(start[8..16], 8_u64.to_be_bytes(), "the pattern has its offsets");
    assert_eq!(mount.end(), Some(0));
    assert_eq!(fs::read(&target).unwrap(), b"below");
}

#[test]
fn data_and_holes_are_found_and_a_large_hole_is_skipped_at_once() {
    if !can_mount() {
        return;
    }
    let scratch = ScratchDir::on_disk().unwrap();
    let path = scratch.file("disk.raw");
    let file = File::create(&path).unwrap();
    file.set_len(1 << 40).unwrap();
    file.write_all_at(&[1; 4096], MIB).unwrap();
    file.write_all_at(&[2; 4096], (1 << 40) - MIB).unwrap();
    let mount = Mount::of(&scratch, &[words(&path)]);
    let disk = File::open(mount.disk()).unwrap();
    let find = |from| seek(&disk, from).map_err(|error| error.raw_os_error());
    let begun = Instant::now();
    assert_eq!(find(SeekFrom::Data(0)), Ok(MIB));
    assert_eq!(find(SeekFrom::Hole(MIB)), Ok(MIB + 4096));
    assert_eq!(find(SeekFrom::Data(MIB + 4096)), Ok((1 << 40) - MIB));
    let took = begun.elapsed();
    assert_eq!(find(SeekFrom::Hole((1 << 40) - MIB)), Ok((1 << 40) - MIB + 4096));
    assert_eq!(find(SeekFrom::Data((1 << 40) - MIB + 4096)), Err(6), "ENXIO: no more data");
    assert_eq!(find(SeekFrom::Hole((1 << 40) - 1)), Ok((1 << 40) - 1));
    assert_eq!(find(SeekFrom::Data(1 << 40)), Err(6));
    println!("three searches over 1 TiB took {took:?}");
    assert!(took < Duration::from_secs(10), "{took:?}");
}

#[test]
fn what_is_written_and_synced_is_on_the_device() {
    if !can_mount() {
        return;
    }
    let scratch = ScratchDir::on_disk().unwrap();
    let image = image(&scratch, 16 * MIB);
    let mut model = fs::read(&image).unwrap();
    let seed = seed();
    println!("BLOCKHAUL_SEED={seed:#x}");
    let mut rng = Rng::new(seed);
    for cache in ["none", "open"] {
        let mount = Mount::of(&scratch, &["-w", "--cache", cache, words(&image)]);
        let disk = mount.open();
        for _ in 0..300 {
            let at = rng.below(16 * MIB);
            let most = 1 << rng.between(1, 22);
            let len = rng.between(1, most).min(16 * MIB - at);
            let place = at as usize..(at + len) as usize;
            match rng.below(4) {
                0 => {
                    let how = FallocateFlags::KEEP_SIZE
                        | if rng.below(2) == 0 {
                            FallocateFlags::PUNCH_HOLE
                        } else {
                            FallocateFlags::ZERO_RANGE
                        };
                    fallocate(&disk, how, at, len).unwrap();
                    model[place].fill(0);
                }
                1 => {
                    let mut got = vec![1; len as usize];
                    disk.read_exact_at(&mut got, at).unwrap();
                    assert!(got == model[place], "{len} bytes at {at}");
                }
                _ => {
                    let mut bytes = vec![0; len as usize];
                    rng.fill(&mut bytes);
                    disk.write_all_at(&bytes, at).unwrap();
                    model[place].copy_from_slice(&bytes);
                }
            }
        }
        disk.sync_all().unwrap();
        assert!(fs::read(&image).unwrap() == model, "after fsync");
        drop(disk);
        assert!(fs::read(mount.disk()).unwrap() == model, "after it is opened again");
        assert_eq!(mount.end(), Some(0));
    }
}

#[test]
fn a_disk_keeps_its_size() {
    if !can_mount() {
        return;
    }
    let scratch = ScratchDir::new().unwrap();
    let mount = Mount::of(&scratch, &["-w", "memory:1M"]);
    let disk = mount.open();
    assert_eq!(disk.set_len(5).unwrap_err().kind(), ErrorKind::PermissionDenied);
    disk.set_len(MIB).unwrap();
    // A short write, and then none.
    assert_eq!(disk.write_at(&[7; 100], MIB - 60).unwrap(), 60);
    assert_eq!(disk.write_at(&[7; 100], MIB).unwrap_err().kind(), ErrorKind::StorageFull);
    let keep = FallocateFlags::KEEP_SIZE;
    assert!(fallocate(&disk, FallocateFlags::ZERO_RANGE, MIB - 10, 20).is_err());
    fallocate(&disk, FallocateFlags::ZERO_RANGE | keep, MIB - 10, 20).unwrap();
    drop(disk);
    // As a block device, it ignores O_TRUNC.
    let source = scratch.file("source");
    fs::write(&source, vec![9; MIB as usize]).unwrap();
    let copied = Command::new("cp").arg(&source).arg(mount.disk()).status().unwrap();
    assert!(copied.success());
    assert_eq!(fs::read(mount.disk()).unwrap(), fs::read(&source).unwrap());
    assert_eq!(fs::remove_file(mount.disk()).unwrap_err().raw_os_error(), Some(38));
}

#[test]
fn a_mount_is_read_only_without_writable() {
    if !can_mount() {
        return;
    }
    let scratch = ScratchDir::on_disk().unwrap();
    let image = image(&scratch, MIB);
    let before = fs::read(&image).unwrap();
    let mount = Mount::of(&scratch, &[words(&image)]);
    let refused = OpenOptions::new().write(true).open(mount.disk()).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::ReadOnlyFilesystem);
    drop(mount);
    // A scratch view takes writes, and the device stays.
    let mount = Mount::of(&scratch, &["-w", "--layer", "cow", words(&image)]);
    let disk = mount.open();
    disk.write_all_at(&[1; 4096], 4096).unwrap();
    disk.sync_all().unwrap();
    let mut got = [0; 4096];
    disk.read_exact_at(&mut got, 4096).unwrap();
    assert_eq!(got, [1; 4096]);
    drop(disk);
    assert_eq!(mount.end(), Some(0));
    assert_eq!(fs::read(&image).unwrap(), before);
}

#[test]
fn what_cannot_be_mounted_gets_one_clear_line() {
    let scratch = ScratchDir::new().unwrap();
    let folder = scratch.file("folder");
    fs::create_dir(&folder).unwrap();
    let [folder, absent, readonly] = [folder, scratch.file("absent"), scratch.file("ro.gz")]
        .map(|path| words(&path).to_string());
    fs::write(&readonly, "x").unwrap();
    let nothing = format!("dir:{folder}");
    let mut cases: Vec<(Vec<&str>, i32, &str)> = vec![
        (
            vec!["memory:1M", &absent],
            3,
            "absent does not exist: create a directory or an empty file",
        ),
        (vec!["memory:1M", "/dev/null"], 3, "is neither a directory nor a regular file"),
        (vec!["memory:1M", "/proc"], 3, "something is mounted there already: unmount it first"),
        (vec!["what:1M", &folder], 2, "what"),
        (vec!["--partition", "0", "memory:1M", &folder], 2, "0"),
        (vec!["--filesystem", "memory:1M", &readonly], 2, "is not a directory"),
        (vec!["--cache", "x", "memory:1M", &folder], 2, "[possible values: none, open, keep]"),
        (vec![&folder], 2, "required"),
        (vec!["--export", "a", &folder], 2, "no device given: write --export a=DEVICE"),
        (vec!["-e", "a/b=memory:1M", &folder], 2, "--export a/b: the name contains a slash"),
        (vec!["-e", "..=memory:1M", &folder], 2, "--export ..: the name is not the name of a file"),
        (vec!["-e", "%2e=memory:1M", &folder], 2, "--export .: the name is not the name of a file"),
        (vec!["-e", "=memory:1M", &folder], 2, "the name is empty"),
        (vec!["-e", "a=", &folder], 2, "--export a: no device after the ="),
        (vec!["-e", "info.json=memory:1M", &folder], 2, "the file about the disks"),
        (vec!["-e", "a=memory:1M", "-e", "a=zero:1M", &folder], 2, "two disks have the name \"a\""),
        (vec!["-e", "disk=memory:1M", "zero:1M", &folder], 2, "two disks have the name \"disk\""),
        (vec!["-e", "a", "-e", "b", "zero:1M", &folder], 2, "two names for one device"),
        (vec!["-e", "a=dir:/tmp", &folder], 2, "--export a: the files of dir: have names"),
        (
            vec!["-e", "a=[", "zero:1M", "--what", "]", &folder],
            2,
            "--export a: unexpected argument",
        ),
        (vec!["-e", "a=zero:1M", "zero:1M", &readonly], 2, "is not a directory: several disks"),
        (vec!["dir:/tmp", &readonly], 2, "is not a directory: several disks need one"),
        (vec!["-e", "a=zero:1M", "zero:1M", "--filesystem", &folder], 2, "give it one DEVICE"),
    ];
    if can_mount() {
        cases.extend([
            (vec![&*absent, &folder], 3, "absent"),
            (vec!["-w", "pattern:1M", &folder], 3, "is read-only: mount it without --writable"),
            (vec!["--filesystem", "memory:1M", &folder], 1, "cannot mount the file system"),
            (
                vec!["--filesystem", "data:@510 0x55 0xaa?size=1M", &folder],
                1,
                "choose a partition with --partition N",
            ),
            (vec!["--partition", "3", "memory:1M", &folder], 3, "partition"),
            (
                vec!["-w", "-e", "a=memory:1M", "-e", "b=pattern:1M", &folder],
                3,
                "pattern:1M is read",
            ),
            (vec!["dir:/absent", &folder], 3, "/absent"),
            (vec![&*nothing, &folder], 3, "contains no regular file that can be opened"),
            (vec!["nbd+unix:///?socket=/absent", &folder], 3, "/absent"),
        ]);
    }
    for (args, status, words) in cases {
        let output = ours(&[&["mount"], &args[..]].concat());
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(status), "{args:?}: {said}");
        assert!(said.contains(words), "{args:?}: {said}");
        assert!(status == 2 || said.lines().count() == 1, "{args:?}: {said}");
        assert!(!is_mounted(Path::new(&folder)), "{args:?}");
    }
}

/// Runs `blockhaul mount memory:1M` on a new directory after a script has changed a mount namespace of its
/// own, where `$1` is the directory; what it wrote to standard error, and its exit status.
fn mount_after(script: &str) -> (String, Option<i32>) {
    // Not below /dev, which the script may cover.
    let scratch = ScratchDir::on_disk().unwrap();
    let folder = scratch.file("folder");
    fs::create_dir(&folder).unwrap();
    let script = format!("{script} && exec \"$0\" mount memory:1M \"$1\"");
    let mut command = Command::new("unshare");
    command.args(["--mount", "--propagation", "private", "sh", "-c", &script, OURS]);
    let output = tools::output(command.arg(&folder), LIMIT).unwrap();
    (text(&output.stderr), output.status.code())
}

#[test]
fn a_machine_without_fuse_gets_one_line_that_says_what_to_do() {
    if !can_mount() {
        return;
    }
    // An empty /dev, and a device that nobody may open.
    let cases = [
        ("mount -t tmpfs none /dev", "load its module with modprobe fuse"),
        (
            "mount -t tmpfs -o nodev none /mnt && \
             mknod /mnt/fuse c 10 229 && mount --bind /mnt/fuse /dev/fuse",
            "a container needs the device, for example with --device /dev/fuse",
        ),
    ];
    for (script, remedy) in cases {
        let (said, status) = mount_after(script);
        assert_eq!(status, Some(3), "{script}: {said}");
        assert!(said.contains("cannot open /dev/fuse: ") && said.contains(remedy), "{said}");
        assert_eq!(said.lines().count(), 1, "{script}: {said}");
    }
}

#[test]
fn a_process_without_the_right_to_mount_gets_one_line_that_says_so() {
    if !can_mount() {
        return;
    }
    // Root without the capability, and without a program that has it.
    let (said, status) = mount_after(
        "export PATH=/nowhere && exec /usr/bin/setpriv --bounding-set -sys_admin \
         --inh-caps -sys_admin \"$0\" mount memory:1M \"$1\"",
    );
    assert_eq!(status, Some(3), "{said}");
    assert!(said.contains("this process may not mount (CAP_SYS_ADMIN)"), "{said}");
    assert_eq!(said.lines().count(), 1, "{said}");
}

#[test]
fn a_command_runs_while_it_is_mounted() {
    if !can_mount() {
        return;
    }
    let scratch = ScratchDir::new().unwrap();
    let folder = scratch.file("mnt");
    fs::create_dir(&folder).unwrap();
    let script = "stat -c %s \"$disk\"; test \"$disk\" = \"$target/disk\"; exit 7";
    let output = ours(&["mount", "memory:3M", words(&folder), "--run", script]);
    assert_eq!((output.status.code(), text(&output.stdout)), (Some(7), "3145728\n".into()));
    assert!(!is_mounted(&folder));
    // One whose directory is the mount keeps it busy, and does not keep it.
    let output = ours(&["mount", "memory:3M", words(&folder), "--run", "cd \"$target\" && ls"]);
    assert_eq!((output.status.code(), text(&output.stdout)), (Some(0), "disk\ninfo.json\n".into()));
    assert!(!is_mounted(&folder));
}

#[test]
fn in_the_background_it_is_there_until_it_is_unmounted() {
    if !can_mount() {
        return;
    }
    let scratch = ScratchDir::new().unwrap();
    let [folder, pid] = ["mnt", "pid"].map(|name| scratch.file(name));
    fs::create_dir(&folder).unwrap();
    let args = ["mount", "--background", "-P", words(&pid), "memory:1M", words(&folder)];
    let output = ours(&args);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    assert_eq!(fs::read(folder.join("disk")).unwrap().len(), 1 << 20, "it is mounted now");
    let pid = fs::read_to_string(&pid).unwrap();
    let busy = ours(&args);
    assert!(text(&busy.stderr).contains("something is mounted there already"));
    assert!(Command::new("umount").arg(&folder).status().unwrap().success());
    until("the process ends", || !tools::is_running(pid.trim()));
}

#[test]
fn the_helper_of_mount_mounts_what_fstab_says() {
    if !can_mount() {
        return;
    }
    let scratch = ScratchDir::new().unwrap();
    let helper = scratch.file("mount.blockhaul");
    std::os::unix::fs::symlink(OURS, &helper).unwrap();
    let disk = scratch.file("disk.raw");
    let target = scratch.file("mnt");
    fs::write(&disk, vec![5; 8192]).unwrap();
    fs::create_dir(&target).unwrap();
    let options = ["-o", "rw,noauto,_netdev,layer=offset?offset=4096"];
    let mut command = Command::new(&helper);
    let ran = tools::output(command.args([&disk, &target]).args(options), LIMIT).unwrap();
    assert!(ran.status.success(), "{}", text(&ran.stderr));
    assert!(is_mounted(&target), "when it returns");
    let file = File::options().write(true).open(target.join("disk")).unwrap();
    assert_eq!(file.metadata().unwrap().len(), 4096);
    file.write_all_at(&[6; 512], 0).unwrap();
    drop(file);
    assert!(Command::new("umount").arg(&target).status().unwrap().success());
    until("it is on the disk", || fs::read(&disk).unwrap()[4096..4608] == [6; 512]);
    let refused = Command::new(&helper).args([&disk, &target]).args(["-o", "unknown"]).output();
    let refused = refused.unwrap();
    assert!(!refused.status.success() && text(&refused.stderr).contains("unknown"));
    assert!(!is_mounted(&target));
}

#[test]
fn a_mount_in_use_goes_when_its_files_are_closed() {
    if !can_mount() {
        return;
    }
    let scratch = ScratchDir::new().unwrap();
    let mut mount = Mount::of(&scratch, &["-w", "memory:1M"]);
    let disk = mount.open();
    mount.signal("TERM");
    until("it is unmounted", || !is_mounted(&mount.target));
    disk.write_all_at(&[1; 5000], 100).unwrap();
    disk.sync_all().unwrap();
    assert!(mount.child.try_wait().unwrap().is_none(), "it waits for who uses it");
    drop(disk);
    let status = tools::wait_within(&mut mount.child, LIMIT).unwrap();
    assert_eq!(status.code(), Some(0));
}

/// A disk whose reads never end, and its log of them.
fn slow_reads(log: &Path) -> [String; 5] {
    ["memory:1M", "--layer", "delay?read=3600", "--layer", &format!("log?file={}", words(log))]
        .map(str::to_owned)
}

#[test]
fn a_second_signal_ends_it_at_once() {
    if !can_mount() {
        return;
    }
    let scratch = ScratchDir::new().unwrap();
    let log = scratch.file("log");
    let mut mount = Mount::of(&scratch, &slow_reads(&log).each_ref().map(|word| &**word));
    let disk = mount.disk();
    let reader = std::thread::spawn(move || fs::read(disk).map_err(|error| error.raw_os_error()));
    until("it has a read", || fs::read_to_string(&log).unwrap().contains("read"));
    mount.signal("TERM");
    until("it is unmounted", || !is_mounted(&mount.target));
    mount.signal("TERM");
    let status = tools::wait_within(&mut mount.child, LIMIT).unwrap();
    assert_eq!(status.code(), Some(143));
    let read = reader.join().unwrap();
    assert!(read.is_err(), "the reader gets an error and does not hang");
}

#[test]
fn a_read_that_takes_long_can_be_interrupted() {
    if !can_mount() {
        return;
    }
    let scratch = ScratchDir::new().unwrap();
    let log = scratch.file("log");
    let slow = slow_reads(&log);
    let args = [&["--cache", "none"][..], &slow.each_ref().map(|word| &**word)].concat();
    let mut mount = Mount::of(&scratch, &args);
    let mut command = Command::new("dd");
    command.arg(format!("if={}", words(&mount.disk()))).arg("of=/dev/null");
    let mut reader = command.stderr(Stdio::null()).spawn().unwrap();
    until("it has a read", || fs::read_to_string(&log).unwrap().contains("read"));
    reader.kill().unwrap();
    assert!(tools::wait_within(&mut reader, LIMIT).is_some(), "it can be killed");
    mount.signal("KILL");
    let _ = mount.child.wait();
}

#[test]
fn reads_fail_and_do_not_hang_when_the_server_is_gone() {
    if !can_mount() {
        return;
    }
    let scratch = ScratchDir::new().unwrap();
    let server =
        PeerServer::blockhaul(OURS.as_ref(), &scratch.socket("s"), &["memory:64M"]).unwrap();
    let mut mount = Mount::of(&scratch, &["-w", "--cache", "none", &server.uri("")]);
    let disk = mount.open();
    disk.write_all_at(&[1; 4096], 0).unwrap();
    assert!(
        Command::new("kill").args(["-9", &server.pid().to_string()]).status().unwrap().success()
    );
    let begun = Instant::now();
    let mut buffer = [0; 4096];
    let read = disk.read_exact_at(&mut buffer, MIB).unwrap_err();
    assert_eq!(read.raw_os_error(), Some(5), "EIO");
    let written = disk.write_all_at(&buffer, MIB).unwrap_err();
    assert_eq!(written.raw_os_error(), Some(5), "EIO");
    assert_eq!(disk.sync_all().unwrap_err().raw_os_error(), Some(5), "EIO");
    assert!(begun.elapsed() < Duration::from_secs(60), "{:?}", begun.elapsed());
    drop(disk);
    mount.signal("TERM");
    let status = tools::wait_within(&mut mount.child, LIMIT).unwrap();
    assert_eq!(status.code(), Some(5), "what was written last may be lost");
    assert!(!is_mounted(&mount.target));
}

#[test]
fn data_of_a_mapping_that_cannot_be_written_is_no_success() {
    if !can_mount() {
        return;
    }
    let scratch = ScratchDir::new().unwrap();
    // Changes a page, and leaves the mapping; no program asks whether it was written.
    let change = "
import mmap, os, sys
file = os.open(sys.argv[1], os.O_RDWR)
memory = mmap.mmap(file, 16 << 20)
at = int(sys.argv[2])
memory[at:at + 4] = b'data'
memory.close()
os.close(file)
";
    for (at, status) in [(0, 0), (8 << 20, 5)] {
        let layer = ["-w", "--layer", "error?write=100%&at=8M,1M", "memory:16M"];
        let mut mount = Mount::of(&scratch, &layer);
        let mut python = Command::new("python3");
        python.args(["-c", change]).arg(mount.disk()).arg(at.to_string());
        assert!(tools::output(&mut python, LIMIT).unwrap().status.success());
        assert!(Command::new("umount").arg(&mount.target).status().unwrap().success());
        let ended = tools::wait_within(&mut mount.child, LIMIT).unwrap();
        assert_eq!(ended.code(), Some(status), "a page at {at}");
    }
}

#[test]
fn other_users_write_only_if_the_owner_lets_them() {
    use std::os::unix::fs::PermissionsExt as _;
    if !can_mount() {
        return;
    }
    let scratch = ScratchDir::new().unwrap();
    let mount = Mount::of(&scratch, &["-w", "--allow-other", "memory:1M"]);
    let disk = mount.disk();
    let mode = || fs::metadata(&disk).unwrap().permissions().mode() & 0o7777;
    assert_eq!(mode(), 0o644);
    // As nobody.
    let open = |how: &str| {
        let open = format!(
            "import os, sys; os.setgid(65534); os.setuid(65534); os.open(sys.argv[1], os.{how})"
        );
        let mut python = Command::new("python3");
        python.args(["-c", &open]).arg(&disk);
        tools::output(&mut python, LIMIT).unwrap().status.success()
    };
    for parent in disk.ancestors().skip(2).take_while(|path| path.starts_with(scratch.path())) {
        fs::set_permissions(parent, fs::Permissions::from_mode(0o755)).unwrap();
    }
    assert_eq!((open("O_RDONLY"), open("O_RDWR")), (true, false));
    fs::set_permissions(&disk, fs::Permissions::from_mode(0o666)).unwrap();
    assert_eq!((mode(), open("O_RDWR")), (0o666, true));
    fs::set_permissions(&disk, fs::Permissions::from_mode(0o600)).unwrap();
    assert_eq!((open("O_RDONLY"), open("O_RDWR")), (false, false));
    assert_eq!(mount.end(), Some(0));
}

#[test]
fn what_was_flushed_is_there_after_a_kill_and_the_mount_can_be_removed() {
    if !can_mount() {
        return;
    }
    let scratch = ScratchDir::on_disk().unwrap();
    let image = image(&scratch, 4 * MIB);
    for round in 1..=3_u8 {
        let mut mount = Mount::of(&scratch, &["-w", words(&image)]);
        let disk = mount.open();
        let at = u64::from(round) * MIB;
        disk.write_all_at(&[round; 9000], at).unwrap();
        disk.sync_all().unwrap();
        mount.child.kill().unwrap();
        mount.child.wait().unwrap();
        assert!(disk.read_exact_at(&mut [0; 512], 0).is_err(), "no hang, and no old data");
        drop(disk);
        let again = ours(&["mount", "memory:1M", words(&mount.target)]);
        let said = text(&again.stderr);
        assert!(said.contains("has ended: unmount it with umount"), "{said}");
        assert!(Command::new("umount").arg(&mount.target).status().unwrap().success());
        let kept = fs::read(&image).unwrap();
        assert!(kept[at as usize..][..9000].iter().all(|byte| *byte == round), "round {round}");
    }
}

#[test]
fn a_partition_and_its_file_system_are_mounted_and_unmounted() {
    if !can_mount() {
        return;
    }
    let scratch = ScratchDir::on_disk().unwrap();
    let [file_system, disk, content] =
        ["fs.raw", "disk.raw", "content"].map(|name| scratch.file(name));
    fs::create_dir(&content).unwrap();
    fs::write(content.join("hello"), "from inside").unwrap();
    File::create(&file_system).unwrap().set_len(16 * MIB).unwrap();
    let mut make = Command::new("mkfs.ext4");
    make.args(["-q", "-d", words(&content), words(&file_system)]);
    match make.status() {
        Ok(status) if status.success() => {}
        other => return tools::skip_or_fail(&SkipReason::new(format!("mkfs.ext4: {other:?}"))),
    }
    let partitions = format!("partitioning:{}", words(&file_system));
    let copied = ours(&["copy", &partitions, words(&disk)]);
    assert!(copied.status.success(), "{}", text(&copied.stderr));
    let folder = scratch.file("mnt");
    fs::create_dir(&folder).unwrap();
    let args = ["mount", "--partition", "1", "--filesystem", words(&disk), words(&folder)];
    let output = ours(&[&args[..], &["--run", "cat \"$target/hello\""]].concat());
    if text(&output.stderr).contains("cannot make a loop device") {
        return tools::skip_or_fail(&SkipReason::new(text(&output.stderr)));
    }
    assert_eq!(text(&output.stdout), "from inside", "{}", text(&output.stderr));
    assert!(output.status.success() && !is_mounted(&folder));
    let script = "echo more > \"$target/more\" && echo \"$disk\"";
    let output = ours(&[&args[..], &["-w", "--run", script]].concat());
    assert!(output.status.success(), "{}", text(&output.stderr));
    let device = PathBuf::from(text(&output.stdout).trim());
    assert!(device.starts_with("/dev"), "{}", device.display());
    let output = ours(&[&args[..], &["--run", "cat \"$target/more\""]].concat());
    assert_eq!(text(&output.stdout), "more\n", "{}", text(&output.stderr));
    wait_until_nothing_is_left(&folder, &device);
    // Whoever unmounts it ends the command.
    let mut mounting = Command::new(OURS).args(args).arg("--writable").spawn().unwrap();
    until("it is mounted", || is_mounted(&folder));
    let device = loop_device(&folder);
    assert!(Command::new("umount").arg(&folder).status().unwrap().success());
    assert!(mounting.wait().unwrap().success());
    wait_until_nothing_is_left(&folder, &device);
    // It can also be unmounted after the command was killed.
    let mut mounting = Command::new(OURS).args(args).spawn().unwrap();
    let private = PathBuf::from(format!("/run/blockhaul-mount-{}", mounting.id()));
    until("it is mounted", || is_mounted(&folder) && !private.exists());
    let device = loop_device(&folder);
    mounting.kill().unwrap();
    mounting.wait().unwrap();
    assert!(Command::new("umount").arg(&folder).status().unwrap().success());
    wait_until_nothing_is_left(&folder, &device);
}

/// The loop device that is mounted there.
fn loop_device(folder: &Path) -> PathBuf {
    let mounts = fs::read_to_string("/proc/self/mounts").unwrap();
    let mut lines = mounts.lines().map(|line| line.split(' ').collect::<Vec<_>>());
    let line = lines.find(|line| line.get(1) == Some(&words(folder))).unwrap();
    PathBuf::from(line[0])
}

/// Waits until a mount with `--filesystem` has left nothing: other tests may have such for a moment.
fn wait_until_nothing_is_left(folder: &Path, device: &Path) {
    let is_ours = |name: &std::ffi::OsStr| name.to_string_lossy().starts_with("blockhaul-mount-");
    let state = Path::new("/sys/block").join(device.file_name().unwrap()).join("loop");
    until("nothing is left", || {
        let mut entries = fs::read_dir("/run").unwrap().map(|entry| entry.unwrap().file_name());
        !is_mounted(folder) && !state.exists() && !entries.any(|name| is_ours(&name))
    });
}
