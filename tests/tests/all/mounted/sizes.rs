//! Disks whose size changes while they are mounted.

use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::time::Duration;

use blockhaul_testkit::tools::{ScratchDir, until};
use blockhaul_tests::{serve, succeed, text};
use rustix::fs::{FallocateFlags, SeekFrom, fallocate, seek};

use super::{Disk, can_mount};

const MIB: u64 = 1 << 20;

fn size(file: &Path) -> u64 {
    fs::metadata(file).unwrap().len()
}

/// Grows the image to 3 MiB with a hole in the last one, while the file that shows it is open.
fn grow(image: &Path, shown: &File) {
    let file = OpenOptions::new().write(true).open(image).unwrap();
    file.write_all_at(&vec![2; MIB as usize], MIB).unwrap();
    file.set_len(3 * MIB).unwrap();
    until("the new size is seen", || shown.metadata().unwrap().len() == 3 * MIB);
}

/// What is behind the old end is read, written, searched and zeroed.
fn use_what_was_added(shown: &File, image: &Path) {
    let mut got = vec![0; MIB as usize];
    shown.read_exact_at(&mut got, MIB).unwrap();
    assert!(got.iter().all(|&byte| byte == 2));
    assert_eq!(seek(shown, SeekFrom::Hole(0)).unwrap(), 2 * MIB);
    assert_eq!(seek(shown, SeekFrom::Hole(3 * MIB - 1)).unwrap(), 3 * MIB - 1);
    let keep = FallocateFlags::KEEP_SIZE;
    fallocate(shown, FallocateFlags::PUNCH_HOLE | keep, MIB, MIB / 2).unwrap();
    assert_eq!(seek(shown, SeekFrom::Data(MIB)).unwrap(), MIB + MIB / 2);
    shown.write_all_at(&[7; 4096], 3 * MIB - 4096).unwrap();
    shown.sync_all().unwrap();
    let mut expected = vec![1; MIB as usize];
    expected.extend(vec![0; MIB as usize / 2]);
    expected.extend(vec![2; MIB as usize / 2]);
    expected.extend(vec![0; MIB as usize - 4096]);
    expected.extend([7; 4096]);
    assert!(fs::read(image).unwrap() == expected);
    // Nothing grows by a write.
    assert!(shown.write_all_at(&[7], 3 * MIB).is_err());
}

#[test]
fn a_mount_shows_a_disk_that_grows_and_shrinks() {
    if !can_mount() {
        return;
    }
    let scratch = ScratchDir::on_disk().unwrap();
    let image = scratch.file("image");
    for served in [false, true] {
        for (number, (is_folder, cache)) in
            [(true, "open"), (false, "keep"), (true, "none")].into_iter().enumerate()
        {
            let _ = fs::remove_file(&image);
            fs::write(&image, vec![1; MIB as usize]).unwrap();
            // The socket of a server that was killed may remain for a moment.
            let socket = format!("s{number}");
            let server = served.then(|| serve(&scratch, &socket, &["--per-client", text(&image)]));
            let uri = server.as_ref().map(|server| server.uri(""));
            let device = uri.as_deref().unwrap_or(text(&image));
            println!("{device}, directory: {is_folder}, {cache}");
            let args = ["--cache", cache, device];
            let disk = if is_folder {
                Disk::of(&scratch.file("mnt"), &args)
            } else {
                Disk::over(&scratch.file("over"), &args)
            };
            let path = disk.file();
            assert_eq!(size(&path), MIB);
            assert_eq!(fs::read(&path).unwrap(), vec![1; MIB as usize]);
            let shown = OpenOptions::new().read(true).write(true).open(&path).unwrap();
            // What is not flushed by the former handle is flushed by the new one.
            shown.write_all_at(&[1; 4096], 0).unwrap();
            grow(&image, &shown);
            use_what_was_added(&shown, &image);
            if is_folder {
                let text = fs::read_to_string(path.with_file_name("info.json")).unwrap();
                assert!(text.contains("3145728"), "{text}");
            }
            OpenOptions::new().write(true).open(&image).unwrap().set_len(MIB / 2).unwrap();
            until("the smaller size is seen", || size(&path) == MIB / 2);
            drop(shown);
            assert_eq!(fs::read(&path).unwrap(), vec![1; MIB as usize / 2]);
            disk.end();
        }
    }
}

#[test]
fn a_request_beyond_the_end_finds_what_was_added() {
    if !can_mount() {
        return;
    }
    let scratch = ScratchDir::on_disk().unwrap();
    let image = scratch.file("image");
    fs::write(&image, vec![1; MIB as usize]).unwrap();
    let disk = Disk::of(&scratch.file("mnt"), &["--cache", "none", text(&image)]);
    let shown = OpenOptions::new().read(true).write(true).open(disk.file()).unwrap();
    assert!(shown.write_all_at(&[5; 4096], MIB).is_err(), "there is nothing yet");
    OpenOptions::new().write(true).open(&image).unwrap().set_len(2 * MIB).unwrap();
    // No program asks for the size meanwhile.
    until("it can be written", || shown.write_all_at(&[5; 4096], MIB).is_ok());
    let mut got = [0; 4096];
    shown.read_exact_at(&mut got, MIB).unwrap();
    assert_eq!(got, [5; 4096]);
    shown.sync_all().unwrap();
    assert_eq!(fs::read(&image).unwrap()[MIB as usize..][..4096], [5; 4096]);
    drop(shown);
    disk.end();
}

#[test]
fn an_image_that_is_resized_shows_its_new_size() {
    if !can_mount() {
        return;
    }
    let scratch = ScratchDir::on_disk().unwrap();
    let spec = format!("qcow2:{}", text(&scratch.file("image.qcow2")));
    succeed(&["create", &spec, "1M"]);
    let disk = Disk::of(&scratch.file("mnt"), &["-e", "disk=[", &spec, "--readonly", "]"]);
    assert_eq!(size(&disk.file()), MIB);
    succeed(&["resize", &spec, "2M"]);
    until("the new size is seen", || size(&disk.file()) == 2 * MIB);
    assert_eq!(fs::read(disk.file()).unwrap(), vec![0; 2 * MIB as usize]);
    disk.end();
}

#[test]
fn another_file_of_the_same_name_is_another_disk() {
    if !can_mount() {
        return;
    }
    let scratch = ScratchDir::on_disk().unwrap();
    let [image, other] = ["image", "other"].map(|name| scratch.file(name));
    fs::write(&image, vec![1; MIB as usize]).unwrap();
    fs::write(&other, vec![2; 2 * MIB as usize]).unwrap();
    let disk = Disk::of(&scratch.file("mnt"), &["--cache", "none", text(&image)]);
    fs::rename(&other, &image).unwrap();
    for _ in 0..3 {
        // Longer than attributes are valid.
        std::thread::sleep(Duration::from_millis(1100));
        assert_eq!(fs::read(disk.file()).unwrap(), vec![1; MIB as usize]);
    }
    disk.end();
}
