//! Random operations on the file of a mount, and on a file in a file system on it, against a model.

use std::fs::{self, File};
use std::os::unix::fs::FileExt as _;

use blockhaul_testkit::rng::Rng;
use blockhaul_testkit::tools::{self, ScratchDir};
use blockhaul_tests::exercise::{Exercise, Rules};
use blockhaul_tests::{serve, text};

use super::{Disk, KINDS, Live, can_mount, empty_image, random};

/// Operations on each file.
fn steps() -> u64 {
    if tools::long() { 20_000 } else { 1000 }
}

/// A file with random bytes, of no whole number of pages.
fn image(scratch: &ScratchDir, rng: &mut Rng) -> std::path::PathBuf {
    let path = scratch.file("image");
    let mut bytes = vec![0; (4 << 20) + 512];
    rng.fill(&mut bytes);
    fs::write(&path, &bytes).unwrap();
    path
}

#[test]
fn the_file_of_a_mount_is_its_model_after_any_operations() {
    if !can_mount() {
        return;
    }
    let (_, mut rng) = random();
    let scratch = ScratchDir::on_disk().unwrap();
    let image = image(&scratch, &mut rng);
    for (cache, served) in [("open", false), ("none", false), ("keep", true)] {
        // It locks the image.
        let server = served.then(|| serve(&scratch, "s", &[text(&image)]));
        let uri = server.as_ref().map(|server| server.uri(""));
        let device = uri.as_deref().unwrap_or(text(&image));
        println!("{cache} over {device}");
        let disk = Disk::of(&scratch.file("mnt"), &["--cache", cache, device]);
        let rules = Rules { size_max: None, maps: cache != "none", direct: true };
        let mut exercise = Exercise::new(&disk.file(), rules);
        exercise.run(&mut rng, steps());
        let model = exercise.model().to_vec();
        // It has the file open.
        drop(exercise);
        disk.end();
        assert!(fs::read(&image).unwrap() == model, "after the unmount");
    }
}

#[test]
fn a_file_in_a_file_system_on_a_mount_is_its_model_after_any_operations() {
    if !can_mount() {
        return;
    }
    let (_, mut rng) = random();
    let scratch = ScratchDir::on_disk().unwrap();
    let image = empty_image(&scratch, 64 << 20);
    let disk = Disk::of(&scratch.file("mnt"), &[text(&image)]);
    let Some(mut live) = Live::make(&KINDS[0], &disk, &scratch) else { return };
    let file = live.path().join("file");
    File::create(&file).unwrap().write_all_at(&[7; 100_000], 0).unwrap();
    let rules = Rules { size_max: Some(8 << 20), maps: true, direct: false };
    let mut exercise = Exercise::new(&file, rules);
    exercise.run(&mut rng, steps());
    let model = exercise.model().to_vec();
    drop(exercise);
    live.check();
    assert!(fs::read(&file).unwrap() == model, "after the unmount");
    live.end();
    disk.end();
}
