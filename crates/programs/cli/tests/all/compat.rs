//! The program called as `nbdcopy`, `nbdinfo` and `nbdkit`: what scripts read, and the originals'
//! lists.

use std::fs;
use std::io::{BufRead as _, BufReader};
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use blockhaul_testkit::require_peer;
use blockhaul_testkit::tools::{self, PeerServer, ScratchDir, text};

const LIMIT: Duration = Duration::from_secs(120);
const OURS: &str = env!("CARGO_BIN_EXE_blockhaul");

/// A directory with the programs by their names.
struct Place {
    scratch: ScratchDir,
}

impl Place {
    fn new() -> Place {
        let scratch = ScratchDir::new().unwrap();
        for name in ["nbdcopy", "nbddiscard", "nbddump", "nbdinfo", "nbdkit", "nbdzero"] {
            std::os::unix::fs::symlink(OURS, scratch.file(name)).unwrap();
        }
        Place { scratch }
    }

    fn file(&self, name: &str) -> PathBuf {
        self.scratch.file(name)
    }

    /// A command in this folder, its words separated by blanks.
    fn command(&self, line: &str) -> Command {
        let mut words = line.split_whitespace();
        let mut command = Command::new(self.file(words.next().unwrap()));
        command.args(words).current_dir(self.scratch.path()).stdin(Stdio::null());
        command
    }

    fn run(&self, line: &str) -> Output {
        tools::output(&mut self.command(line), LIMIT).unwrap()
    }

    fn succeed(&self, line: &str) -> Output {
        let output = self.run(line);
        assert!(output.status.success(), "{line}: {output:?}");
        output
    }

    /// A shell's command in this folder, with the programs first in the search path.
    fn shell(&self, script: &str) -> Output {
        let path = format!("{}:{}", self.scratch.path().display(), std::env::var("PATH").unwrap());
        let mut command = Command::new("sh");
        command.args(["-c", script]).env("PATH", path).current_dir(self.scratch.path());
        tools::output(&mut command, LIMIT).unwrap()
    }

    /// A file of 8 MiB and a bit with some data in it.
    fn disk(&self, name: &str) -> Vec<u8> {
        let mut bytes = vec![0; (8 << 20) + 512];
        for (index, at) in (0..bytes.len()).step_by(300_001).enumerate() {
            bytes[at] = index as u8 + 1;
        }
        let file = fs::File::create(self.file(name)).unwrap();
        file.set_len(bytes.len() as u64).unwrap();
        for at in (0..bytes.len()).step_by(300_001) {
            file.write_all_at(&bytes[at..at + 1], at as u64).unwrap();
        }
        bytes
    }
}

/// The options of the programs of libnbd 1.24.4, in order.
const LIBNBD_1_24: &[(&str, &str)] = &[
    (
        "nbdcopy",
        "-C -R -S -T -V -p -v --allocated --blkhash --blkhash-file --connections --destination-is-zero --flush --help \
         --no-extents --progress --queue-size --request-size --requests --sparse --synchronous --target-is-zero \
         --threads --verbose --version",
    ),
    (
        "nbddiscard",
        "-V -c -h -l -o -q -v -y -z --check --fast-zero --help --length --offset --quiet --verbose --version --yes \
         --zero",
    ),
    (
        "nbddump",
        "-V -n -o --color --colors --colour --colours --help --length --limit --no-color --no-colors --no-colour \
         --no-colours --offset --skip --version",
    ),
    (
        "nbdinfo",
        "-L -V --can --can-not --cannot --cant --color --colors --colour --colours --content --has --has-not --hasnot \
         --hasnt --have --have-not --havenot --havent --help --is --is-not --isnot --isnt --json --list --map \
         --no-color --no-colors --no-colour --no-colours --no-content --size --total --totals --uri --version",
    ),
];

fn sorted_lines(bytes: &[u8]) -> Vec<String> {
    let mut lines: Vec<String> = text(bytes).lines().map(str::to_owned).collect();
    lines.sort();
    lines
}

#[test]
fn the_lists_and_the_version_are_those_of_libnbd() {
    let place = Place::new();
    for (name, options) in LIBNBD_1_24 {
        let options: Vec<&str> = options.split_whitespace().collect();
        let first_long = options.iter().position(|option| option.starts_with("--")).unwrap();
        let (short, long) = options.split_at(first_long);
        for (list, expected) in [("--short-options", short), ("--long-options", long)] {
            let ours = place.succeed(&format!("{name} {list}"));
            assert_eq!(sorted_lines(&ours.stdout), expected, "{name} {list}");
        }
        let version = text(&place.succeed(&format!("{name} --version")).stdout);
        assert!(version.starts_with(&format!("{name} 1.24.4\n")), "{version}");
    }
}

#[test]
fn the_options_of_the_installed_libnbd_are_known() {
    let place = Place::new();
    for name in ["nbdcopy", "nbddump", "nbdinfo"] {
        let original = require_peer!(name);
        for option in ["--short-options", "--long-options"] {
            let theirs = tools::output(original.command().arg(option), LIMIT).unwrap();
            let ours = sorted_lines(&place.succeed(&format!("{name} {option}")).stdout);
            let missing = sorted_lines(&theirs.stdout).into_iter().find(|one| !ours.contains(one));
            assert_eq!(missing, None, "{name} {option}");
        }
        let theirs = tools::output(original.command().arg("--version"), LIMIT).unwrap();
        let words = |bytes: &[u8]| -> Vec<String> {
            text(bytes)
                .lines()
                .filter_map(|line| Some(line.split_once(' ')?.0.to_owned()))
                .collect()
        };
        let ours = place.succeed(&format!("{name} --version"));
        assert_eq!(words(&ours.stdout), words(&theirs.stdout), "{name}");
    }
}

#[test]
fn the_blkhash_is_that_of_libnbd() {
    let place = Place::new();
    let bytes: Vec<u8> = (0..1_000_000_u32).map(|number| (number % 251) as u8).collect();
    fs::write(place.file("data"), &bytes).unwrap();
    fs::File::options().append(true).open(place.file("data")).unwrap().set_len(3_000_000).unwrap();
    // The output of nbdcopy 1.24.4.
    let hash = "3eba91bf3d5838e101dbe7d0ccb9e39f21bcb42594e860a9c43729a613a8156a\n";
    assert_eq!(text(&place.succeed("nbdcopy --blkhash data null:").stdout), hash);
    assert_eq!(text(&place.succeed("nbdcopy --blkhash=sha256/64k data copy").stdout), hash);
    let done = place.succeed("nbdcopy --blkhash --blkhash-file=hash data copy");
    assert!(done.stdout.is_empty());
    assert_eq!(fs::read_to_string(place.file("hash")).unwrap(), hash);
    assert_eq!(text(&place.shell("nbdcopy --blkhash - null: < data").stdout), hash);
    assert!(text(&place.shell("nbdcopy --blkhash data - | tail -c 65").stdout) == hash);
    let refused = place.run("nbdcopy --blkhash=md5 data null:");
    assert!(text(&refused.stderr).contains("only sha256/64k"), "{refused:?}");
    let refused = place.shell("cat data | nbdcopy --blkhash - - | cat");
    assert!(text(&refused.stderr).contains("from a pipe to a pipe"), "{}", text(&refused.stderr));
}

#[test]
fn parts_of_disks_are_discarded_zeroed_and_checked() {
    let place = Place::new();
    let bytes = place.disk("disk");
    let size = bytes.len();
    let socket = place.scratch.socket("served");
    let args = [place.file("disk").display().to_string()];
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    let server = PeerServer::blockhaul(OURS.as_ref(), &socket, &args).unwrap();
    let uri = server.uri("");
    let said = place.run(&format!("nbdzero --check {uri}"));
    assert_eq!(said.status.code(), Some(1));
    assert!(text(&said.stderr).contains("image has data at offset 0"), "{said:?}");
    // Without an answer nothing happens.
    let said = place.run(&format!("nbdzero {uri}"));
    let asked = format!("PERMANENTLY ERASE everything on {uri} bytes 0 - {} (y/N)? ", size - 1);
    assert_eq!((said.status.code(), text(&said.stdout)), (Some(1), asked));
    assert!(text(&said.stderr).contains("operation cancelled"), "{said:?}");
    assert_eq!(fs::read(place.file("disk")).unwrap(), bytes);
    assert!(place.shell(&format!("echo y | nbdzero -o 1M -l 1M '{uri}'")).status.success());
    let mut expected = bytes.clone();
    expected[1 << 20..2 << 20].fill(0);
    assert!(fs::read(place.file("disk")).unwrap() == expected);
    place.succeed(&format!("nbdzero -c -o 1M -l 1048576 {uri}"));
    let said = place.succeed(&format!("nbdzero -y -o 8M -l 1M {uri}"));
    assert_eq!(text(&said.stdout), "warning: offset + length is beyond the end of the disk\n");
    assert!(place.succeed(&format!("nbdzero -y -q -o 9M {uri}")).stdout.is_empty());
    place.succeed(&format!("nbddiscard -y {uri}"));
    place.succeed(&format!("nbddiscard -c {uri}"));
    assert!(fs::read(place.file("disk")).unwrap() == vec![0; size]);
    drop(server);
    let args = ["-r", args[0]];
    let server = PeerServer::blockhaul(OURS.as_ref(), &socket, &args).unwrap();
    assert_eq!(place.run(&format!("nbddiscard -y {}", server.uri(""))).status.code(), Some(1));
}

#[test]
fn files_are_copied_with_options_anywhere() {
    let place = Place::new();
    let bytes = place.disk("disk");
    place.succeed("nbdcopy disk --request-size=64k copy -C 2 --flush -S0");
    assert_eq!(fs::read(place.file("copy")).unwrap(), bytes);
    // What looks like a device of blockhaul's is a path to nbdcopy.
    place.succeed("nbdcopy -- disk memory:1m");
    assert_eq!(fs::read(place.file("memory:1m")).unwrap(), bytes);
    place.succeed("nbdcopy memory:1m back");
    assert_eq!(fs::read(place.file("back")).unwrap(), bytes);
    assert!(fs::metadata(place.file("back")).unwrap().blocks() * 512 < bytes.len() as u64 / 2);
    place.succeed("nbdcopy disk --allocated --target-is-zero full");
    assert!(fs::metadata(place.file("full")).unwrap().blocks() * 512 >= bytes.len() as u64);
    place.succeed("nbdcopy disk null:");
    assert!(!place.file("null:").exists());
    let mut command = Command::new(OURS);
    command.args(["compat", "nbdcopy", "disk", "third"]).current_dir(place.scratch.path());
    assert!(tools::output(&mut command, LIMIT).unwrap().status.success());
    assert_eq!(fs::read(place.file("third")).unwrap(), bytes);
}

#[test]
fn pipes_are_copied_in_both_directions() {
    let place = Place::new();
    let bytes = place.disk("disk");
    let cases = [
        "cat disk | nbdcopy - out",
        "nbdcopy disk - > out",
        "nbdcopy - out < disk",
        "cat disk | nbdcopy - - > out",
        "mkfifo in; cat disk > in & nbdcopy in out",
        "mkfifo to; cat to > out & nbdcopy disk to; wait",
    ];
    for script in cases {
        let _ = fs::remove_file(place.file("out"));
        let output = place.shell(script);
        assert!(output.status.success(), "{script}: {output:?}");
        assert!(fs::read(place.file("out")).unwrap() == bytes, "{script}");
    }
    for script in
        ["cat disk | nbdcopy - null:", "nbdcopy /dev/null null:", "nbdcopy disk /dev/null"]
    {
        let output = place.shell(script);
        assert!(output.status.success(), "{script}: {output:?}");
    }
}

#[test]
fn progress_on_a_descriptor_runs_from_0_to_100() {
    let place = Place::new();
    place.disk("disk");
    let output = place.shell("exec 3>progress; nbdcopy --progress=3 disk copy");
    assert!(output.status.success(), "{output:?}");
    assert!(output.stderr.is_empty(), "{output:?}");
    let lines = fs::read_to_string(place.file("progress")).unwrap();
    let lines: Vec<&str> = lines.lines().collect();
    assert_eq!((lines.first(), lines.last()), (Some(&"0/100"), Some(&"100/100")), "{lines:?}");
    assert!(lines.iter().all(|line| line.ends_with("/100")), "{lines:?}");
    let output = place.shell("nbdcopy -p disk copy");
    assert!(text(&output.stderr).contains("100%"), "{output:?}");
}

#[test]
fn verbose_tells_of_both_sides() {
    let place = Place::new();
    place.disk("disk");
    let said = text(&place.succeed("nbdcopy -v -- [ blockhaul serve -f memory:1M ] null:").stderr);
    for line in [
        "nbdcopy: src: nbd_ops \"blockhaul\"",
        "nbdcopy: src: size=1048576 (1M), preferred block size=",
        "nbdcopy: dst: null_ops \"null:\"",
        "nbdcopy: dst: size=9223372036854775807 (9223372036854775807), preferred block size=4096",
        "nbdcopy: connections=4 requests=64 threads=4 synchronous=false",
    ] {
        assert!(said.lines().any(|told| told.starts_with(line)), "{line} in {said}");
    }
    let said = text(&place.succeed("nbdcopy -v -C 2 disk -").stderr);
    for line in [
        "nbdcopy: src: file_ops \"disk\"\n",
        "nbdcopy: src: size=8389120 (8389120), preferred",
        "nbdcopy: dst: pipe_ops \"-\"\n",
        "nbdcopy: dst: size=-1 (18446744073709551615), preferred",
        "nbdcopy: connections=1 requests=64 threads=1 synchronous=true\n",
    ] {
        assert!(said.contains(line), "{line} in {said}");
    }
}

#[test]
fn failures_end_with_1_and_the_programs_name() {
    let place = Place::new();
    place.disk("disk");
    let cases = [
        "nbdcopy",
        "nbdcopy disk",
        "nbdcopy disk a b",
        "nbdcopy --what disk a",
        "nbdcopy -C 0 disk a",
        "nbdcopy [ false ] a",
        "nbdcopy no-such a",
        "nbdcopy null: a",
        "nbdcopy disk nbd+unix:///?socket=/no/such",
        "nbdcopy disk disk",
        "nbdcopy disk [ blockhaul serve -f memory:1M ]",
        "nbdinfo",
        "nbdinfo disk",
        "nbdinfo --list --map nbd://localhost",
        "nbdinfo nbd+unix:///?socket=/no/such",
    ];
    for line in cases {
        let output = place.run(line);
        assert_eq!(output.status.code(), Some(1), "{line}: {output:?}");
        let (name, _) = line.split_once(' ').unwrap_or((line, ""));
        let said = text(&output.stderr);
        let own = |told: &str| told.starts_with(&format!("{name}: "));
        assert!(said.lines().any(own), "{line}: {said}");
        assert!(output.stdout.is_empty(), "{line}: {output:?}");
        assert!(!said.contains("panicked"), "{line}: {said}");
    }
    // Nothing was made on the way.
    assert!(!place.file("a").exists());
}

#[test]
fn a_missing_filter_is_named_and_not_the_plugin_below_it() {
    let place = Place::new();
    place.disk("disk");
    let output = place.run("nbdkit --filter=nosuch file disk");
    let said = text(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("nbdkit-nosuch-filter.so"), "{said}");
    assert!(!said.contains("no plugin file"), "{said}");
}

/// What virt-v2v asks nbdkit before it uses it.
#[test]
fn programs_that_probe_nbdkit_find_what_they_need() {
    let place = Place::new();
    let version = text(&place.succeed("nbdkit --version").stdout);
    let number = version.trim().strip_prefix("nbdkit ").unwrap();
    let config = text(&place.succeed("nbdkit --dump-config").stdout);
    assert!(config.lines().any(|line| line == format!("version={number}")), "{config}");
    let options = text(&place.succeed("nbdkit --long-options").stdout);
    assert!(options.lines().any(|option| option == "--name"), "{options}");
    for (line, wanted) in [
        ("nbdkit file --version", "file"),
        ("nbdkit null --filter=cow --version", "cow"),
        ("nbdkit --version --filter=blocksize --filter=retry memory maxlen=4k", "blocksize"),
    ] {
        let said = text(&place.succeed(line).stdout);
        assert!(said.lines().any(|line| line == format!("{wanted} {number}")), "{line}: {said}");
    }
    let help = text(&place.succeed("nbdkit file --help").stdout);
    for parameter in ["reduce-memory-pressure=", "cache=", "[file=]", "dir="] {
        assert!(help.lines().any(|line| line.starts_with(parameter)), "{parameter}: {help}");
    }
    let help = text(&place.succeed("nbdkit --filter=delay null --help").stdout);
    assert!(help.lines().any(|line| line.starts_with("delay-read=<")), "{help}");
}

/// Its command lines, and what else is new since 1.42.
#[test]
fn command_lines_of_newer_releases_are_accepted() {
    let place = Place::new();
    fs::create_dir(place.file("disks")).unwrap();
    for disk in ["disks/disk0", "disks/disk1"] {
        fs::write(place.file(disk), vec![1; 3 << 20]).unwrap();
    }
    let lines = [
        (
            "nbdkit --name in --exit-with-parent --foreground --pidfile P --threads 16 \
             -D nbdkit.backend.datapath=0 --filter cow file dir=disks reduce-memory-pressure=on",
            "/disk1",
            "3145728",
        ),
        ("nbdkit file disks/disk0 cache=none", "/", "3145728"),
        ("nbdkit --tls-priority=NORMAL --log=default memory 0x10_0000", "/", "1048576"),
        ("nbdkit --filter=offset memory 1_M @./parameters", "/", "4096"),
        ("nbdkit --filter=delay null 64k wdelay=1ms", "/", "65536"),
        (
            "nbdkit --filter=error --filter=exportname null 1M exportname=a exportname=b",
            "/",
            "1048576",
        ),
        ("nbdkit --filter=pause null 1M pause-control=control", "/", "1048576"),
    ];
    fs::write(place.file("parameters"), "# of the filter\noffset=64k\n\nrange=0x1000\n").unwrap();
    for (line, path, size) in lines {
        let script =
            format!("{line} -U - --run 'nbdinfo --size \"nbd+unix://{path}?socket=$unixsocket\"'");
        let output = place.shell(&script);
        assert_eq!(text(&output.stdout).trim(), size, "{line}: {output:?}");
    }
}

#[test]
fn overlays_of_two_exports_do_not_mix() {
    let place = Place::new();
    fs::create_dir(place.file("disks")).unwrap();
    for (disk, byte) in [("disks/disk0", b'a'), ("disks/disk1", b'b')] {
        fs::write(place.file(disk), vec![byte; 1 << 20]).unwrap();
    }
    for (name, byte) in [("in0", b'0'), ("in1", b'1')] {
        let mut bytes = vec![b'a'; 1 << 20];
        bytes[70_001..200_003].fill(byte);
        fs::write(place.file(name), bytes).unwrap();
    }
    let output = place.shell(
        "nbdkit --filter=cow file dir=disks -U - --run '
         disk() { echo \"nbd+unix:///disk$1?socket=$unixsocket\"; }
         for n in 0 1; do nbdcopy in$n $(disk $n) || exit 1; done
         for n in 0 1; do nbdcopy $(disk $n) out$n || exit 1; done'",
    );
    assert!(output.status.success(), "{output:?}");
    for n in 0..2 {
        let (given, got) = (place.file(&format!("in{n}")), place.file(&format!("out{n}")));
        assert!(fs::read(given).unwrap() == fs::read(got).unwrap(), "disk{n}");
    }
    assert!(fs::read(place.file("disks/disk1")).unwrap().iter().all(|byte| *byte == b'b'));
}

#[test]
fn messages_have_the_servers_name_and_go_to_its_file() {
    let place = Place::new();
    fs::write(place.file("log"), "before\n").unwrap();
    let log = place.file("log");
    let script = format!(
        "nbdkit --name=in --log={} --filter=error memory 1M error-rate=100% \
         --run 'nbdcopy \"$uri\" null:'",
        log.display()
    );
    let output = place.shell(&script);
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    let said = fs::read_to_string(&log).unwrap();
    let (first, rest) = said.split_once('\n').unwrap();
    assert_eq!(first, "before");
    assert!(rest.lines().all(|line| line.starts_with("nbdkit[in]: ")), "{said}");
    assert!(
        rest.contains("nbdkit[in]: error: ") || rest.contains("nbdkit[in]: warning: "),
        "{said}"
    );
    let output = place.run("nbdkit --log=/no/such/folder/log null");
    assert_eq!(output.status.code(), Some(1));
    let output = place.run("nbdkit --name=in nosuch");
    assert!(text(&output.stderr).starts_with("nbdkit[in]: error: "), "{output:?}");
}

#[test]
fn what_only_a_missing_plugin_could_do_is_said_of_its_parameters() {
    if std::path::Path::new("/usr/lib/x86_64-linux-gnu/nbdkit").exists() {
        return;
    }
    let place = Place::new();
    let output = place.run("nbdkit memory 1M allocator=zstd");
    let said = text(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("does not take these parameters"), "{said}");
    let output = place.run("nbdkit file dir=/no/such/folder");
    let said = text(&output.stderr);
    assert!(said.contains("/no/such/folder") && !said.contains("no plugin file"), "{said}");
}

#[test]
fn an_export_may_be_copied_onto_itself() {
    let place = Place::new();
    let before = place.disk("disk");
    let output = place.shell(&format!("{OURS} serve disk --run 'nbdcopy \"$uri\" \"$uri\"'"));
    assert!(output.status.success(), "{output:?}");
    assert!(fs::read(place.file("disk")).unwrap() == before);
}

#[test]
fn nbdinfo_answers_as_info_does() {
    let place = Place::new();
    let served = "[ blockhaul serve -f -r memory:1M ]";
    let output = place.succeed(&format!("nbdinfo --size -- {served}"));
    assert_eq!(text(&output.stdout), "1048576\n");
    let output = place.succeed(&format!("nbdinfo {served} --map --tot"));
    assert_eq!(text(&output.stdout), "   1048576 100.0%   3 hole,zero\n");
    assert_eq!(place.run(&format!("nbdinfo --can write {served}")).status.code(), Some(2));
    assert_eq!(place.run(&format!("nbdinfo --cannot write {served}")).status.code(), Some(0));
    let own = tools::output(
        Command::new(OURS).args(["info", "--json", "--no-content"]).args(served.split(' ')),
        LIMIT,
    );
    let compat = place.succeed(&format!("nbdinfo --js --content --no-content {served}"));
    assert_eq!(text(&compat.stdout), text(&own.unwrap().stdout));
    assert!(!compat.stdout.is_empty());
}

#[test]
fn help_is_printed_for_who_asks() {
    let place = Place::new();
    for name in ["nbdcopy", "nbddump", "nbdinfo"] {
        let output = place.succeed(&format!("{name} --help"));
        let help = text(&output.stdout);
        assert!(help.contains(name) && output.stderr.is_empty(), "{help}");
        // Every long option is listed, or an equivalent one.
        if name == "nbdcopy" {
            let listed = text(&place.succeed("nbdcopy --long-options").stdout);
            for option in listed.lines().filter(|option| *option != "--help") {
                assert!(help.contains(option), "{option}");
            }
        }
    }
    // A reader that leaves early is not a failure.
    let mut child = place.command("nbdcopy --help").stdout(Stdio::piped()).spawn().unwrap();
    drop(child.stdout.take());
    assert!(child.wait().unwrap().success());
}

#[test]
fn a_signal_shows_in_the_exit_status() {
    let place = Place::new();
    // A source that never ends by itself.
    let mut command = place.command("nbdcopy - null:");
    let mut child = command.stdin(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let pid = rustix::process::Pid::from_child(&child);
    // Until it handles the signal, that would end it at once.
    let handles_it = || {
        let status = fs::read_to_string(format!("/proc/{}/status", child.id())).unwrap();
        let caught = status.lines().find_map(|line| line.strip_prefix("SigCgt:")).unwrap();
        u64::from_str_radix(caught.trim(), 16).unwrap() & (1 << 14) != 0
    };
    tools::until("it handles the signal", handles_it);
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    // Its input ends only after it has handled the signal, or it would be complete.
    let said = BufReader::new(child.stderr.take().unwrap()).lines();
    let mut said = said.map(|line| line.unwrap());
    assert!(said.any(|line| line.contains("stopping")), "it ended without a word");
    drop(child.stdin.take());
    assert_eq!(child.wait().unwrap().code(), Some(128 + 15));
}
