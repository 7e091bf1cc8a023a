//! blockhaul in the place of nbdkit: command lines that Debian's nbdkit takes, and what both make of
//! them.
#![allow(clippy::unwrap_used)]

use std::os::unix::fs::symlink;
use std::path::PathBuf;
use std::process::{Command, Output};
use std::time::{Duration, Instant};

use blockhaul_tests::{LIMIT, bounded, lossy, program, text};
use testkit::tools::{Peer, Scratch, among_peers};

/// nbdkit, and blockhaul in its place. Gone when dropped.
struct Both {
    scratch: Scratch,
    ours: PathBuf,
}

impl Both {
    /// `None`: there is no nbdkit.
    fn here() -> Option<Both> {
        Peer::require("nbdkit")?;
        let scratch = Scratch::new().unwrap();
        let ours = scratch.file("nbdkit");
        symlink(program(), &ours).unwrap();
        Some(Both { scratch, ours })
    }

    fn ours(&self, args: &[&str]) -> Output {
        bounded(among_peers(&self.ours).unwrap().args(args), LIMIT)
    }

    fn theirs(&self, args: &[&str]) -> Output {
        bounded(among_peers("nbdkit").unwrap().args(args), LIMIT)
    }

    /// What both print, which has to be the same, with the same exit status.
    #[track_caller]
    fn same(&self, args: &[&str]) -> String {
        let (ours, theirs) = (self.ours(args), self.theirs(args));
        let said = lossy(&ours.stderr);
        assert_eq!(ours.status.code(), theirs.status.code(), "{args:?}: {said}");
        assert_eq!(lossy(&ours.stdout), lossy(&theirs.stdout), "{args:?}: {said}");
        lossy(&ours.stdout)
    }

    /// The digest of what a client reads from this disk, which has to be the same from both.
    #[track_caller]
    fn same_bytes(&self, args: &[&str]) {
        let mut args = args.to_vec();
        args.extend(["--run", "nbdcopy \"$uri\" - | md5sum"]);
        let digest = self.same(&args);
        assert!(digest.len() > 32, "{args:?}: {digest}");
    }
}

/// A test that needs Debian's nbdkit.
macro_rules! with_nbdkit {
    ($test:ident, |$both:ident| $body:block) => {
        #[test]
        fn $test() {
            if let Some($both) = Both::here() {
                $body
            }
        }
    };
}

with_nbdkit!(disks_have_the_same_bytes, |both| {
    let file = both.scratch.file("disk");
    std::fs::write(&file, (0..200_000_u32).flat_map(u32::to_be_bytes).collect::<Vec<_>>()).unwrap();
    both.same_bytes(&["-r", "pattern", "5M"]);
    both.same_bytes(&["memory", "size=1M"]);
    both.same_bytes(&["file", text(&file)]);
    both.same_bytes(&["data", "0x55 0xaa @1000 \"x\"*7", "size=64k"]);
});

with_nbdkit!(filters_that_are_layers_and_filters_that_are_hosted_do_the_same, |both| {
    both.same_bytes(&["--filter=offset", "-r", "pattern", "5M", "offset=1000", "range=70000"]);
    both.same_bytes(&["--filter=swab", "--filter=truncate", "pattern", "5M", "truncate=64k"]);
    both.same_bytes(&["--filter=evil", "pattern", "1M", "evil-mode=stuck-bits", "evil-seed=1"]);
    // The outer one is a layer, the inner one is hosted.
    both.same_bytes(&[
        "--filter=offset",
        "--filter=ddrescue",
        "pattern",
        "1M",
        "offset=512",
        &format!("ddrescue-mapfile={}", text(&map_file(&both))),
    ]);
});

fn map_file(both: &Both) -> PathBuf {
    let path = both.scratch.file("map");
    std::fs::write(&path, "0x00000000 +\n0x00000000 0x00080000 +\n0x00080000 0x00080000 +\n")
        .unwrap();
    path
}

with_nbdkit!(the_command_sees_the_same_variables, |both| {
    let socket = both.scratch.file("s");
    let socket = text(&socket);
    let show = "echo \"$uri $nbd $port $unixsocket $exportname $tls\"; rm -f \"$unixsocket\"";
    both.same(&["-U", socket, "-e", "a b", "null", "--run", show]);
    both.same(&["-U", socket, "null", "--run", show]);
    let psk = both.scratch.file("keys.psk");
    std::fs::write(&psk, "alice:000102030405060708090a0b0c0d0e0f\n").unwrap();
    let psk = format!("--tls-psk={}", text(&psk));
    both.same(&["-U", socket, "--tls=require", &psk, "null", "--run", show]);
    both.same(&["-U", socket, &psk, "null", "--run", show]);
});

with_nbdkit!(exit_statuses_are_the_same, |both| {
    both.same(&["null", "--run", "exit 7"]);
    both.same(&["null", "--run", "kill -KILL $$"]);
    for bad in [
        &["nosuch"][..],
        &["null", "what=1"],
        &["--what", "null"],
        &["-D", "x", "null"],
        &["--filter=nosuch", "null"],
        &["-s", "-U", "/s", "null"],
        &["memory"],
        &[],
    ] {
        let said = lossy(&both.ours(bad).stderr);
        assert!(said.starts_with("nbdkit: error: "), "{bad:?}: {said}");
        assert_eq!(both.ours(bad).status.code(), both.theirs(bad).status.code(), "{bad:?}");
    }
});

with_nbdkit!(lists_of_options_are_the_same, |both| {
    both.same(&["--long-options"]);
    let words = |output: Output| {
        let mut words: Vec<String> = lossy(&output.stdout).lines().map(str::to_string).collect();
        words.sort();
        words
    };
    let list = ["--short-options"];
    assert_eq!(words(both.ours(&list)), words(both.theirs(&list)));
});

with_nbdkit!(the_configuration_has_the_same_keys, |both| {
    let keys = |output: Output| {
        let text = lossy(&output.stdout);
        text.lines().map(|line| line.split('=').next().unwrap().to_string()).collect::<Vec<_>>()
    };
    let dump = ["--dump-config"];
    assert_eq!(keys(both.ours(&dump)), keys(both.theirs(&dump)));
    let value = |output: Output, key: &str| {
        let text = lossy(&output.stdout);
        text.lines().find_map(|line| line.strip_prefix(key).map(str::to_string))
    };
    for key in ["plugindir=", "filterdir=", "version=", "libdir=", "soext="] {
        assert_eq!(value(both.ours(&dump), key), value(both.theirs(&dump), key), "{key}");
    }
});

with_nbdkit!(plugins_and_filters_describe_themselves, |both| {
    both.same(&["null", "--dump-plugin"]);
    both.same(&["--filter=noparallel", "null", "--dump-plugin", "serialize=connections"]);
    both.same(&["--version"]);
    both.same(&["--version", "--filter=cow", "file"]);
    let help = lossy(&both.ours(&["--help", "--filter=delay", "memory"]).stdout);
    let theirs = lossy(&both.theirs(&["--help", "--filter=delay", "memory"]).stdout);
    for line in ["filter: delay (nbdkit delay filter)", "plugin: memory"] {
        assert!(help.contains(line) && theirs.contains(line), "{line}");
    }
});

with_nbdkit!(scripts_on_standard_input_are_plugins_in_the_background, |both| {
    let (socket, pid) = (both.scratch.file("s"), both.scratch.file("pid"));
    let script = "case $1 in get_size) echo 64k;; pread) head -c $3 /dev/zero | tr '\\0' x;; \
                  *) exit 2;; esac";
    let start = format!(
        "printf %s {} | {} -U {} -P {} sh -; nbdcopy 'nbd+unix://?socket={}' - | head -c 3; \
         cat {}",
        quoted(script),
        text(&both.ours),
        text(&socket),
        text(&pid),
        text(&socket),
        text(&pid),
    );
    let output = bounded(among_peers("bash").unwrap().args(["-c", &start]), LIMIT);
    let said = lossy(&output.stdout);
    let number = said.strip_prefix("xxx").unwrap_or_else(|| panic!("{output:?}")).trim();
    let alive = || Command::new("kill").args(["-0", number]).output().unwrap().status.success();
    assert!(alive(), "it is in the background");
    assert!(Command::new("kill").arg(number).status().unwrap().success());
    let deadline = Instant::now() + Duration::from_secs(20);
    while alive() && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(20));
    }
    assert!(!alive(), "SIGTERM ends it");
});

fn quoted(text: &str) -> String {
    format!("'{}'", text.replace('\'', r"'\''"))
}

with_nbdkit!(plugins_say_why_to_clients_and_flags_make_them_say_more, |both| {
    let script = "case $1 in get_size) echo 64k;; pread) echo EPERM so it is >&2; exit 1;; \
                  *) exit 2;; esac";
    let check = "nbdsh -u \"$uri\" -c '
try:
    h.pread(1, 0)
    raise SystemExit(1)
except nbd.Error as error:
    assert error.errno == \"EPERM\", error.errno
'";
    let file = both.scratch.file("script");
    std::fs::write(&file, format!("#!/bin/sh\n{script}\n")).unwrap();
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    std::fs::set_permissions(&file, mode).unwrap();
    both.same(&["sh", text(&file), "--run", check]);
    let said = lossy(
        &both.ours(&["-D", "memory.dir=1", "-D", "x.y=1", "memory", "1M", "--run", "true"]).stderr,
    );
    assert!(said.contains("-D x.y was not used"), "{said}");
});

with_nbdkit!(the_uri_is_printed_for_people, |both| {
    let printed = lossy(&both.ours(&["--print-uri", "null", "--run", "true"]).stdout);
    let theirs = lossy(&both.theirs(&["--print-uri", "null", "--run", "true"]).stdout);
    assert!(printed.starts_with("nbd+unix://?socket=/"), "{printed}");
    for line in ["Shell-quoted URI: ", "Command to query the NBD endpoint:", "  nbdinfo "] {
        assert!(printed.contains(line) && theirs.contains(line), "{printed}");
    }
});

with_nbdkit!(clients_get_the_disk_whatever_name_they_ask_for, |both| {
    let ask = "nbdinfo --size \"nbd+unix:///any%20name?socket=$unixsocket\"";
    for plugin in
        [&["memory", "1M"][..], &["-r", "pattern", "1M"], &["--filter=evil", "memory", "1M"]]
    {
        let mut args = plugin.to_vec();
        args.extend(["--run", ask]);
        assert_eq!(both.same(&args), "1048576\n", "{plugin:?}");
    }
});
