//! The program as `qemu-nbd`, next to QEMU's, with QEMU's and libnbd's clients.

use std::fs;
use std::io::{Read as _, Write as _};
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use blockhaul_testkit::tools::{self, PeerProgram, PeerServer, ScratchDir, text};

const OURS: &str = env!("CARGO_BIN_EXE_blockhaul");
const LIMIT: Duration = Duration::from_secs(60);

struct Tools {
    img: PeerProgram,
    io: PeerProgram,
    info: PeerProgram,
    nbd: PeerProgram,
    scratch: ScratchDir,
}

/// Whose server.
#[derive(Clone, Copy, Debug)]
enum Who {
    Ours,
    Theirs,
}
use Who::{Ours, Theirs};

impl Tools {
    fn find() -> Option<Tools> {
        Some(Tools {
            img: PeerProgram::require("qemu-img")?,
            io: PeerProgram::require("qemu-io")?,
            info: PeerProgram::require("nbdinfo")?,
            nbd: PeerProgram::require("qemu-nbd")?,
            scratch: ScratchDir::new().unwrap(),
        })
    }

    fn output(&self, mut command: Command, line: &str) -> Output {
        let words = line.split_whitespace();
        tools::output(command.args(words).current_dir(self.scratch.path()), LIMIT).unwrap()
    }

    fn img(&self, line: &str) -> String {
        let done = self.output(self.img.command(), line);
        assert!(done.status.success(), "{line}: {}{}", text(&done.stdout), text(&done.stderr));
        text(&done.stdout)
    }

    fn info(&self, line: &str) -> Output {
        self.output(self.info.command(), line)
    }

    /// Runs commands of qemu-io, on an image or a server.
    fn io(&self, line: &str, commands: &[&str]) -> Output {
        let mut command = self.io.command();
        commands.iter().for_each(|one| {
            command.args(["-c", one]);
        });
        self.output(command, line)
    }

    fn wrote(&self, line: &str, commands: &[&str]) {
        let done = self.io(line, commands);
        let said = text(&done.stdout) + &text(&done.stderr);
        assert!(done.status.success() && !said.contains("failed"), "{line}: {said}");
    }

    fn command(&self, who: Who) -> Command {
        match who {
            Ours => {
                let mut command = Command::new(OURS);
                command.args(["compat", "qemu-nbd"]);
                command
            }
            Theirs => self.nbd.tied_command(),
        }
    }

    fn serve(&self, who: Who, line: &str) -> PeerServer {
        let socket = self.scratch.socket(&format!("{who:?}"));
        // That of the server before.
        let _ = fs::remove_file(&socket);
        let mut command = self.command(who);
        command.current_dir(self.scratch.path()).arg("-k").arg(&socket);
        command.args(line.split_whitespace());
        PeerServer::start(command, &socket).unwrap()
    }

    /// Images in both formats, each with a snapshot where the format has them.
    fn images(&self) {
        self.img("create -q -f raw a.raw 8M");
        self.wrote("-f raw a.raw", &["write -P 3 1M 64k", "write -P 5 7M 64k"]);
        self.img("create -q -f qcow2 a.qcow2 8M");
        self.wrote("a.qcow2", &["write -P 7 1M 128k", "write -z 4M 64k"]);
        self.img("snapshot -c first a.qcow2");
        self.wrote("a.qcow2", &["write -P 9 1M 64k", "write -P 11 2M 64k"]);
    }

    fn copies(&self, format: &str) {
        for who in [Ours, Theirs] {
            let name = self.scratch.file(&format!("{who:?}.{format}"));
            fs::copy(self.scratch.file(&format!("a.{format}")), name).unwrap();
        }
    }
}

/// Waits until a process ends by itself.
#[track_caller]
fn ends(server: &PeerServer) {
    let pid = server.pid().to_string();
    tools::until_ok(
        "it ends",
        || if tools::is_running(&pid) { Err(server.said()) } else { Ok(()) },
    );
}

#[test]
fn clients_read_and_write_the_same_as_with_qemu_nbd() {
    let Some(tools) = Tools::find() else { return };
    tools.images();
    for format in ["raw", "qcow2"] {
        for more in
            ["", "--cache=none --discard=unmap", "-o 1048576", "-n -e 3 -A", "--cache writethrough"]
        {
            tools.copies(format);
            for who in [Ours, Theirs] {
                let line = format!("-t -f {format} -x disk -D words {more} {who:?}.{format}");
                let server = tools.serve(who, &line);
                let uri = server.uri("disk");
                let listed = text(&tools.info(&format!("--list --json {}", server.uri(""))).stdout);
                for part in ["\"export-name\": \"disk\"", "\"description\": \"words\""] {
                    assert!(listed.contains(part), "{who:?} {line}: {listed}");
                }
                let size = if more == "-o 1048576" { 7 << 20 } else { 8 << 20 };
                let said = text(&tools.info(&format!("--size {uri}")).stdout);
                assert_eq!(said.trim(), size.to_string(), "{who:?} {line}");
                let said = tools.img(&format!("info --output=json {uri}"));
                assert!(said.contains(&format!("\"virtual-size\": {size}")), "{line}: {said}");
                tools.wrote(
                    &format!("-f raw {uri}"),
                    &[
                        "write -P 21 0 4k",
                        "write -P 22 3M 1M",
                        "write -z 3M 64k",
                        "write -z -u 1M 64k",
                        "discard 2M 64k",
                        "write -f -P 23 512 512",
                        "flush",
                        "read -P 23 512 512",
                        "read -P 0 3M 64k",
                        "read -P 22 3136k 960k",
                    ],
                );
                if more.is_empty() {
                    tools.img(&format!("compare -f raw -F {format} -U {uri} {who:?}.{format}"));
                }
                assert!(server.stop().unwrap().success(), "{who:?} {line}");
                if format == "qcow2" {
                    tools.img(&format!("check -q {who:?}.qcow2"));
                }
            }
            // What was discarded reads as before or as zeroes, as the server chooses.
            for who in [Ours, Theirs] {
                tools.wrote(&format!("-f {format} {who:?}.{format}"), &["write -z 2M 1088k"]);
            }
            tools.img(&format!("compare -f {format} -F {format} Ours.{format} Theirs.{format}"));
        }
    }
}

#[test]
fn read_only_disks_snapshots_and_temporary_writes() {
    let Some(tools) = Tools::find() else { return };
    tools.images();
    tools.img("convert -q -f qcow2 -O raw -l snapshot.name=first a.qcow2 first.raw");
    let before = fs::read(tools.scratch.file("a.qcow2")).unwrap();
    let lines = [
        ("-t -r -f qcow2 a.qcow2", "-f qcow2 a.qcow2", false),
        ("-t -r a.qcow2", "-f qcow2 a.qcow2", false),
        ("-t -l first -f qcow2 a.qcow2", "-f raw first.raw", false),
        ("-t -l snapshot.name=first a.qcow2", "-f raw first.raw", false),
        ("-t -s -f qcow2 a.qcow2", "-f qcow2 a.qcow2", true),
        (
            "-t -r --image-opts driver=qcow2,file.driver=file,file.filename=a.qcow2",
            "-f qcow2 a.qcow2",
            false,
        ),
    ];
    for (line, same, is_writable) in lines {
        for who in [Ours, Theirs] {
            let server = tools.serve(who, line);
            let uri = server.uri("");
            tools.img(&format!("compare -U {same} -F raw {uri}"));
            let status = tools.info(&format!("--is readonly {uri}")).status.code();
            assert_eq!(status, Some(if is_writable { 2 } else { 0 }), "{who:?} {line}");
            if is_writable {
                let commands = ["write -P 77 1M 64k", "read -P 77 1M 64k", "flush"];
                tools.wrote(&format!("-f raw {uri}"), &commands);
            } else {
                let done = tools.io(&format!("-f raw {uri}"), &["write -P 77 1M 64k"]);
                assert!(!done.status.success(), "{who:?} {line}: {}", text(&done.stdout));
            }
            drop(server);
        }
        assert!(fs::read(tools.scratch.file("a.qcow2")).unwrap() == before, "{line}");
    }
}

#[test]
fn a_server_ends_with_its_last_client_unless_it_is_persistent() {
    let Some(tools) = Tools::find() else { return };
    tools.images();
    for who in [Ours, Theirs] {
        let read = ["read -P 3 1M 4k"];
        let server = tools.serve(who, "-f raw a.raw");
        tools.wrote(&format!("-r -f raw {}", server.uri("")), &read);
        ends(&server);
        let server = tools.serve(who, "-t -f raw a.raw");
        for _ in 0..3 {
            tools.wrote(&format!("-r -f raw {}", server.uri("")), &read);
        }
        assert!(server.stop().unwrap().success());
    }
}

#[test]
fn further_clients_wait_for_the_one_before() {
    let Some(tools) = Tools::find() else { return };
    tools.images();
    for who in [Ours, Theirs] {
        let server = tools.serve(who, "-t -f raw a.raw");
        let uri = server.uri("");
        // The one client holds the disk until its input ends.
        let mut first = tools.io.tied_command();
        first.args(["-f", "raw", &uri]).stdin(Stdio::piped());
        let mut first = first.stdout(Stdio::piped()).spawn().unwrap();
        let mut out = first.stdout.take().unwrap();
        let mut seen = Vec::new();
        let mut input = first.stdin.take().unwrap();
        input.write_all(b"read -P 3 1M 4k\n").unwrap();
        while !text(&seen).contains("4 KiB") {
            let mut some = [0; 4096];
            let count = out.read(&mut some).unwrap();
            assert!(count > 0, "{who:?}: it ended: {}", text(&seen));
            seen.extend_from_slice(&some[..count]);
        }
        let mut second = tools.info.tied_command();
        second.args(["--size", &uri]).stdout(Stdio::piped());
        let mut second = second.spawn().unwrap();
        // It cannot end before; 200 ms are enough for one that is refused.
        let early = tools::wait_within(&mut second, Duration::from_millis(200));
        assert!(early.is_none(), "{who:?}: the second does not wait: {early:?}");
        drop(input);
        assert!(tools::wait_within(&mut first, LIMIT).unwrap().success());
        assert!(tools::wait_within(&mut second, LIMIT).unwrap().success(), "{who:?}");
        assert!(server.stop().unwrap().success());
    }
}

#[test]
fn a_server_goes_to_the_background_when_it_is_ready() {
    let Some(tools) = Tools::find() else { return };
    tools.images();
    let socket = tools.scratch.socket("fork");
    let line = format!("--fork --pid-file pid -f raw -k {} a.raw", socket.display());
    let done = tools.output(tools.command(Ours), &line);
    assert!(done.status.success(), "{}", text(&done.stderr));
    let pid = fs::read_to_string(tools.scratch.file("pid")).unwrap();
    let pid = pid.trim();
    assert!(tools::is_running(pid), "{pid}");
    let uri = format!("nbd+unix:///?socket={}", socket.display());
    tools.wrote(&format!("-f raw {uri}"), &["write -P 31 0 4k"]);
    // It was its last client.
    tools::until("it ends", || !tools::is_running(pid));
    assert_eq!(fs::read_to_string(tools.scratch.file("pid")).unwrap().trim(), pid, "it stays");
    tools.wrote("-f raw a.raw", &["read -P 31 0 4k"]);
    // What fails before it is ready fails here.
    let line = format!("--fork -f qcow2 -k {} a.raw", socket.display());
    let done = tools.output(tools.command(Ours), &line);
    assert_eq!(done.status.code(), Some(1), "{}", text(&done.stderr));
}

#[test]
fn exports_are_listed_as_by_qemu_nbd() {
    let Some(tools) = Tools::find() else { return };
    tools.images();
    tools.img("bitmap --add a.qcow2 far");
    tools.img("create -q -f qcow2 -b a.qcow2 -F qcow2 over.qcow2");
    for line in ["-t -r -f raw a.raw", "-t -e 2 -A -B far -f qcow2 -x disk -D words over.qcow2"] {
        for who in [Ours, Theirs] {
            let server = tools.serve(who, line);
            let [theirs, ours] = [Theirs, Ours].map(|who| {
                let mut command = tools.command(who);
                command.arg("-k").arg(server.socket());
                let done = tools.output(command, "-L");
                assert!(done.status.success(), "{line}: {}", text(&done.stderr));
                text(&done.stdout)
            });
            assert_eq!(ours, theirs, "{who:?} {line}");
            assert_eq!(line.contains("far"), ours.contains("qemu:dirty-bitmap:far"), "{ours}");
        }
    }
}

#[test]
fn only_what_is_asked_for_is_shown() {
    let Some(tools) = Tools::find() else { return };
    tools.images();
    for name in ["first", "a,b", "third"] {
        tools.img(&format!("bitmap --add --disable a.qcow2 {name}"));
    }
    for line in ["", "-A", "-B first", "-B a,b -B third -A", "-e 4 -B third"] {
        let [ours, theirs] = [Ours, Theirs].map(|who| {
            let server = tools.serve(who, &format!("-t -r -f qcow2 {line} a.qcow2"));
            let listed = text(&tools.info(&format!("--json {}", server.uri(""))).stdout);
            let mut lines: Vec<String> = listed
                .lines()
                .map(str::trim)
                .filter(|line| {
                    ["\"qemu:", "\"base:", "\"is_rotational"]
                        .iter()
                        .any(|one| line.starts_with(one))
                })
                .map(|line| line.trim_end_matches(',').to_string())
                .collect();
            lines.sort();
            lines
        });
        assert_eq!(ours, theirs, "{line}");
    }
}

#[test]
fn writes_of_zeroes_are_detected_as_by_qemu_nbd() {
    let Some(tools) = Tools::find() else { return };
    for more in
        ["--detect-zeroes=on", "--discard=unmap --detect-zeroes=unmap", "--detect-zeroes=off"]
    {
        let maps = [Ours, Theirs].map(|who| {
            tools.img(&format!("create -q -f qcow2 {who:?}.qcow2 4M"));
            let server = tools.serve(who, &format!("-t -f qcow2 {more} {who:?}.qcow2"));
            let commands = ["write -P 7 0 1M", "write -P 0 64k 128k", "write -P 0 2M 64k", "flush"];
            tools.wrote(&format!("-f raw {}", server.uri("")), &commands);
            assert!(server.stop().unwrap().success(), "{who:?} {more}");
            let map = tools.img(&format!("map --output=json {who:?}.qcow2"));
            let parsed: serde_json::Value = serde_json::from_str(&map).unwrap();
            // QEMU marks zeroes also where there is nothing.
            let runs = parsed.as_array().unwrap().iter().filter(|run| run["data"] == true);
            runs.map(|run| format!("{} {}", run["start"], run["length"])).collect::<Vec<_>>()
        });
        assert_eq!(maps[0], maps[1], "{more}");
    }
}

#[test]
fn raw_disks_have_the_depth_that_is_asked_for() {
    let Some(tools) = Tools::find() else { return };
    tools.images();
    for who in [Ours, Theirs] {
        let server = tools.serve(who, "-t -r -A -f raw a.raw");
        let uri = server.uri("");
        let done = tools.info(&format!("--map=qemu:allocation-depth --totals {uri}"));
        let said = text(&done.stdout);
        let words: Vec<&str> = said.split_whitespace().collect();
        assert_eq!(words, ["8388608", "100.0%", "1", "local"], "{who:?}: {}", text(&done.stderr));
        // Asked for together, both are told.
        let done = tools.output(
            Command::new(OURS),
            &format!("map --json {uri} --context base:allocation --context qemu:allocation-depth"),
        );
        assert!(text(&done.stdout).contains("hole,zero"), "{who:?}: {}", text(&done.stdout));
        drop(server);
        let server = tools.serve(who, "-t -r -f raw a.raw");
        let done = tools.info(&format!("--map=qemu:allocation-depth {}", server.uri("")));
        assert!(!done.status.success(), "{who:?}: only if it is asked for");
    }
}

#[test]
fn several_connections_are_offered_only_if_there_is_room() {
    let Some(tools) = Tools::find() else { return };
    let Some(copy) = PeerProgram::require("nbdcopy") else { return };
    tools.images();
    for (options, code) in [("-r", 2), ("-r -e 1", 2), ("-r -e 4", 0)] {
        for format in ["raw", "qcow2"] {
            for who in [Ours, Theirs] {
                let line = format!("-t {options} -f {format} a.{format}");
                let server = tools.serve(who, &line);
                let uri = server.uri("");
                let status = tools.info(&format!("--can multi-conn {uri}")).status.code();
                assert_eq!(status, Some(code), "{who:?} {line}");
                // It would wait for a connection of its own.
                let done = tools.output(copy.command(), &format!("{uri} null:"));
                assert!(done.status.success(), "{who:?} {line}: {}", text(&done.stderr));
            }
        }
    }
}

#[test]
fn raw_disks_are_shown_in_whole_sectors() {
    let Some(tools) = Tools::find() else { return };
    for name in ["Ours.raw", "Theirs.raw"] {
        fs::write(tools.scratch.file(name), [7; 1000]).unwrap();
    }
    for (options, guesses) in [("-f raw", false), ("", true), ("-r", false)] {
        let mut listed = Vec::new();
        for who in [Ours, Theirs] {
            let line = format!("-t {options} {who:?}.raw");
            let server = tools.serve(who, &line);
            let mut command = tools.command(Theirs);
            command.arg("-k").arg(server.socket());
            let said = text(&tools.output(command, "-L").stdout);
            // Other limits and flags differ.
            let lines = said.lines().map(str::trim);
            let known = |line: &&str| line.starts_with("size:") || line.starts_with("min block:");
            listed.push(lines.filter(known).collect::<Vec<_>>().join(" "));
            let uri = server.uri("");
            let mut commands = vec!["read -P 7 0 1000", "read -P 0 1000 24"];
            if !options.contains("-r") {
                commands.push("write -z 1000 24");
            }
            let readonly = if options.contains("-r") { "-r" } else { "" };
            tools.wrote(&format!("{readonly} -f raw {uri}"), &commands);
            assert_eq!(server.said().contains("probing guessed raw"), guesses, "{line}");
        }
        assert_eq!(listed[0], listed[1], "{options}");
        assert!(listed[0].contains("size:  1024"), "{}", listed[0]);
    }
}

#[test]
fn tls_has_the_credentials_of_qemu_nbd() {
    let Some(tools) = Tools::find() else { return };
    tools.images();
    let dir = tools.scratch.file("tls");
    for line in ["tls init tls", "tls init --psk alice tls/keys.psk"] {
        let done = tools.output(Command::new(OURS), line);
        assert!(done.status.success(), "{}", text(&done.stderr));
    }
    for kind in ["tls-creds-x509", "tls-creds-psk"] {
        let object = format!("--object {kind},id=t,dir={}", dir.display());
        let user = if kind.ends_with("psk") { ",username=alice" } else { "" };
        for who in [Ours, Theirs] {
            let line = format!("-t {object},endpoint=server --tls-creds t -f raw a.raw");
            let server = tools.serve(who, &line);
            let socket = server.socket().display();
            let client = format!("{object},endpoint=client{user}");
            for from in [Ours, Theirs] {
                let listed = |line: &str| {
                    tools.output(tools.command(from), &format!("-L -k {socket} {line}"))
                };
                let done = listed(&format!("{client} --tls-creds t --tls-hostname localhost"));
                let said = text(&done.stdout) + &text(&done.stderr);
                assert!(done.status.success() && said.contains("size:  8388608"), "{said}");
                // Not without TLS.
                assert_eq!(listed("").status.code(), Some(1), "{kind} {who:?} {from:?}");
            }
            let node = format!(
                "driver=raw,file.driver=nbd,file.path={socket},file.tls-creds=t,file.tls-hostname=localhost"
            );
            let mut command = Command::new(OURS);
            command.args(["compat", "qemu-img"]);
            let done = tools.output(command, &format!("info {client} --image-opts {node}"));
            assert!(text(&done.stdout).contains("8388608 bytes"), "{}", text(&done.stderr));
        }
    }
}

#[test]
fn what_is_wrong_or_not_supported_is_one_line() {
    let Some(tools) = Tools::find() else { return };
    tools.images();
    let refused = [
        ("-c /dev/nbd0 a.raw", "--connect is not supported"),
        ("-d /dev/nbd0", "--disconnect is not supported"),
        ("-L a.raw", "incompatible with a file name"),
        ("-L -k nowhere", "nowhere"),
        ("--object secret,id=s a.raw", "--object secret is not supported"),
        ("--tls-creds t a.raw", "No TLS credentials with id 't'"),
        ("--tls-authz t a.raw", "--tls-authz is not supported"),
        ("--trace x a.raw", "--trace is not supported"),
        ("--detect-zeroes unmap a.raw", "discard operation to unmap"),
        ("-k s -f qcow2 -r -B none a.qcow2", "no context"),
        ("-k s -f vhdx a.raw", "only read: add -r"),
        ("-f cow a.raw", "Unknown driver 'cow'"),
        ("-k s -l none a.qcow2", "none"),
        ("-k s -f raw -l first a.raw", "no internal snapshots"),
        ("-k s -e many a.raw", "Invalid shared device number"),
        ("-k s -p 1 a.raw", "-k excludes"),
        ("-k s -o 9M -f raw a.raw", "offset"),
        ("-k s -f qcow2 a.raw", "qcow2"),
        ("-k s missing", "Could not open 'missing'"),
        ("-k s -f raw a.raw a.qcow2", "give one FILE"),
        ("--what a.raw", "what"),
        ("--cache=some a.raw", "unknown mode 'some'"),
        ("", "give one FILE"),
    ];
    for (line, why) in refused {
        let done = tools.output(tools.command(Ours), line);
        let said = text(&done.stderr);
        assert_eq!(done.status.code(), Some(1), "{line}: {said}");
        assert!(said.contains(why) && said.starts_with("qemu-nbd: "), "{line}: {said}");
        assert_eq!(said.lines().count(), 1, "{line}: {said}");
        assert!(done.stdout.is_empty(), "{line}");
    }
    for line in ["--help", "--version"] {
        let done = tools.output(tools.command(Ours), line);
        assert!(done.status.success() && text(&done.stdout).contains("qemu-nbd"), "{line}");
    }
}
