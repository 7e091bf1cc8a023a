//! blockhaul in the place of nbdkit: command lines that Debian's nbdkit takes, and what both make of
//! them.

use std::os::unix::fs::symlink;
use std::path::PathBuf;
use std::process::{Command, Output};

use blockhaul_testkit::tools::{self, PeerProgram, ScratchDir, among_peers};
use blockhaul_tests::{LIMIT, bounded, lossy, program, text};

/// nbdkit, and blockhaul in its place. Gone when dropped.
struct Both {
    scratch: ScratchDir,
    ours: PathBuf,
}

impl Both {
    /// `None`: there is no nbdkit.
    fn here() -> Option<Both> {
        PeerProgram::require("nbdkit")?;
        let scratch = ScratchDir::new().unwrap();
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
        let ours = self.ours(args);
        let theirs = self.theirs(args);
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

// nbdkit's plugin ends by SIGSEGV when a client asks for extents, as most do.
with_nbdkit!(split_files_are_one_disk, |both| {
    let (one, two) = (both.scratch.file("one, a,b%"), both.scratch.file("two?x=y"));
    std::fs::write(&one, vec![1; 70_000]).unwrap();
    std::fs::write(&two, vec![2; 513]).unwrap();
    let two = format!("file={}", text(&two));
    let command = "nbdinfo --map \"$uri\" > /dev/null && nbdcopy \"$uri\" - | md5sum";
    let output = both.ours(&["split", text(&one), &two, text(&one), "--run", command]);
    let whole = [vec![1; 70_000], vec![2; 513], vec![1; 70_000]].concat();
    let file = both.scratch.file("whole");
    std::fs::write(&file, whole).unwrap();
    let expected = both.ours(&["file", text(&file), "--run", command]);
    assert!(output.status.success(), "{output:?}");
    assert_eq!(lossy(&output.stdout), lossy(&expected.stdout));
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

/// The long options of nbdkit 1.48.1, in its order.
const LONG_1_48: &str = "ipv4-only ipv6-only debug dump-config dump-plugin exit-with-parent export \
    export-name exportname filter foreground no-fork group help ip-addr ipaddr keepalive keep-alive \
    log long-options mask-handshake name new-style newstyle no-mc no-meta-contexts no-sr \
    no-structured-replies old-style oldstyle pid-file pidfile print-uri print-url port read-only \
    readonly run selinux-label short-options show-uri show-url single stdin swap threads timeout \
    time-out tls tls-certificates tls-priority tls-psk tls-verify-peer unix user verbose version \
    vsock";
/// Its short options.
const SHORT_1_48: &str = "4 6 D e f g i n o p P r s t u U v V";

/// The lines of an output, sorted.
fn lines(output: &Output) -> Vec<String> {
    let mut lines: Vec<String> = lossy(&output.stdout).lines().map(str::to_string).collect();
    lines.sort();
    lines
}

/// Each is accepted, or on the page with the reason why it is not.
fn assert_accepted_or_explained(theirs: &[String], ours: &[String]) {
    let page = include_str!("../../../docs/coming-from-nbdkit.md");
    for option in theirs {
        let is_explained = page.contains(&format!("`{option}` is not accepted"));
        assert!(
            ours.contains(option) || is_explained,
            "{option} is neither accepted nor explained"
        );
    }
}

#[test]
fn options_of_the_newest_release_are_accepted() {
    let ours =
        |option: &str| bounded(Command::new(program()).args(["compat", "nbdkit", option]), LIMIT);
    let named = |names: &str, dashes: &str| {
        names.split_whitespace().map(|name| format!("{dashes}{name}")).collect::<Vec<_>>()
    };
    assert_accepted_or_explained(&named(LONG_1_48, "--"), &lines(&ours("--long-options")));
    assert_accepted_or_explained(&named(SHORT_1_48, "-"), &lines(&ours("--short-options")));
    // What completion offers is what that release offers, in its order.
    let listed = named(LONG_1_48, "--").join("\n") + "\n";
    assert_eq!(lossy(&ours("--long-options").stdout), listed);
}

with_nbdkit!(options_of_the_installed_nbdkit_are_accepted, |both| {
    for list in ["--long-options", "--short-options"] {
        let theirs = lines(&both.theirs(&[list]));
        assert!(theirs.len() > 15, "{theirs:?}");
        assert_accepted_or_explained(&theirs, &lines(&both.ours(&[list])));
    }
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
    for key in ["plugindir=", "filterdir=", "version_major=", "libdir=", "soext="] {
        assert_eq!(value(both.ours(&dump), key), value(both.theirs(&dump), key), "{key}");
    }
});

with_nbdkit!(plugins_and_filters_describe_themselves, |both| {
    both.same(&["null", "--dump-plugin"]);
    both.same(&["--filter=noparallel", "null", "--dump-plugin", "serialize=connections"]);
    // Our own layers and devices have our version, hosted ones have theirs.
    let names = |output: Output| {
        let text = lossy(&output.stdout);
        text.lines().map(|line| line.split(' ').next().unwrap().to_string()).collect::<Vec<_>>()
    };
    let version = ["--version", "--filter=cow", "--filter=noparallel", "file"];
    assert_eq!(names(both.ours(&version)), names(both.theirs(&version)));
    let hosted = lossy(&both.theirs(&["--version", "--filter=noparallel", "sh"]).stdout);
    let hosted: Vec<_> = hosted.lines().skip(1).collect();
    let ours = lossy(&both.ours(&["--version", "--filter=noparallel", "sh"]).stdout);
    assert_eq!(ours.lines().skip(1).collect::<Vec<_>>(), hosted);
    let help = lossy(&both.ours(&["--help", "--filter=delay", "memory"]).stdout);
    let theirs = lossy(&both.theirs(&["--help", "--filter=delay", "memory"]).stdout);
    for line in ["filter: delay (", "plugin: memory"] {
        assert!(help.contains(line) && theirs.contains(line), "{line}");
    }
    let both_know = ["rdelay=", "delay-read=", "size="];
    assert!(both_know.iter().all(|key| help.contains(key) && theirs.contains(key)), "{help}");
    let help = lossy(&both.ours(&["--help", "--filter=noparallel", "sh"]).stdout);
    assert!(help.contains("filter: noparallel (nbdkit noparallel filter)"), "{help}");
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
    let alive = || tools::is_running(number);
    assert!(alive(), "it is in the background");
    assert!(Command::new("kill").arg(number).status().unwrap().success());
    tools::until("SIGTERM ends it", || !alive());
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

with_nbdkit!(block_sizes_are_told_as_the_plugin_says_them, |both| {
    let ask = "nbdsh -u \"$uri\" -c '
for which in nbd.SIZE_MINIMUM, nbd.SIZE_PREFERRED, nbd.SIZE_MAXIMUM:
    print(h.get_block_size(which))'";
    let eval = ["eval", "get_size=echo 64M", "block_size=echo 64K 128K 512K", "--run", ask];
    assert_eq!(both.same(&eval), "65536\n131072\n524288\n");
    for filter in
        [&["--filter=blocksize"][..], &["--filter=blocksize-policy", "blocksize-minimum=1"]]
    {
        let mut args = vec![filter[0]];
        args.extend(eval);
        args.extend(&filter[1..]);
        both.same(&args);
    }
    // Without a preference nothing is advertised.
    both.same(&["null", "1M", "--run", ask]);
});

with_nbdkit!(old_handshakes_are_offered_when_asked_for, |both| {
    let ask = "nbdsh -u \"$uri\" -c '
print(h.get_protocol(), h.get_size(), h.get_structured_replies_negotiated())
h.pwrite(b\"abc\", 10)
print(h.pread(5, 9))'";
    for (option, protocol) in [
        ("--oldstyle", "oldstyle 1048576 False"),
        ("--mask-handshake=0", "newstyle 1048576 False"),
        ("--mask-handshake=1", "newstyle-fixed 1048576 True"),
        ("--mask-handshake=0xffff", "newstyle-fixed 1048576 True"),
    ] {
        let said = both.same(&[option, "memory", "1M", "--run", ask]);
        assert!(said.starts_with(protocol), "{option}: {said}");
    }
    both.same(&["--mask-handshake=x", "null", "--run", "true"]);
    both.same(&["--oldstyle", "--tls=require", "null", "--run", "true"]);
});

with_nbdkit!(plugins_send_clients_away, |both| {
    let ask = "nbdsh -u \"$uri\" -c '
def tried(what):
    try:
        what()
        print(\"fine\")
    except nbd.Error as error:
        print(error.errno)
tried(lambda: h.pwrite(b\"1\", 0))
tried(lambda: h.flush())
tried(lambda: h.pread(1, 0))'";
    for (status, wanted) in
        [(6, "ENOTCONN\n"), (7, "fine\nESHUTDOWN\nESHUTDOWN\n"), (8, "ESHUTDOWN\nESHUTDOWN\n")]
    {
        let write = format!("pwrite=cat >/dev/null; exit {status}");
        let eval = ["eval", "get_size=echo 64k", "flush=exit 0", "pread=head -c $3 /dev/zero"];
        let mut args = eval.to_vec();
        args.extend([write.as_str(), "--run", ask]);
        let said = both.same(&args);
        assert!(said.starts_with(wanted), "{status}: {said}");
    }
});

with_nbdkit!(fua_is_told_as_the_plugin_says_it, |both| {
    let ask = "nbdsh -u \"$uri\" -c 'print(h.can_fua(), h.can_flush())'";
    let eval = ["eval", "get_size=echo 64k", "can_write=exit 0", "flush=exit 0", "pwrite=exit 0"];
    for (fua, wanted) in
        [("can_fua=echo none", "False True\n"), ("can_fua=echo emulate", "True True\n")]
    {
        let mut args = eval.to_vec();
        args.extend([fua, "pread=exit 1", "--run", ask]);
        assert_eq!(both.same(&args), wanted, "{fua}");
    }
});

with_nbdkit!(hints_to_cache_are_reads_of_the_plugins_longest_kind, |both| {
    let log = both.scratch.file("log");
    let read = format!("pread=echo $3 $4 >> {}; head -c $3 /dev/zero", text(&log));
    let ask =
        format!("nbdsh -u \"$uri\" -c 'h.cache(h.get_size(), 0)'; cat {0}; rm {0}", text(&log));
    let eval = ["eval", "get_size=echo 100M", "can_cache=echo emulate", &read, "--run", &ask];
    assert_eq!(both.same(&eval), "67108864 0\n37748736 67108864\n");
});

with_nbdkit!(extents_are_told_as_far_as_the_plugin_knows_them, |both| {
    let ask = "nbdsh --base-allocation -u \"$uri\" -c '
def show(context, offset, extents, error):
    print(extents)
h.block_status(512, 512, show)
h.block_status(2**32-1, 2, show)
h.block_status(2**32-1, 1, show)
h.block_status(2**32-1, 0, show)
h.block_status(1, 7, show, nbd.CMD_FLAG_REQ_ONE)'";
    let extents = "extents=echo 0 4G 1; echo 4G 1G 2";
    let said = both.same(&["eval", "get_size=echo 5G", "pread=exit 1", extents, "--run", ask]);
    assert!(said.contains("[4294967294, 1, 1073741824, 2]\n"), "{said}");
});

with_nbdkit!(standard_input_is_the_plugins_until_it_is_ready_and_then_the_commands, |both| {
    let plugin = both.scratch.file("plugin.py");
    let script = "import os, sys
def config_complete():
    print(\"config\", os.read(0, 4))
def get_ready():
    print(\"ready\", os.fstat(0).st_rdev == os.stat(\"/dev/null\").st_rdev, flush=True)
def open(readonly):
    assert all(os.fstat(fd).st_rdev == os.stat(\"/dev/null\").st_rdev for fd in (0, 1))
    return 1
def get_size(h):
    return 1024
def pread(h, buf, offset, flags):
    buf[:] = bytearray(len(buf))
";
    std::fs::write(&plugin, script).unwrap();
    let run = |program: &str| {
        let line = format!(
            "printf 'one\\ntwo\\n' | {program} python {} --run 'nbdinfo --size \"$uri\"; cat'",
            text(&plugin)
        );
        lossy(&bounded(among_peers("bash").unwrap().args(["-c", &line]), LIMIT).stdout)
    };
    let ours = run(text(&both.ours));
    assert_eq!(ours, run("nbdkit"));
    assert_eq!(ours, "config b'one\\n'\nready False\n1024\ntwo\n");
});

with_nbdkit!(a_script_cannot_come_from_where_the_client_is, |both| {
    both.same(&["-s", "sh", "-"]);
});

with_nbdkit!(files_are_as_they_are_when_a_client_comes, |both| {
    let file = both.scratch.file("disk");
    let ask = format!(
        "nbdinfo --size \"$uri\"; truncate -s 1000 {0}; nbdinfo --size \"$uri\"; \
         truncate -s 100 {0}; nbdinfo --size \"$uri\"",
        text(&file)
    );
    for (filters, wanted) in [
        (&[][..], "512\n1000\n100\n"),
        (&["--filter=truncate", "round-up=512"], "512\n1024\n512\n"),
    ] {
        std::fs::write(&file, [7; 512]).unwrap();
        let mut args = vec!["file", text(&file), "--run", &ask];
        args.splice(0..0, filters.iter().take(1).copied());
        args.extend(filters.iter().skip(1));
        let said = lossy(&both.ours(&args).stdout);
        assert_eq!(said, wanted, "{args:?}");
        std::fs::write(&file, [7; 512]).unwrap();
        assert_eq!(lossy(&both.theirs(&args).stdout), wanted, "{args:?}");
    }
});

with_nbdkit!(verbose_servers_say_what_reaches_filters_and_plugin, |both| {
    let args = ["-v", "--filter=noextents", "memory", "1M", "--run", "nbdcopy \"$uri\" null:"];
    for said in [lossy(&both.ours(&args).stderr), lossy(&both.theirs(&args).stderr)] {
        for line in ["noextents: open", "memory: open", "noextents: pread", "memory: pread"] {
            let line = format!("debug: {line}");
            assert!(said.lines().any(|said| said.contains(&line)), "{line}: {said}");
        }
    }
});

with_nbdkit!(memory_is_kept_and_labels_are_the_systems_affair, |both| {
    both.same(&["--swap", "null", "--run", "echo $?"]);
    let label = ["--selinux-label=nobody_knows_it", "null", "--run", "echo served"];
    let ours = both.ours(&label);
    assert_eq!(ours.status.code(), both.theirs(&label).status.code(), "{}", lossy(&ours.stderr));
});

with_nbdkit!(requests_longer_than_a_plugin_takes_reach_it_as_they_are, |both| {
    let log = both.scratch.file("log");
    let log = text(&log);
    let read = format!("pread=echo r $3 $4 >> {log}; head -c $3 /dev/zero | tr '\\0' x");
    let write = format!("pwrite=echo w $3 $4 $(tr -d '\\0' | wc -c) >> {log}");
    let ask = format!(
        "nbdsh -u \"$uri\" -c '
h.set_strict_mode(0)
assert h.pread(150 * 1024, 4096) == b\"x\" * 150 * 1024
h.pwrite(b\"y\" * 70 * 1024, 0)'; cat {log}; rm {log}"
    );
    let eval = ["eval", "get_size=echo 1M", "block_size=echo 1 4K 64K"];
    let mut args = eval.to_vec();
    args.extend([read.as_str(), write.as_str(), "--run", &ask]);
    assert_eq!(both.same(&args), "r 153600 4096\nw 71680 0 71680\n");
});

with_nbdkit!(what_ends_the_server_before_it_serves_ends_it_well, |both| {
    // The event is there long before the plugin is ready.
    let output = both.ours(&[
        "-f",
        "-U",
        "-",
        "--filter=exitwhen",
        "eval",
        "config_complete=sleep 1",
        "get_size=echo 1048576",
        "pread=head -c $3 /dev/zero",
        "exit-when-script=exit 88",
    ]);
    assert_eq!(output.status.code(), Some(0), "{}", lossy(&output.stderr));
});
