//! `blockhaul help`, and advice in errors of the command line.

use std::process::{Command, Output};
use std::time::Duration;

use blockhaul_testkit::tools::{self, ScratchDir, text};

const OURS: &str = env!("CARGO_BIN_EXE_blockhaul");

fn blockhaul(args: &[&str]) -> Output {
    tools::output(Command::new(OURS).args(args), Duration::from_secs(60)).unwrap()
}

#[test]
fn each_help_has_the_exit_statuses_of_its_command() {
    let statuses = |command: &[&str]| {
        let output = blockhaul(&[command, &["--help"]].concat());
        let help = text(&output.stdout).to_string();
        let rows = help.split("\nEXIT STATUS\n").nth(1).unwrap_or_default().lines();
        let rows = rows.filter(|row| row.starts_with("  ") && !row.starts_with("   "));
        rows.map(|row| row.split_whitespace().next().unwrap().to_string()).collect::<Vec<_>>()
    };
    assert_eq!(statuses(&["info"]), ["0", "1", "2"]);
    assert_eq!(statuses(&["compare"]), ["0", "1", "2", "3", "4"]);
    assert_eq!(statuses(&["ctl"]), ["0", "1", "2", "3", "7"]);
    assert_eq!(statuses(&["map"]), ["0", "1", "2", "3", "4", "7"]);
    // These are too long for them.
    for command in ["copy", "serve"] {
        assert!(text(&blockhaul(&[command, "--help"]).stdout).contains("help exit-status"));
    }
    assert!(!statuses(&["restore"]).contains(&"10".to_string()));
}

#[test]
fn the_short_help_of_copy_has_what_matters() {
    let output = blockhaul(&["copy", "-h"]);
    let help = text(&output.stdout);
    assert!(help.lines().count() <= 45, "{help}");
    for wanted in ["--verify", "--journal", "--rate", "--job", "EXAMPLE", "blockhaul copy --help"] {
        assert!(help.contains(wanted), "{wanted}: {help}");
    }
    assert!(!help.contains("--queue-size"), "{help}");
}

/// They complete what their help promises, and no more is promised.
#[test]
fn completions_are_those_that_their_help_names() {
    let help = blockhaul(&["completions", "--help"]);
    assert!(text(&help.stdout).contains("Complete commands and options in bash"));
    let completed = |words: &[&str]| {
        let script = "source <(\"$0\" completions bash); COMP_WORDS=(blockhaul \"$@\"); COMP_CWORD=$#; \
                      _blockhaul blockhaul \"${COMP_WORDS[COMP_CWORD]}\" x; echo ${COMPREPLY[*]}";
        let mut command = Command::new("bash");
        command.args(["-c", script, OURS]).args(words);
        text(&tools::output(&mut command, Duration::from_secs(60)).unwrap().stdout)
    };
    assert_eq!(completed(&["chain", "pru"]).trim(), "prune");
    let kept = completed(&["chain", "prune", "--keep-"]);
    assert!(kept.contains("--keep-daily") && kept.contains("--keep-within"), "{kept}");
}

/// A fault of a plugin is one error: its process was ended for it, which is none.
#[test]
fn a_wrong_answer_of_a_plugin_is_one_error() {
    let scratch = ScratchDir::new().unwrap();
    let (plugin, disk) = (scratch.file("bad.py"), scratch.file("disk.raw"));
    std::fs::write(
        &plugin,
        "def open(r): return 1\ndef get_size(h): return 'x'\ndef pread(h): pass\n",
    )
    .unwrap();
    let output = blockhaul(&["info", &format!("python:{}", plugin.display())]);
    let said = text(&output.stderr);
    assert!(said.contains("get_size returned 'x'") && said.lines().count() == 1, "{said}");
    // Nor does Rust show through.
    std::fs::write(&disk, vec![7; 1 << 20]).unwrap();
    let [disk, copy] = [&disk, &scratch.file("copy.raw")].map(|path| path.display().to_string());
    let said = text(&blockhaul(&["copy", "--verbose", &disk, &copy]).stderr);
    assert!(said.contains("debug: ") && !said.contains("Os {") && !said.contains("Err("), "{said}");
    for words in
        [&["copy", "--connections", "0", "a", "b"][..], &["serve", "--workers", "1025", "a"]]
    {
        let said = text(&blockhaul(words).stderr);
        assert!(!said.contains("..=") && said.contains("use a number from "), "{words:?}: {said}");
    }
}

#[test]
fn commands_of_other_programs_have_a_bridge() {
    for (word, ours) in [("backup", "pull"), ("convert", "copy"), ("list", "info --list")] {
        let output = blockhaul(&[word, "a", "b"]);
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{said}");
        assert!(said.contains(&format!("use blockhaul {ours}")), "{said}");
    }
}

#[test]
fn topics_are_what_commands_do_not_repeat() {
    for (topic, wanted) in [
        ("devices", "memory:SIZE"),
        ("layers", "extents-cache"),
        ("memory", "memory:SIZE"),
        ("rate", "Bytes per second"),
        ("exit-status", "EXIT STATUS"),
        ("job", "JOB FILES"),
        ("copy", "Usage: blockhaul copy"),
    ] {
        let output = blockhaul(&["help", topic]);
        assert!(output.status.success(), "{topic}: {}", text(&output.stderr));
        assert!(text(&output.stdout).contains(wanted), "{topic}: {}", text(&output.stdout));
    }
    assert_eq!(blockhaul(&["help"]).stdout, blockhaul(&["--help"]).stdout);
    let inner = blockhaul(&["help", "ctl", "clients"]);
    assert_eq!(inner.stdout, blockhaul(&["ctl", "clients", "--help"]).stdout);
    assert_eq!(blockhaul(&["help", "layer", "rate"]).stdout, blockhaul(&["help", "rate"]).stdout);
    assert_eq!(blockhaul(&["help", "device", "tar"]).status.code(), Some(2), "it is a layer");
    let wrong = blockhaul(&["help", "memroy"]);
    assert_eq!(wrong.status.code(), Some(2));
    assert!(text(&wrong.stderr).contains("did you mean memory?"), "{}", text(&wrong.stderr));
    for command in ["copy", "serve", "info", "map", "compare", "verify", "checksum", "ctl"] {
        let help = text(&blockhaul(&[command, "--help"]).stdout);
        let lines = help.lines().count();
        assert!((60..=260).contains(&lines), "{command}: {lines} lines");
        assert!(help.find("EXAMPLES").unwrap() < help.find("Options:").unwrap(), "{command}");
    }
}

#[test]
fn a_device_that_is_a_plugin_of_nbdkit_leads_to_the_plugin() {
    for (name, params) in [
        ("floppy", "dir=…"),
        ("iso", "dir=…"),
        ("linuxdisk", "dir=…"),
        ("ondemand", "dir=…&size=…"),
        ("tmpdisk", "size=…"),
    ] {
        let line = format!("(Debian's package nbdkit) write 'nbdkit:{name}?{params}'");
        let help = blockhaul(&["help", "device", name]);
        assert!(help.status.success() && text(&help.stdout).contains(&line), "{help:?}");
        let refused = blockhaul(&["copy", &format!("{name}:"), "null:"]);
        assert_eq!(refused.status.code(), Some(2));
        assert!(text(&refused.stderr).contains(&line), "{}", text(&refused.stderr));
        if !blockhaul(&["plugin", name]).status.success() {
            let said = text(&blockhaul(&["compat", "nbdkit", name, "x=y"]).stderr);
            assert!(said.contains("; install Debian's package nbdkit"), "{said}");
        }
    }
}

#[test]
fn a_wrong_option_gets_advice_that_fits() {
    let output = blockhaul(&["copy", "--layer", "cow", "memory:1M", "null:"]);
    let said = text(&output.stderr);
    assert!(said.contains("--source-layer or --target-layer") && !said.contains("-- --"), "{said}");
    let said = text(&blockhaul(&["map", "-R", "memory:1M"]).stderr);
    assert!(said.contains("'-R'") && !said.contains("-- -R"), "{said}");
    let said = text(&blockhaul(&["ctl", "a.ctl", "nosuch"]).stderr);
    assert!(said.contains("ctl has no command \"nosuch\""), "{said}");
    let said = text(&blockhaul(&["info", "127.0.0.1:10809"]).stderr);
    let advice = "cannot open it: No such file or directory; check the name; for an NBD server write \
                  nbd://HOST:PORT";
    assert!(said.contains(advice), "{said}");
    let said = text(&blockhaul(&["copy", "--source-layer", "gzip", "memory:1M", "null:"]).stderr);
    assert!(said.contains("did you mean gz?"), "{said}");
}

#[test]
fn the_version_has_what_a_report_of_an_error_needs() {
    let said = text(&blockhaul(&["--version"]).stdout);
    assert!(said.starts_with("blockhaul "), "{said}");
    for word in ["features: ", "OpenSSL: OpenSSL ", "kernel: "] {
        assert!(said.contains(word), "{said}");
    }
    assert_eq!(text(&blockhaul(&["-V"]).stdout).lines().count(), 1);
    // The tests are built with the default features.
    let manifest: toml::Table = include_str!("../../Cargo.toml").parse().unwrap();
    let defaults = manifest["features"]["default"].as_array().unwrap();
    let named = said.lines().find_map(|line| line.strip_prefix("features: ")).unwrap();
    let defaults: Vec<_> = defaults.iter().map(|name| name.as_str().unwrap()).collect();
    assert_eq!(named.split(' ').collect::<Vec<_>>(), defaults);
}
