//! What comes from outside is printed so that it does not act on a terminal and stays in its line.

use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt as _;
use std::process::{Command, Output};
use std::time::Duration;

use blockhaul_testkit::tools::{self, ScratchDir, text};

const LIMIT: Duration = Duration::from_secs(60);
const OURS: &str = env!("CARGO_BIN_EXE_blockhaul");
/// A colour, a newline, a byte that is no UTF-8, a mark that turns the direction, an end of C1.
const ODD: &[u8] = b"a\x1b[31mb\nblockhaul: done\xff\xe2\x80\xaec\xc2\x9b.raw";
/// How it is shown.
const SHOWN: &str = "a\\u{1b}[31mb\\nblockhaul: done\u{fffd}\\u{202e}c\\u{9b}.raw";

fn odd() -> OsString {
    OsString::from_vec(ODD.to_vec())
}

fn run(scratch: &ScratchDir, args: impl IntoIterator<Item = OsString>) -> Output {
    let mut command = Command::new(OURS);
    command.current_dir(scratch.path()).args(args);
    tools::output(&mut command, LIMIT).unwrap()
}

/// Nothing in the lines acts on a terminal.
#[track_caller]
fn is_plain(said: &str) {
    assert!(
        !said.chars().any(|c| blockhaul_wire::unprintable(c) && c != '\n' && c != '\t'),
        "{said:?}"
    );
    assert!(!said.lines().any(|line| line.starts_with("blockhaul: done")), "{said:?}");
}

#[test]
fn arguments_are_escaped_in_errors() {
    let scratch = ScratchDir::new().unwrap();
    let words = |words: &[&str]| words.iter().map(OsString::from).collect::<Vec<_>>();
    for (command, behind) in [
        (vec!["copy"], vec!["target"]),
        (vec!["copy", "--target-layer=readonly", "null:"], vec![]),
        (vec!["info"], vec![]),
        (vec!["map"], vec![]),
        (vec!["compare"], vec!["null:"]),
        (vec!["serve", "--foreground"], vec![]),
        (vec!["checksum"], vec![]),
        (vec!["ctl"], vec!["clients"]),
        (vec!["compat", "nbdinfo"], vec![]),
        (vec!["compat", "nbdcopy"], vec!["target"]),
        (vec!["compat", "nbdkit", "-f", "file"], vec![]),
    ] {
        let args = words(&command).into_iter().chain([odd()]).chain(words(&behind));
        let output = run(&scratch, args);
        let said = text(&output.stderr);
        assert!(!output.status.success(), "{command:?}: {said}");
        assert!(said.contains(SHOWN), "{command:?}: {said}");
        is_plain(&said);
    }
}

#[test]
fn arguments_are_escaped_where_the_command_line_is_wrong() {
    let scratch = ScratchDir::new().unwrap();
    let odd = "a\u{1b}[31mb\nblockhaul: done\u{202e}";
    for args in [
        vec!["copy".to_string(), format!("--{odd}"), "a".into(), "b".into()],
        vec!["copy".to_string(), format!("--request-size={odd}"), "a".into(), "b".into()],
        vec!["copy".to_string(), "--request-size".into(), odd.into(), "a".into(), "b".into()],
        vec![odd.to_string()],
        vec!["compat".to_string(), odd.into()],
        vec!["compat".to_string(), "nbdcopy".into(), format!("--{odd}")],
        vec!["copy".to_string(), "--source-layer".into(), odd.into(), "null:".into(), "b".into()],
    ] {
        let output = run(&scratch, args.iter().map(OsString::from));
        let said = text(&output.stderr);
        assert!(!output.status.success(), "{args:?}: {said}");
        is_plain(&said);
    }
}

#[test]
fn json_has_its_own_escapes() {
    let scratch = ScratchDir::new().unwrap();
    let args = ["serve", "--foreground", "--log-format=json"].map(OsString::from);
    let output = run(&scratch, args.into_iter().chain([odd()]));
    let said = text(&output.stderr);
    let record: serde_json::Value = serde_json::from_str(said.trim_end()).unwrap();
    let message = record["message"].as_str().unwrap();
    assert!(message.contains(&*String::from_utf8_lossy(ODD)), "{said}");
    assert_eq!(said.lines().count(), 1, "{said}");
}

#[test]
fn what_a_server_tells_is_escaped() {
    let scratch = ScratchDir::new().unwrap();
    let name = "a\u{1b}[31mb\nblockhaul: done\u{202e}";
    let server = ["blockhaul", "serve", "--export"].map(OsString::from);
    let export = OsString::from(format!("{name}=memory:1M"));
    for command in [&["info", "--list"][..], &["info"], &["map"]] {
        let mut args: Vec<_> = command.iter().map(OsString::from).collect();
        args.push("[".into());
        args.extend(server.clone());
        args.extend([export.clone(), "]".into()]);
        let output = run(&scratch, args);
        let said = text(&output.stdout);
        is_plain(&said);
        is_plain(&text(&output.stderr));
        let listed = command.contains(&"--list");
        assert!(!listed || output.status.success() && said.contains("\\u{202e}"), "{said}");
    }
}
