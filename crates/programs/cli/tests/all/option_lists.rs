//! The options that the peers list are accepted, or are in a page with a reason.

use std::collections::BTreeSet;
use std::process::Command;

use blockhaul_testkit::require_peer;
use blockhaul_testkit::tools::{self, text};

use crate::served_disk::{LIMIT, OURS};

/// The pages that list refused options.
const PAGES: &[&str] =
    &[include_str!("../../../../../docs/qemu-img.md"), include_str!("../../../../../docs/qmp.md")];

/// The long options in the help of each program and command of QEMU 11.1.3.
const QEMU_11_1: &[(&str, &str)] = &[
    (
        "qemu-nbd",
        "aio allocation-depth bind bitmap cache connect description detect-zeroes discard disconnect export-name fork format handshake-limit help image-opts list load-snapshot nocache object offset persistent pid-file port read-only selinux-label shared snapshot socket tls-authz tls-creds tls-hostname trace verbose version",
    ),
    ("qemu-img amend", "cache force format help image-opts object options progres quiet"),
    (
        "qemu-img bitmap",
        "add clear disable enable format granularity help image-opts merge object remove remove-all source-file source-format",
    ),
    ("qemu-img check", "cache force-share format help image-opts object output quiet repair"),
    ("qemu-img commit", "base cache drop format help image-opts object progress quiet rate-limit"),
    (
        "qemu-img compare",
        "a-format b-format cache force-share help image-opts object progress quiet strict",
    ),
    (
        "qemu-img convert",
        "backing backing-format bitmaps compress copy-range-offloading force-share help image-opts no-create object oob-writes parallel progress quiet rate-limit salvage skip-broken-bitmaps snapshot source-cache source-format source-image-opts sparse-size target-cache target-format target-format-options target-image-opts target-is-zero",
    ),
    ("qemu-img create", "backing backing-format backing-unsafe format help object options quiet"),
    ("qemu-img dd", "force-share format help image-opts object output-format"),
    (
        "qemu-img info",
        "backing-chain cache force-share format help image-opts limits object output",
    ),
    ("qemu-img map", "force-share format help image-opts max-length object output start-offset"),
    (
        "qemu-img measure",
        "force-share format help image-options image-opts object output size snapshot target-format",
    ),
    (
        "qemu-img rebase",
        "backing backing-cache backing-format backing-unsafe cache compress force-share format help image-opts object progress quiet",
    ),
    ("qemu-img resize", "format help image-opts object preallocation quiet shrink"),
    (
        "qemu-img snapshot",
        "apply create delete force-share format help image-opts list object quiet",
    ),
    (
        "qemu-storage-daemon",
        "blockdev chardev daemonize export help monitor nbd-server object pidfile trace version",
    ),
];

/// Checks that a program, or one of its commands, knows a long option, or that a page has it.
#[track_caller]
fn assert_known(program: &str, option: &str) {
    let mut command = Command::new(OURS);
    command.arg("compat").args(program.split(' '));
    // Whatever the option is, nothing is run.
    command.args([format!("--{option}=x"), "--help".to_string()]);
    let done = tools::output(&mut command, LIMIT).unwrap();
    let said = text(&done.stderr);
    let refused = said.contains("unknown option") || said.contains("is not supported");
    let listed = PAGES.iter().any(|page| page.contains(&format!("`--{option}`")));
    assert!(!refused || listed, "{program} --{option}: {said}");
}

/// Checks that a program, or one of its commands, knows the letters at the start of lines of its help.
#[track_caller]
fn assert_letters_known(program: &str, help: &str) {
    let lines = help.lines().filter_map(|line| line.trim_start().strip_prefix('-'));
    for line in lines.filter(|line| line.as_bytes().get(1) == Some(&b',')) {
        let letter = &line[..1];
        let mut command = Command::new(OURS);
        command.arg("compat").args(program.split(' '));
        command.args([&format!("-{letter}"), "--help"]);
        let said = text(&tools::output(&mut command, LIMIT).unwrap().stderr);
        assert!(!said.contains("unknown option"), "{program} -{letter}: {said}");
    }
}

/// The long options in a text.
fn long_options(help: &str) -> BTreeSet<String> {
    let words = help.split(|letter: char| !letter.is_ascii_alphanumeric() && letter != '-');
    let names = words.filter_map(|word| word.strip_prefix("--"));
    let names = names.filter(|name| name.starts_with(|first: char| first.is_ascii_lowercase()));
    names.map(str::to_string).collect()
}

#[test]
fn options_of_the_newest_qemu_are_known_or_documented() {
    for (program, options) in QEMU_11_1 {
        for option in options.split(' ') {
            assert_known(program, option);
        }
    }
}

#[test]
fn options_of_the_installed_qemu_are_known_or_documented() {
    for program in ["qemu-nbd", "qemu-storage-daemon"] {
        let peer = require_peer!(program);
        let done = tools::output(peer.command().arg("--help"), LIMIT).unwrap();
        let help = text(&done.stdout);
        assert_letters_known(program, &help);
        let options = long_options(&help);
        assert!(options.len() > 5, "{program}: {options:?}");
        options.iter().for_each(|option| assert_known(program, option));
    }
    let peer = require_peer!("qemu-img");
    let done = tools::output(peer.command().arg("--help"), LIMIT).unwrap();
    let help = text(&done.stdout);
    // A line for each command: its name, a dash and words.
    let names = help.lines().filter_map(|line| line.strip_prefix("  ")?.split_once(" - "));
    let mut commands = 0;
    // The page says that the command bench is not there.
    for (name, _) in names.filter(|(name, _)| !name.contains(' ') && *name != "bench") {
        commands += 1;
        let done = tools::output(peer.command().args([name, "--help"]), LIMIT).unwrap();
        let command = format!("qemu-img {name}");
        let help = text(&done.stdout);
        assert_letters_known(&command, &help);
        let options = long_options(&help);
        options.iter().for_each(|option| assert_known(&command, option));
    }
    assert!(commands > 10, "{help}");
}
