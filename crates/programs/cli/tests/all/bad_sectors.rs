//! Copies from a disk with bad sectors: what is saved, what the map says, and how a second run goes on.

use std::fmt::Write as _;
use std::path::Path;
use std::process::{Command, Output};
use std::time::Duration;

use blockhaul_testkit::image::pattern;
use blockhaul_testkit::tools::{self, ScratchDir, text};

const LIMIT: Duration = Duration::from_secs(120);
const OURS: &str = env!("CARGO_BIN_EXE_blockhaul");
const SIZE: usize = 8 << 20;
const SECTOR: usize = 512;

/// A disk, and the offsets of its bad sectors.
struct BadDisk {
    scratch: ScratchDir,
    contents: Vec<u8>,
    bad: Vec<usize>,
}

impl BadDisk {
    fn new(faults: usize) -> BadDisk {
        let scratch = ScratchDir::new().unwrap();
        let contents = pattern(SIZE);
        std::fs::write(scratch.file("disk"), &contents).unwrap();
        let bad = (0..faults).map(|n| (n * 37 * 1021 % (SIZE / SECTOR)) * SECTOR).collect();
        BadDisk { scratch, contents, bad }
    }

    fn path(&self, name: &str) -> String {
        self.scratch.file(name).to_str().unwrap().to_string()
    }

    /// Copies it with the map; `bad`: these sectors fail.
    fn copy(&self, bad: &[usize], more: &[&str]) -> Output {
        let mut command = Command::new(OURS);
        command.args(["copy", "--on-error", "skip", "--error-map", &self.path("map")]).args(more);
        for at in bad {
            command.args(["--source-layer", &format!("error?read=100%&at={at},{SECTOR}")]);
        }
        let command = command.args([self.path("disk"), self.path("copy")]);
        tools::output(command, LIMIT).unwrap()
    }

    /// The contents with zeroes, or `filled` bytes, in these sectors.
    fn without(&self, bad: &[usize], filled: u8) -> Vec<u8> {
        let mut expected = self.contents.clone();
        bad.iter().for_each(|at| expected[*at..at + SECTOR].fill(filled));
        expected
    }

    fn copied(&self) -> Vec<u8> {
        std::fs::read(self.path("copy")).unwrap()
    }

    /// The offsets and lengths that the map has with this status of ddrescue.
    fn listed(&self, wanted: &str) -> Vec<(usize, usize)> {
        let map = std::fs::read_to_string(self.path("map")).unwrap();
        let number = |text: &str| usize::from_str_radix(text.strip_prefix("0x").unwrap(), 16);
        let rows = map.lines().filter(|line| !line.starts_with('#')).skip(1);
        rows.map(|row| row.split_whitespace().collect::<Vec<_>>())
            .filter(|words| words[2] == wanted)
            .map(|words| (number(words[0]).unwrap(), number(words[1]).unwrap()))
            .collect()
    }
}

#[track_caller]
fn assert_status(output: &Output, status: i32) {
    assert_eq!(output.status.code(), Some(status), "{}", text(&output.stderr));
}

#[test]
fn all_but_the_bad_sectors_is_saved_and_a_second_run_reads_only_those() {
    let disk = BadDisk::new(40);
    // What the target held is not mistaken for the disk.
    std::fs::write(disk.path("copy"), vec![7; SIZE]).unwrap();
    let first = disk.copy(&disk.bad, &[]);
    assert_status(&first, 10);
    let said = text(&first.stderr);
    assert!(said.contains("20480 bytes in 40 ranges cannot be read"), "{said}");
    assert!(said.contains("the target has zeroes there"), "{said}");
    assert!(disk.copied() == disk.without(&disk.bad, 0), "the first copy");
    let listed = disk.listed("-");
    assert_eq!(listed.iter().map(|(_, len)| len).sum::<usize>(), 40 * SECTOR);
    assert!(disk.bad.iter().all(|bad| listed.contains(&(*bad, SECTOR))), "{listed:?}");
    let plan = disk.copy(&disk.bad[..20], &["--dry-run"]);
    assert_status(&plan, 0);
    for words in ["would read 20480 bytes", "remove the map to copy everything"] {
        assert!(text(&plan.stdout).contains(words), "{words}: {}", text(&plan.stdout));
    }
    // Half of them can be read the next time. What fails again is not touched.
    let mut edited = disk.copied();
    edited[disk.bad[0]..disk.bad[0] + SECTOR].fill(9);
    edited[0x1000] ^= 1;
    let kept_sector = edited[0x1000];
    std::fs::write(disk.path("copy"), &edited).unwrap();
    let second = disk.copy(&disk.bad[..20], &[]);
    assert_status(&second, 10);
    let said = text(&second.stderr);
    for words in ["the target has what it had before there", "remove the map to copy everything"] {
        assert!(said.contains(words), "{words}: {said}");
    }
    let mut expected = disk.without(&disk.bad[..20], 0);
    expected[disk.bad[0]..disk.bad[0] + SECTOR].fill(9);
    expected[0x1000] = kept_sector;
    assert!(disk.copied() == expected, "the second run");
    assert_status(&disk.copy(&[], &[]), 0);
    assert!(disk.listed("-").is_empty());
    assert_eq!(disk.listed("+"), [(0, SIZE)]);
}

#[test]
fn a_journal_belongs_to_its_map() {
    let disk = BadDisk::new(3);
    let journal = disk.path("journal");
    let args = ["--journal", &journal];
    assert_status(&disk.copy(&disk.bad, &args), 10);
    assert!(!Path::new(&journal).exists(), "everything was tried");
    std::fs::remove_file(disk.path("map")).unwrap();
    std::fs::write(&journal, "").unwrap();
    let refused = disk.copy(&disk.bad, &args);
    assert_eq!(refused.status.code().map(|status| status != 0 && status != 10), Some(true));
    assert!(disk.copied() == disk.without(&disk.bad, 0), "the target changed");
}

#[test]
fn maps_of_other_disks_and_other_files_are_refused() {
    let disk = BadDisk::new(0);
    std::fs::write(disk.path("map"), "0 + 1\n0 4096 +\n").unwrap();
    std::fs::write(disk.path("copy"), "old").unwrap();
    let refused = disk.copy(&[], &[]);
    assert_status(&refused, 3);
    let said = text(&refused.stderr);
    assert!(said.contains("a source of 4096 bytes, and this one has 8388608"), "{said}");
    assert_status(&disk.copy(&[], &["--dry-run"]), 3);
    std::fs::write(disk.path("map"), "no map\n").unwrap();
    assert_status(&disk.copy(&[], &[]), 3);
    std::fs::write(disk.path("map"), "0 + 1\nno map\n").unwrap();
    let said = text(&disk.copy(&[], &[]).stderr).to_string();
    assert!(said.contains("line 2: \"no map\" is not"), "{said}");
    assert_eq!(disk.copied(), b"old");
    std::fs::remove_file(disk.path("copy")).unwrap();
    let mut map = String::from("0 + 1\n");
    let _ = writeln!(map, "0 {SIZE} +");
    std::fs::write(disk.path("map"), map).unwrap();
    let said = text(&disk.copy(&[], &[]).stderr).to_string();
    assert!(said.contains("it records a copy") && said.contains("does not exist"), "{said}");
    assert_status(&disk.copy(&[], &["--dry-run"]), 3);
}
