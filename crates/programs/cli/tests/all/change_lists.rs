//! Lists of changes that are cut off, are of another disk, or cover a part of it: `copy --ranges` refuses them
//! before the target is touched.

use std::ops::Range;
use std::os::unix::process::ExitStatusExt as _;
use std::path::PathBuf;
use std::process::{Command, Output};

use blockhaul_testkit::rng::{self, Rng};
use blockhaul_testkit::tools::{self, ScratchDir, text};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};

use crate::served_disk::{LIMIT, OURS};

const MIB: u64 = 1 << 20;
const BLOCK: u64 = 64 << 10;

/// A source, and a target that differs from it everywhere.
struct Lab {
    scratch: ScratchDir,
    source: Vec<u8>,
}

impl Lab {
    fn new(size: u64) -> Lab {
        let scratch = ScratchDir::new().unwrap();
        let mut source = vec![0; size as usize];
        Rng::new(1).fill(&mut source);
        std::fs::write(scratch.file("source"), &source).unwrap();
        Lab { scratch, source }
    }

    fn file(&self, name: &str) -> PathBuf {
        self.scratch.file(name)
    }

    /// Runs a copy onto a fresh target, with a list in the file `list`.
    fn copy(&self, options: &[&str]) -> (Output, Vec<u8>) {
        std::fs::write(self.file("target"), vec![0; self.source.len()]).unwrap();
        let mut command = Command::new(OURS);
        command.args(["copy", "--no-progress"]).args(options).args(["source", "target"]);
        command.current_dir(self.scratch.path());
        let output = tools::output(&mut command, LIMIT).unwrap();
        (output, std::fs::read(self.file("target")).unwrap())
    }

    fn list(&self, text: &str) -> (Output, Vec<u8>) {
        std::fs::write(self.file("list"), text).unwrap();
        self.copy(&["--ranges", "list"])
    }

    /// The target after these ranges were copied.
    fn with(&self, ranges: &[Range<u64>]) -> Vec<u8> {
        let mut expected = vec![0; self.source.len()];
        for range in ranges {
            let range = range.start as usize..range.end as usize;
            expected[range.clone()].copy_from_slice(&self.source[range]);
        }
        expected
    }

    #[track_caller]
    fn refused(&self, (output, target): (Output, Vec<u8>), words: &str) {
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(3), "{words}: {said}");
        assert!(said.contains(words) && said.lines().count() == 1, "{words}: {said}");
        assert!(target.iter().all(|byte| *byte == 0), "{words}: the target was touched");
    }

    #[track_caller]
    fn copied(&self, (output, target): (Output, Vec<u8>), ranges: &[Range<u64>]) -> String {
        let said = text(&output.stderr);
        assert!(output.status.success(), "{said}");
        assert!(target == self.with(ranges), "{said}");
        said
    }
}

fn answer(at: u64, len: u64) -> Value {
    let area = json!({ "start": at + BLOCK, "length": BLOCK });
    json!({ "startOffset": at, "length": len, "changedArea": [area] })
}

#[test]
fn a_page_of_vmware_is_not_the_list() {
    let lab = Lab::new(4 * MIB);
    let area = |at: u64| at + BLOCK..at + 2 * BLOCK;
    let pages = json!([answer(MIB, 3 * MIB), answer(0, 2 * MIB)]).to_string();
    lab.copied(lab.list(&pages), &[area(0), area(MIB)]);
    let lines = format!("{}\n{}\n", answer(0, MIB), answer(MIB, 3 * MIB));
    lab.copied(lab.list(&lines), &[area(0), area(MIB)]);
    for (pages, words) in [
        (
            json!(answer(0, MIB)),
            "bytes 1048576 to 4194303 are missing: query again with startOffset=1048576",
        ),
        (
            json!(answer(MIB, 3 * MIB)),
            "bytes 0 to 1048575 are missing: query again with startOffset=0",
        ),
        (
            json!([answer(0, MIB), answer(3 * MIB, MIB)]),
            "bytes 1048576 to 3145727 are missing: query",
        ),
        (json!([answer(0, 5 * MIB)]), "end at 5242880, but the source has 4194304 bytes"),
    ] {
        lab.refused(lab.list(&pages.to_string()), words);
    }
    // An answer whose list is absent, and something else is there.
    for (name, value) in [("ChangedArea", json!([])), ("error", json!("fault"))] {
        let answer = json!({ "startOffset": 0, "length": 4 * MIB, name: value });
        lab.refused(lab.list(&answer.to_string()), &format!("unknown member \"{name}\""));
    }
    // A target that is not there is not made.
    let mut command = Command::new(OURS);
    command.args(["copy", "--ranges", "list", "source", "absent"]);
    let output = tools::output(command.current_dir(lab.scratch.path()), LIMIT).unwrap();
    assert_eq!(output.status.code(), Some(3));
    assert!(!lab.file("absent").exists());

    std::fs::write(lab.file("list"), answer(0, MIB).to_string()).unwrap();
    let said = lab.copied(lab.copy(&["--ranges", "list", "--ranges-partial"]), &[area(0)]);
    assert!(
        said.contains("missing in the list: 3145728 of the source's 4194304 bytes are not")
            && said.lines().count() == 1
    );
    // Which has nothing to say about a whole list.
    std::fs::write(lab.file("list"), pages).unwrap();
    let both = lab.copy(&["--ranges", "list", "--ranges-partial"]);
    assert_eq!(lab.copied(both, &[area(0), area(MIB)]), "");
}

/// Its offsets are those of the file.
#[test]
fn the_map_of_qemu_img_is_refused() {
    let lab = Lab::new(4 * MIB);
    let map = json!([
        { "start": 0, "length": MIB, "depth": 0, "present": true, "zero": true, "data": false },
        { "start": MIB, "length": 3 * MIB, "depth": 0, "present": true, "zero": false, "data": true,
          "offset": 5 * BLOCK },
    ]);
    lab.refused(lab.list(&map.to_string()), "has \"offset\" and \"start\"");
}

#[test]
fn the_last_block_of_thin_delta_ends_with_the_volume() {
    let lab = Lab::new(MIB + 512);
    let list = |begin: u64| {
        format!(
            "<superblock data_block_size=\"128\"><diff left=\"1\" right=\"2\"><different begin=\"{begin}\" \
             length=\"1\"/></diff></superblock>"
        )
    };
    lab.copied(lab.list(&list(16)), std::slice::from_ref(&(MIB..MIB + 512)));
    let (output, target) = lab.list(&list(17));
    assert!(!output.status.success() && target.iter().all(|byte| *byte == 0));
}

#[test]
fn lists_of_another_disk_are_refused() {
    let lab = Lab::new(4 * MIB);
    let csi = |size: u64| {
        json!({ "block_metadata_type": 1, "volume_capacity_bytes": size,
                "block_metadata": [{ "byte_offset": 0, "size_bytes": 4096 }] })
        .to_string()
    };
    lab.copied(lab.list(&csi(4 * MIB)), std::slice::from_ref(&(0..4096)));
    for size in [1 << 40, 4 * MIB - 1] {
        let words =
            format!("a volume of {size} bytes (volume_capacity_bytes), but the source has 4194304");
        lab.refused(lab.list(&csi(size)), &words);
    }
    let page =
        json!({ "ChangedBlocks": [{ "BlockIndex": 0 }], "BlockSize": 524288, "VolumeSize": 1 });
    lab.refused(
        lab.list(&page.to_string()),
        "a volume of 1073741824 bytes (VolumeSize), but the source has 4194304 bytes",
    );
    lab.refused(lab.list("0 4194305\n"), "has 4194304 bytes, but the range ends at 4194305");
    // 64 blocks: the second one, and the last one.
    lab.copied(lab.list("QAAAAAAAAAE=\n"), &[BLOCK..2 * BLOCK, 63 * BLOCK..64 * BLOCK]);
    lab.refused(
        lab.list("QAAAAAAAAA==\n"),
        "for a disk of about 3670016 bytes (one bit per 64 KiB), but",
    );
    lab.refused(lab.list("QAAAAAAAAAEA\n"), "is for a disk of about 4718592 bytes");
}

#[test]
fn a_list_of_a_command_that_fails_is_not_used() {
    let lab = Lab::new(MIB);
    let list = r#"{"offset": 4096, "length": 512}"#;
    std::fs::write(lab.file("list"), list).unwrap();
    let command = |script: &str| lab.copy(&["--ranges-command", script]);
    let copied = std::slice::from_ref(&(4096..4608));
    let said = lab.copied(command("echo a warning >&2; cat list"), copied);
    assert!(said.is_empty() || said == "a warning\n", "{said}");
    for (script, words) in [
        ("cat list; exit 3", "the command failed (exit status 3): its list is not used"),
        ("cat list; kill -SEGV $$", "the command failed (signal 11)"),
        ("cat list; exec /no/such/program", "exit status 127"),
        ("true", "the list is empty"),
        ("cat list; printf {", "not JSON, or cut off"),
    ] {
        let (output, target) = command(&format!("{{ {script}; }} 2>/dev/null"));
        lab.refused((output, target), words);
    }
    // The last line of its messages is in the error.
    let (output, target) = command("cat list; echo one >&2; echo no such snapshot >&2; exit 1");
    let said = text(&output.stderr);
    assert!(
        said.ends_with(
            "(exit status 1): its list is not used; its last message: no such snapshot\n"
        ),
        "{said}"
    );
    assert!(output.status.code() == Some(3) && target == lab.with(&[]));

    // In job files.
    let job = |script: &str| {
        let disk = "[[disk]]\nsource = 'source'\ntarget = 'target'\nranges-command = ";
        std::fs::write(lab.file("job.toml"), format!("{disk}'{script}'\n")).unwrap();
        std::fs::write(lab.file("target"), vec![0; lab.source.len()]).unwrap();
        let mut command = Command::new(OURS);
        command.args(["copy", "--no-progress", "--job", "job.toml"]);
        let output = tools::output(command.current_dir(lab.scratch.path()), LIMIT).unwrap();
        (output, std::fs::read(lab.file("target")).unwrap())
    };
    lab.copied(job("cat list"), copied);
    lab.refused(job("cat list; exit 1"), "exit status 1");
}

/// Whether a process, whose ID is in this file, has ended.
fn has_ended(pid: &std::path::Path) -> bool {
    let pid = std::fs::read_to_string(pid).unwrap();
    // A process that nobody has waited for has no command line.
    std::fs::read(format!("/proc/{}/cmdline", pid.trim())).is_ok_and(|line| line.is_empty())
        || !std::path::Path::new(&format!("/proc/{}", pid.trim())).exists()
}

#[test]
fn the_command_of_a_list_ends_with_the_copy() {
    let lab = Lab::new(MIB);
    let script = "echo $$ >shell; sleep 1000 & echo $! >child; touch begun; cat list; wait";
    let files = ["shell", "child", "begun"].map(|name| lab.file(name));
    std::fs::write(lab.file("list"), "[").unwrap();
    std::fs::write(lab.file("target"), "untouched").unwrap();
    std::fs::write(lab.file("job.toml"), {
        let disk = "[[disk]]\nsource = 'source'\ntarget = 'target'\nranges-command = ";
        format!("{disk}'{script}'\n")
    })
    .unwrap();
    for (signal, args) in [
        (Signal::TERM, &["--ranges-command", script, "source", "target"][..]),
        (Signal::INT, &["--ranges-command", script, "source", "target"]),
        (Signal::KILL, &["--ranges-command", script, "source", "target"]),
        (Signal::TERM, &["--job", "job.toml"]),
    ] {
        // Whoever runs the tests may ignore SIGINT, as a shell does for commands in the background.
        let mut command = Command::new("env");
        command.args(["--default-signal=INT", OURS, "copy", "--no-progress"]).args(args);
        command.current_dir(lab.scratch.path());
        let mut copy = command.env("TMPDIR", lab.scratch.path()).spawn().unwrap();
        tools::until("the command runs", || {
            assert!(copy.try_wait().unwrap().is_none(), "the copy has ended");
            files[2].exists()
        });
        kill_process(Pid::from_child(&copy), signal).unwrap();
        // As a shell reports it: 128 and the number.
        assert_eq!(copy.wait().unwrap().signal(), Some(signal.as_raw()));
        for pid in &files[..2] {
            tools::until("the command has ended", || has_ended(pid));
        }
        tools::until("its directory is removed", || {
            let left = std::fs::read_dir(lab.scratch.path()).unwrap().flatten();
            !left.into_iter().any(|entry| entry.file_type().unwrap().is_dir())
        });
        files.iter().for_each(|file| std::fs::remove_file(file).unwrap());
    }
    assert_eq!(std::fs::read(lab.file("target")).unwrap(), b"untouched");
}

/// A list as a program prints it.
struct ListCase {
    text: String,
    /// Whether its end, and what it covers, can be seen: else each line counts alone.
    is_whole: bool,
    /// What it says, each line for itself.
    areas: Vec<Range<u64>>,
}

/// Changed areas: offset and length.
fn areas(rng: &mut Rng, size: u64, unit: u64) -> Vec<(u64, u64)> {
    let units = size / unit;
    let mut found: Vec<_> =
        (0..units).filter(|_| rng.chance(30)).map(|at| (at * unit, unit)).collect();
    if found.is_empty() {
        found.push((rng.below(units) * unit, unit));
    }
    found
}

/// A list of these areas of a disk of `size` bytes; one that lies about its disk if `lies`.
fn listed(rng: &mut Rng, kind: usize, size: u64, all: &[(u64, u64)], lies: bool) -> ListCase {
    let said = if lies { size ^ (512 << rng.below(12)) } else { size };
    let lines = |values: Vec<Value>| values.iter().map(|value| format!("{value}\n")).collect();
    let (text, is_whole): (String, bool) = match kind {
        // VMware: pages.
        0 => {
            let mut ends: Vec<_> =
                (0..rng.below(4)).map(|_| rng.below(size / BLOCK) * BLOCK).collect();
            ends.sort_unstable();
            let mut at = 0;
            let mut pages = Vec::new();
            for end in ends.into_iter().chain([said]).filter(|end| *end > 0) {
                if end <= at {
                    continue;
                }
                let inside = all.iter().filter(|area| (at..end).contains(&area.0));
                let list: Vec<_> = inside
                    .map(|(start, length)| json!({ "start": start, "length": length }))
                    .collect();
                pages.push(json!({ "startOffset": at, "length": end - at, "changedArea": list }));
                at = end;
            }
            if lies && rng.chance(50) && pages.len() > 1 {
                pages.remove(rng.below(pages.len() as u64) as usize);
            }
            rng.shuffle(&mut pages);
            if rng.chance(50) {
                (lines(pages), true)
            } else {
                (Value::from(pages).to_string(), true)
            }
        }
        // CSI: an array of messages.
        1 => {
            let messages = all.chunks(3).map(|some| {
                let list: Vec<_> =
                    some.iter().map(|(at, len)| json!({ "byteOffset": at.to_string(), "sizeBytes": len.to_string() })).collect();
                json!({ "volumeCapacityBytes": said.to_string(), "blockMetadata": list })
            });
            (Value::from(messages.collect::<Vec<_>>()).to_string(), true)
        }
        // thin_delta.
        2 => {
            let unit = all[0].1;
            let mut text = format!(
                "<superblock uuid=\"\" data_block_size=\"{}\">\n  <diff left=\"1\" right=\"2\">\n",
                unit / 512
            );
            for (at, len) in all {
                text += &format!(
                    "    <different begin=\"{}\" length=\"{}\"/>\n",
                    at / unit,
                    len / unit
                );
            }
            (text + "  </diff>\n</superblock>\n", true)
        }
        // nbdinfo --map --json.
        3 => {
            let mut at = 0;
            let mut map = Vec::new();
            let mut push = |from: u64, to: u64, number: u64, words: &str| {
                if from < to {
                    map.push(json!({ "offset": from, "length": to - from, "type": number, "description": words }));
                }
            };
            for (start, len) in all {
                push(at, *start, 0, "clean");
                push(*start, start + len, 1, "dirty");
                at = start + len;
            }
            push(at, if lies && said <= at { size + 512 } else { said }, 0, "clean");
            (Value::from(map).to_string(), true)
        }
        // XAPI.
        4 => {
            let mut bits = vec![0_u8; said.div_ceil(BLOCK).div_ceil(8) as usize];
            for (at, len) in all {
                for block in at / BLOCK..(at + len).div_ceil(BLOCK) {
                    if let Some(byte) = bits.get_mut((block / 8) as usize) {
                        *byte |= 0x80 >> (block % 8);
                    }
                }
            }
            // A byte more or less than the disk has.
            if lies && said.div_ceil(BLOCK).div_ceil(8) == size.div_ceil(BLOCK).div_ceil(8) {
                if rng.chance(50) { bits.push(0) } else { bits.truncate(bits.len() - 1) }
            }
            (base64(&bits) + "\n", true)
        }
        // rbd diff.
        5 => {
            let list: Vec<_> = all
                .iter()
                .map(|(at, len)| json!({ "offset": at, "length": len, "exists": "true" }))
                .collect();
            (Value::from(list).to_string(), true)
        }
        // rbd diff, as a table.
        6 => {
            let mut text = "Offset Length Type\n".to_string();
            for (at, len) in all {
                text += &format!("{at}   {len}  data\n");
            }
            (text, false)
        }
        // Lines.
        _ => (
            lines(all.iter().map(|(at, len)| json!({ "offset": at, "length": len })).collect()),
            false,
        ),
    };
    let areas = all.iter().map(|(at, len)| *at..(at + len).min(size)).collect();
    ListCase { text, is_whole, areas }
}

fn base64(bytes: &[u8]) -> String {
    let symbols = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::new();
    for three in bytes.chunks(3) {
        let mut padded = [0; 4];
        padded[1..=three.len()].copy_from_slice(three);
        let bits = u32::from_be_bytes(padded);
        for place in 0..4 {
            let symbol = symbols[(bits >> (18 - 6 * place) & 63) as usize];
            text.push(if place > three.len() { '=' } else { char::from(symbol) });
        }
    }
    text
}

#[test]
fn cut_and_lying_lists_never_succeed_with_another_disk() {
    let seed = rng::seed();
    println!("BLOCKHAUL_SEED={seed}");
    let mut rng = Rng::new(seed);
    let rounds = if tools::long() { 3000 } else { 28 };
    let mut refused = 0;
    let mut lab = Lab::new(2 * MIB);
    for round in 0..rounds {
        if round % 50 == 49 {
            lab = Lab::new(MIB + rng.below(48) * BLOCK + rng.below(2) * 512);
        }
        let size = lab.source.len() as u64;
        let kind = round % 8;
        let mut all = areas(&mut rng, size, BLOCK);
        let way = rng.below(5);
        let lies = way == 1 && ![2, 5, 6, 7].contains(&kind);
        let mut list = listed(&mut rng, kind, size, &all, lies);
        let mut whole = !lies;
        match way {
            // Cut anywhere.
            0 => {
                let end = rng.below(list.text.len() as u64) as usize;
                whole = list.text[end..].trim().is_empty();
                list.text.truncate(end);
                if kind == 6 {
                    list.areas.truncate(list.text.matches('\n').count().saturating_sub(1));
                } else if !list.is_whole {
                    let lines = list.text.lines().filter(|line| line.ends_with('}')).count();
                    list.areas.truncate(lines);
                }
            }
            // An area is another one.
            2 => {
                let index = rng.below(all.len() as u64) as usize;
                all[index].0 = rng.below(size / BLOCK) * BLOCK;
                all.sort_unstable();
                all.dedup();
                list = listed(&mut rng, kind, size, &all, false);
            }
            // Something follows.
            3 => {
                let more =
                    *rng.pick(&["error", "]", "</diff>", "{\"error\": 1}", "AAAA", "\u{0}", "[1]"]);
                list.text += more;
                whole = false;
            }
            _ => {}
        }
        let (output, target) = lab.list(&list.text);
        let said = text(&output.stderr);
        let place = format!("round {round}, kind {kind}, way {way}: {said}{}", list.text);
        assert!(!said.contains("panicked"), "{place}");
        match output.status.code() {
            Some(0) => {
                // A list in lines may end at any line.
                let is_seen = whole || !list.is_whole;
                assert!(is_seen && target == lab.with(&list.areas), "{place}");
            }
            Some(3) => {
                assert!(!whole || !list.is_whole, "{place}");
                assert!(target.iter().all(|byte| *byte == 0), "{place}");
                refused += 1;
            }
            other => panic!("{other:?}: {place}"),
        }
    }
    println!("{rounds} lists: {refused} refused, {} copied as they say", rounds - refused);
    assert!(refused > 0 && refused < rounds);
}
