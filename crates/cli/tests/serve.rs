//! `blockhaul serve` as a process: readiness, listeners, `--run`, socket activation, the stop.
#![allow(clippy::unwrap_used, reason = "a test that fails")]

use std::io::{BufRead as _, BufReader};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use testkit::tools::{self, Scratch, Server, text};

const LIMIT: Duration = Duration::from_secs(30);
const OURS: &str = env!("CARGO_BIN_EXE_blockhaul");

fn blockhaul(args: &[&str]) -> Output {
    tools::output(Command::new(OURS).args(args), LIMIT).unwrap()
}

fn pid(number: u32) -> Pid {
    Pid::from_raw(i32::try_from(number).unwrap()).unwrap()
}

#[track_caller]
fn assert_fails(args: &[&str], status: i32, words: &[&str]) {
    let output = blockhaul(args);
    let said = text(&output.stderr);
    assert_eq!(output.status.code(), Some(status), "{args:?}: {said}");
    assert_eq!(said.lines().count(), 1, "{args:?}: {said}");
    assert!(words.iter().all(|word| said.contains(word)), "{args:?}: {said}");
    assert!(!said.contains("panic"), "{said}");
}

#[test]
fn in_the_background_it_returns_when_ready_and_cleans_up_when_stopped() {
    let scratch = Scratch::new().unwrap();
    let (socket, pidfile) = (scratch.socket("s"), scratch.file("pid"));
    let uri = format!("nbd+unix:///disk?socket={}", socket.display());
    let (s, p) = (socket.to_str().unwrap(), pidfile.to_str().unwrap());
    let output = blockhaul(&["serve", "-U", s, "-P", p, "-e", "disk", "memory:64M"]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert_eq!(text(&blockhaul(&["info", "--size", &uri]).stdout), "67108864\n");
    let server = pid(std::fs::read_to_string(&pidfile).unwrap().trim().parse().unwrap());
    kill_process(server, Signal::TERM).unwrap();
    let begun = Instant::now();
    while socket.exists() {
        assert!(begun.elapsed() < LIMIT, "the socket is there still");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn in_the_background_a_failure_is_told_before_it_returns() {
    let scratch = Scratch::new().unwrap();
    let socket = scratch.socket("s");
    assert_fails(
        &["serve", "-U", socket.to_str().unwrap(), "/no/such/file"],
        3,
        &["/no/such/file"],
    );
    assert!(!socket.exists());
}

#[test]
fn run_has_variables_and_hands_its_status_through() {
    let script = format!("{OURS} info --size \"$uri\"; test -S \"$unixsocket\" || exit 1; exit 7");
    let output = blockhaul(&["serve", "--run", &script, "memory:1M"]);
    assert_eq!(output.status.code(), Some(7), "{}", text(&output.stderr));
    assert_eq!(text(&output.stdout), "1048576\n");
    let echo = "echo \"$uri|$nbd|$exportname|$port\"; kill -KILL $$";
    let output = blockhaul(&[
        "serve",
        "-i",
        "127.0.0.1",
        "-p",
        "0",
        "-e",
        "a b",
        "memory:1M",
        "--run",
        echo,
    ]);
    assert_eq!(output.status.code(), Some(137), "{}", text(&output.stderr));
    let said = text(&output.stdout);
    let mut lines = said.lines();
    let port: u16 = lines.next().unwrap().parse().unwrap();
    let uri = format!("nbd://127.0.0.1:{port}/a%20b");
    assert_eq!(lines.next().unwrap(), format!("{uri}|{uri}|a b|{port}"));
}

#[test]
fn a_private_socket_is_removed() {
    let output = blockhaul(&["serve", "-U", "-", "--run", "echo $unixsocket", "memory:1M"]);
    let said = text(&output.stdout);
    let socket = Path::new(said.trim());
    assert!(socket.is_absolute() && !socket.exists(), "{said}");
    assert!(!socket.parent().unwrap().exists(), "{said}");
}

/// A shell's script in a folder; `$0` is the program.
fn script(scratch: &Scratch, text: &str) -> Output {
    let mut command = Command::new("sh");
    command.args(["-c", text, OURS]).current_dir(scratch.path()).stdin(Stdio::null());
    tools::output(&mut command, LIMIT).unwrap()
}

#[test]
fn what_is_handed_over_open_is_served() {
    let scratch = Scratch::new().unwrap();
    let done = |text: &str| {
        let output = script(&scratch, text);
        assert!(output.status.success(), "{text}: {output:?}");
        output
    };
    // The file is gone: its descriptor is all there is. It comes along to the background as well.
    done(
        "printf 01234567 >disk; exec 5<>disk 6<disk; rm disk
        \"$0\" serve -U own --pidfile pid 'file:?fd=5'
        printf abcdefgh | \"$0\" copy - 'nbd+unix:///?socket=own'
        kill $(cat pid)
        test \"$(cat <&6)\" = abcdefgh
        \"$0\" serve --run '\"$0\" info \"$uri\" || exit 1' -U - -r 'file:?fd=5' >/dev/null
        \"$0\" copy 'file:?fd=5' new && test \"$(cat new)\" = abcdefgh",
    );
    // Called as nbdkit, for each client and without nbdkit's plugin.
    std::os::unix::fs::symlink(OURS, scratch.file("nbdkit")).unwrap();
    let output = done(
        "printf 01234567 >disk; exec 5<disk
        ./nbdkit -U - file fd=5 --run '\"'\"$0\"'\" info --json \"$uri\"'",
    );
    let said = text(&output.stdout);
    assert!(said.contains("\"export-size\": 8,"), "{said}");
    assert!(said.contains("\"is_read_only\": true"), "{said}");
    let output = done(
        "mkdir images; printf 012 >images/a; exec 5<images
        \"$0\" serve -U - 'dir:?dirfd=5' --run '\"'\"$0\"'\" info --list \"$uri\"'",
    );
    assert!(text(&output.stdout).contains("export=\"a\":"), "{output:?}");
    // As nbdkit, with links as its plugin has them; by its path as well.
    let output = done(
        "printf 01234 >elsewhere; ln -s ../elsewhere images/link; mkdir images/sub; exec 5<images
        for what in dirfd=5 dir=images; do ./nbdkit -U - -e link file $what --run '
            \"'\"$0\"'\" info --list \"nbd+unix:///?socket=$unixsocket\"
            \"'\"$0\"'\" info --size \"nbd+unix:///link?socket=$unixsocket\"
            ! \"'\"$0\"'\" info --size \"nbd+unix:///sub?socket=$unixsocket\"'; done",
    );
    let said = text(&output.stdout);
    for export in ["export=\"a\":", "export=\"link\":", "\n5\n"] {
        assert_eq!(said.matches(export).count(), 2, "{export}: {said}");
    }
    assert!(!said.contains("sub"), "{said}");
    let output = done(
        "\"$0\" serve -U - dir:images --run '\"'\"$0\"'\" info --list \"$uri\"'; rm images/link",
    );
    assert!(!text(&output.stdout).contains("link"), "not without links=on: {output:?}");

    let wrong = [
        ("\"$0\" serve -f -U - 'file:?fd=9'", 3, "not started with such a descriptor"),
        ("\"$0\" serve -f -U - 'file:?fd=1'", 2, "3 or more"),
        ("\"$0\" serve -f -U - 'file:?fd=x'", 2, "fd"),
        ("exec 4>&1; true | \"$0\" serve -f -U - 'file:?fd=5' 5<&0", 2, "is a pipe"),
        ("exec 5<images/a; \"$0\" copy memory:1M 'file:?fd=5'", 3, "open for reading only"),
        ("exec 5<>images/a; \"$0\" copy images/a 'file:?fd=5'", 2, "are the same"),
        ("exec 5<images/a; \"$0\" serve -f -U - 'dir:?dirfd=5'", 2, "is no folder"),
    ];
    for (line, status, part) in wrong {
        let output = script(&scratch, line);
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(status), "{line}: {said}");
        assert!(said.contains(part), "{line}: {said}");
    }
    assert_eq!(std::fs::read(scratch.file("images/a")).unwrap(), b"012");
}

fn start(scratch: &Scratch, args: &[&str]) -> Server {
    let socket = scratch.socket("own");
    let mut command = Command::new(OURS);
    command.args(["serve", "--foreground", "--exit-with-parent", "--unix"]).arg(&socket).args(args);
    Server::start(command, &socket).unwrap()
}

#[test]
fn it_stops_within_a_second_with_idle_and_half_connected_clients() {
    for signal in [Signal::TERM, Signal::INT] {
        let scratch = Scratch::new().unwrap();
        let server = start(&scratch, &["memory:1M"]);
        let silent = UnixStream::connect(server.socket()).unwrap();
        let mut client =
            Command::new(OURS).args(["serve", "-f", "-U", "-", &server.uri("")]).spawn().unwrap();
        std::thread::sleep(Duration::from_millis(300));
        let begun = Instant::now();
        kill_process(pid(server.pid()), signal).unwrap();
        while server.socket().exists() {
            assert!(begun.elapsed() < Duration::from_secs(1), "{signal:?}");
            std::thread::sleep(Duration::from_millis(2));
        }
        assert!(server.stop().unwrap().success());
        kill_process(pid(client.id()), Signal::TERM).unwrap();
        assert!(client.wait().unwrap().success());
        drop(silent);
    }
}

#[test]
fn a_command_that_runs_is_stopped_with_the_server() {
    let mut server = Command::new(OURS)
        .args(["serve", "memory:1M", "--run", "echo ready; exec sleep 60"])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut line = String::new();
    BufReader::new(server.stdout.take().unwrap()).read_line(&mut line).unwrap();
    let begun = Instant::now();
    kill_process(pid(server.id()), Signal::TERM).unwrap();
    assert_eq!(server.wait().unwrap().code(), Some(143));
    assert!(begun.elapsed() < Duration::from_secs(5));
}

#[test]
fn sockets_of_the_service_manager_are_taken_over() {
    let scratch = Scratch::new().unwrap();
    let socket = scratch.socket("s");
    let listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
    let activate = "exec 3<&0 </dev/null; LISTEN_PID=$$ LISTEN_FDS=1; export LISTEN_PID LISTEN_FDS; \
                    exec \"$@\"";
    let mut server: Child = Command::new("/bin/sh")
        .args(["-c", activate, "sh", OURS, "serve", "--exit-with-parent", "pattern:1M"])
        .stdin(Stdio::from(std::os::fd::OwnedFd::from(listener)))
        .spawn()
        .unwrap();
    let uri = format!("nbd+unix:///?socket={}", socket.display());
    assert_eq!(text(&blockhaul(&["info", "--size", &uri]).stdout), "1048576\n");
    kill_process(pid(server.id()), Signal::TERM).unwrap();
    assert!(server.wait().unwrap().success());
    // Not ours to remove.
    assert!(socket.exists());
    let wrong = "LISTEN_PID=$$ LISTEN_FDS=2; export LISTEN_PID LISTEN_FDS; exec \"$@\"";
    let mut command = Command::new("/bin/sh");
    command.args(["-c", wrong, "sh", OURS, "serve", "pattern:1M"]);
    let output = tools::output(&mut command, LIMIT).unwrap();
    assert_eq!(output.status.code(), Some(2), "{}", text(&output.stderr));
}

#[test]
fn what_cannot_be_served_is_said_in_one_line() {
    let scratch = Scratch::new().unwrap();
    let taken = scratch.file("taken");
    std::fs::write(&taken, "").unwrap();
    let taken = taken.to_str().unwrap();
    assert_fails(&["serve", "-f", "-U", taken, "memory:1M"], 3, &["exists", "remove it"]);
    assert_fails(&["serve", "-f", "-U", "/no/dir/s", "memory:1M"], 3, &["/no/dir/s"]);
    let long = format!("/{}", "x".repeat(200));
    assert_fails(&["serve", "-f", "-U", &long, "memory:1M"], 3, &["107 bytes"]);
    assert_fails(&["serve", "-f", "tape:1M"], 2, &["tape", "known are", "memory"]);
    assert_fails(&["serve", "-f", "memory:1M?sise=1"], 2, &["sise"]);
    assert_fails(&["serve", "-f", "memory:lots"], 2, &["lots", "not a size"]);
    assert_fails(&["serve", "-f", "--layer", "ratte", "memory:1M"], 2, &["ratte", "known are"]);
    assert_fails(&["serve", "-f", "-"], 2, &["pipe"]);
    assert_fails(&["serve", "-f", "[", "memory:1M"], 2, &["[ without ]"]);
    let busy = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = busy.local_addr().unwrap().port().to_string();
    let args = ["serve", "-f", "-i", "127.0.0.1", "-p", &port, "memory:1M"];
    assert_fails(&args, 3, &[port.as_str(), "choose another port"]);
}

/// What a client sees: names and descriptions of exports.
fn listed(uri: &str) -> Vec<(String, String)> {
    let output = blockhaul(&["info", "--list", uri]);
    let said = text(&output.stdout);
    let mut all: Vec<(String, String)> = Vec::new();
    for line in said.lines() {
        if let Some(name) = line.strip_prefix("export=\"") {
            all.push((name.trim_end_matches("\":").to_string(), String::new()));
        } else if let Some(text) = line.strip_prefix("\tdescription: ") {
            all.last_mut().unwrap().1 = text.to_string();
        }
    }
    all
}

fn size(uri: &str) -> String {
    text(&blockhaul(&["info", "--size", uri]).stdout).trim().to_string()
}

#[test]
fn several_exports_on_several_listeners_each_with_its_layers() {
    let scratch = Scratch::new().unwrap();
    let (one, two) = (scratch.socket("one"), scratch.socket("two"));
    let other = scratch.file("other.raw");
    std::fs::write(&other, vec![7; 1 << 20]).unwrap();
    let folder = scratch.file("folder");
    std::fs::create_dir(&folder).unwrap();
    std::fs::write(folder.join("x"), vec![1; 4096]).unwrap();
    std::os::unix::fs::symlink("../other.raw", folder.join("out")).unwrap();
    let (vms, plain) =
        (format!("vms=dir:{}", folder.display()), format!("a%3Db={}", other.display()));
    let mut command = Command::new(OURS);
    command.args(["serve", "-f", "--exit-with-parent", "-i", "127.0.0.1", "-p", "0", "-p", "0"]);
    command.arg("-U").arg(&one).arg("-U").arg(&two);
    command.args(["--export", &vms, "memory:2M", "-e", "own", "--export", &plain, "--export"]);
    command.arg("b=[").arg(&other).args([
        "-r",
        "--layer",
        "offset?offset=512",
        "--description",
        "it",
    ]);
    command.args(["]", "--export", "c=[", "[", OURS, "serve", "memory:3M", "]", "]"]);
    command.args(["--layer", "truncate?round-up=1M"]).stdout(Stdio::piped());
    let mut server = command.spawn().unwrap();
    let mut lines = BufReader::new(server.stdout.take().unwrap()).lines();
    let ports = [lines.next().unwrap().unwrap(), lines.next().unwrap().unwrap()];
    let unix = |name: &str| format!("nbd+unix:///{name}?socket={}", one.display());
    let names =
        [("own", ""), ("vms/x", "file of 4K (4096 bytes)"), ("a=b", ""), ("b", "it"), ("c", "")];
    let wanted: Vec<_> = names.map(|(name, what)| (name.to_string(), what.to_string())).to_vec();
    assert_eq!(listed(&unix("")), wanted);
    assert_eq!(listed(&format!("nbd://127.0.0.1:{}", ports[1])), wanted);
    assert_eq!(size(&unix("")), "2097152", "the first one");
    assert_eq!(size(&unix("own")), "2097152");
    assert_eq!(size(&unix("vms/x")), "1048576", "the layer of all");
    assert_eq!(size(&unix("c")), "3145728");
    assert_eq!(size(&format!("nbd+unix:///a%3Db?socket={}", two.display())), "1048576");
    for port in &ports {
        assert_eq!(size(&format!("nbd://127.0.0.1:{port}/own")), "2097152");
    }
    // Only this one is read-only.
    for (name, status) in [("b", 2), ("a=b", 0), ("own", 0)] {
        let output = blockhaul(&["info", "--can", "write", &unix(&name.replace('=', "%3D"))]);
        assert_eq!(output.status.code(), Some(status), "{name}");
    }
    for bad in ["vms/out", "vms/..", "vms/../other.raw", "vms/", "vms", "nope", ".."] {
        let output = blockhaul(&["info", &unix(bad)]);
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{bad}: {said}");
    }
    kill_process(pid(server.id()), Signal::TERM).unwrap();
    assert!(server.wait().unwrap().success());
}

#[test]
fn what_exports_cannot_be_is_said() {
    let usage = |args: &[&str], words: &[&str]| {
        let args = [&["serve", "-f", "-U", "-"], args].concat();
        assert_fails(&args, 2, words);
    };
    usage(&["--export", "a"], &["no device", "a=DEVICE"]);
    usage(&["-e", "a", "-e", "b", "memory:1M"], &["two names"]);
    usage(&["-e", "a=memory:1M", "-e", "a=zero:1M"], &["two exports", "\"a\""]);
    usage(&["-e", "a=memory:1M", "--description", "x"], &["--description"]);
    usage(&["-e", "a="], &["no device"]);
    usage(&["-e", "a=tape:1M"], &["tape", "known are"]);
    usage(&["-e", "a=[", "memory:1M", "--layer", "ratte", "]"], &["ratte", "known are"]);
    usage(&["-e", "a=[", "memory:1M", "--what", "]"], &["--export a", "--what"]);
    usage(&["-e", "a=[", "-r", "]"], &["--export a", "DEVICE"]);
    usage(&["-e", "a=[", "memory:1M"], &["[ without ]"]);
    let long = format!("{}=memory:1M", "x".repeat(4097));
    usage(&["-e", &long], &["4096 bytes"]);
    usage(&["memory:1M", "--limit", "bytes=1M"], &["longest request", "32M"]);
    assert_fails(&["serve", "-f", "-U", "-", "dir:/no/such"], 3, &["/no/such"]);
    assert_fails(&["copy", "dir:/tmp", "null:"], 2, &["many devices"]);
    assert_fails(&["serve", "-f", "-s", "-p", "0", "memory:1M"], 2, &["--port 0"]);
}

#[test]
fn the_client_at_standard_input_is_served_through_sockets_and_pipes() {
    use std::io::{Read as _, Write as _};
    // As ssh has it: two pipes.
    let mut server = Command::new(OURS)
        .args(["serve", "--single", "memory:1M"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let (mut to, mut from) = (server.stdin.take().unwrap(), server.stdout.take().unwrap());
    let mut greeting = [0; 18];
    from.read_exact(&mut greeting).unwrap();
    assert_eq!(&greeting[..8], b"NBDMAGIC");
    to.write_all(&[0, 0, 0, 3]).unwrap();
    // ABORT, which is acknowledged before the server ends.
    to.write_all(b"IHAVEOPT\0\0\0\x02\0\0\0\0").unwrap();
    let mut rest = Vec::new();
    from.read_to_end(&mut rest).unwrap();
    assert_eq!(rest.len(), 20, "{rest:?}");
    assert!(server.wait().unwrap().success());
    // As inetd has it: a socket. It ends with the client, whatever else it listens on.
    let scratch = Scratch::new().unwrap();
    let (mut client, socket) = UnixStream::pair().unwrap();
    let mut server = Command::new(OURS)
        .args(["serve", "-s", "-U", scratch.socket("s").to_str().unwrap(), "memory:1M"])
        .stdin(Stdio::from(std::os::fd::OwnedFd::from(socket)))
        .spawn()
        .unwrap();
    client.read_exact(&mut greeting).unwrap();
    assert_eq!(size(&format!("nbd+unix:///?socket={}", scratch.socket("s").display())), "1048576");
    drop(client);
    assert!(server.wait().unwrap().success());
}

#[test]
fn a_stop_gives_up_what_devices_hold_and_says_so() {
    let scratch = Scratch::new().unwrap();
    let socket = scratch.socket("s");
    let (own, log) = (socket.to_str().unwrap(), scratch.file("log"));
    let serve = ["serve", "-f", "--exit-with-parent", "-U", own, "memory:1M", "-e", "disk"];
    let slow = ["--layer", "delay?read=60s", "--drain-timeout"];
    for second in [false, true] {
        let mut command = Command::new(OURS);
        command.args(serve).args(slow).arg(if second { "1000s" } else { "300ms" });
        let mut server = command.stderr(std::fs::File::create(&log).unwrap()).spawn().unwrap();
        let mut client = loop {
            if let Ok(client) = testkit::peer::Conversation::connect(&socket) {
                break client;
            }
            assert_eq!(server.try_wait().unwrap(), None);
            std::thread::sleep(Duration::from_millis(5));
        };
        client.open("disk", wire::Replies::Structured).unwrap();
        let read = client.request(wire::Command::Read, 4096, 512);
        client.send_request(&read, &[]).unwrap();
        std::thread::sleep(Duration::from_millis(200));
        let begun = Instant::now();
        kill_process(pid(server.id()), Signal::TERM).unwrap();
        if second {
            std::thread::sleep(Duration::from_millis(500));
            assert_eq!(server.try_wait().unwrap(), None, "it waits for the device");
            kill_process(pid(server.id()), Signal::TERM).unwrap();
            assert_eq!(server.wait().unwrap().code(), Some(143));
        } else {
            assert_eq!(client.receive_answer(&read).unwrap().error, 108);
            assert_eq!(server.wait().unwrap().code(), Some(9));
            let said = std::fs::read_to_string(&log).unwrap();
            for word in ["gave up", "\"disk\"", "Read of 512 bytes at 4096", "--drain-timeout"] {
                assert!(said.contains(word), "{word} in {said}");
            }
        }
        assert!(begun.elapsed() < Duration::from_secs(3), "{:?}", begun.elapsed());
        assert!(!socket.exists(), "it cleans up");
    }
}

/// The answer to an option about an export: the kind of the last reply, `None` if the connection ends.
fn asks(socket: &Path, code: u32, name: &[u8]) -> Option<u32> {
    let mut client = testkit::peer::Conversation::connect(socket).unwrap();
    client.hello(3).unwrap();
    client.negotiate(wire::Replies::Structured).unwrap();
    let len = (name.len() as u32).to_be_bytes();
    let payload = match code {
        wire::magic::OPT_EXPORT_NAME => {
            client.send_option(code, name).unwrap();
            return client.receive(10).ok().map(|_| wire::magic::REP_ACK);
        }
        wire::magic::OPT_SET_META_CONTEXT => [&len[..], name, &[0; 4]].concat(),
        _ => [&len[..], name, &[0; 2]].concat(),
    };
    client.option(code, &payload).ok().and_then(|replies| replies.last().map(|last| last.kind))
}

#[test]
fn names_of_any_length_and_kind_are_taken_or_refused() {
    use wire::magic::{
        OPT_EXPORT_NAME, OPT_GO, OPT_INFO, OPT_SET_META_CONTEXT, REP_ACK, REP_ERR_INVALID,
        REP_ERR_TOO_BIG, REP_ERR_UNKNOWN,
    };
    let scratch = Scratch::new().unwrap();
    let folder = scratch.file("folder");
    std::fs::create_dir(&folder).unwrap();
    std::fs::write(scratch.file("secret"), "secret").unwrap();
    let long = "n".repeat(4096);
    let (longest, dir) = (format!("{long}=memory:1M"), format!("d=dir:{}", folder.display()));
    let server = start(&scratch, &["zero:2M", "--export", &longest, "--export", &dir]);
    let too_long = "n".repeat(4097);
    let cases: [(&[u8], u32); 9] = [
        (b"", REP_ACK),
        (long.as_bytes(), REP_ACK),
        (too_long.as_bytes(), REP_ERR_INVALID),
        (b"..", REP_ERR_UNKNOWN),
        (b"d/..", REP_ERR_UNKNOWN),
        (b"d/../secret", REP_ERR_UNKNOWN),
        (b"d//", REP_ERR_UNKNOWN),
        (b"d/\0", REP_ERR_INVALID),
        (b"\xff", REP_ERR_INVALID),
    ];
    for (name, wanted) in cases {
        let shown = String::from_utf8_lossy(&name[..name.len().min(20)]).into_owned();
        for code in [OPT_GO, OPT_INFO, OPT_SET_META_CONTEXT] {
            assert_eq!(asks(server.socket(), code, name), Some(wanted), "{shown}, option {code}");
        }
        // Has no answer but the end of the connection.
        let taken = (wanted == REP_ACK).then_some(REP_ACK);
        assert_eq!(asks(server.socket(), OPT_EXPORT_NAME, name), taken, "{shown}");
    }
    assert!(server.stop().unwrap().success());
    let server = start(&scratch, &["zero:2M", "--limit", "name=10", "--limit", "queries=0"]);
    assert_eq!(asks(server.socket(), OPT_GO, b"12345678901"), Some(REP_ERR_TOO_BIG));
    assert_eq!(asks(server.socket(), OPT_GO, b"1234567890"), Some(REP_ERR_UNKNOWN));
    let mut client = testkit::peer::Conversation::connect(server.socket()).unwrap();
    client.hello(3).unwrap();
    client.negotiate(wire::Replies::Structured).unwrap();
    assert!(client.select("", &["base:allocation"]).is_err());
    assert_eq!(client.select("", &[]), Ok(Vec::new()));
}

#[test]
fn lists_and_handshakes_have_their_limits() {
    let scratch = Scratch::new().unwrap();
    let folder = scratch.file("folder");
    std::fs::create_dir(&folder).unwrap();
    for name in 0..30 {
        std::fs::write(folder.join(format!("{name:02}")), "").unwrap();
    }
    let device = format!("dir:{}", folder.display());
    let server = start(&scratch, &[&device, "--limit=exports=20", "--limit=options=3"]);
    let mut client = testkit::peer::Conversation::connect(server.socket()).unwrap();
    client.hello(3).unwrap();
    let replies = client.option(wire::magic::OPT_LIST, &[]).unwrap();
    assert_eq!(replies.len(), 20 + 1);
    assert_eq!(replies[19].payload[4..6], *b"19");
    // Eight more for each that was listed; what is not listed can be had all the same.
    assert!(client.go("29").is_ok());
    let mut client = testkit::peer::Conversation::connect(server.socket()).unwrap();
    client.hello(3).unwrap();
    for _ in 0..3 {
        assert!(!client.agrees(99, &[]).unwrap());
    }
    assert!(client.agrees(99, &[]).is_err(), "the fourth option ends it");
}

#[test]
fn several_sockets_of_the_service_manager_and_our_own_are_served_together() {
    use std::os::fd::OwnedFd;
    let scratch = Scratch::new().unwrap();
    let (one, own) = (scratch.socket("one"), scratch.socket("own"));
    let unix = std::os::unix::net::UnixListener::bind(&one).unwrap();
    let tcp = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = tcp.local_addr().unwrap().port();
    // Standard input and error are free to carry them to where they belong.
    let activate = "exec 3<&0 4<&1 </dev/null >/dev/null; \
                    LISTEN_PID=$$ LISTEN_FDS=2 LISTEN_FDNAMES=a:b; \
                    export LISTEN_PID LISTEN_FDS LISTEN_FDNAMES; exec \"$@\"";
    let mut server = Command::new("/bin/sh")
        .args(["-c", activate, "sh", OURS, "serve", "--exit-with-parent", "-U"])
        .args([own.to_str().unwrap(), "pattern:1M"])
        .stdin(Stdio::from(OwnedFd::from(unix)))
        .stdout(Stdio::from(OwnedFd::from(tcp)))
        .spawn()
        .unwrap();
    assert_eq!(size(&format!("nbd+unix:///?socket={}", one.display())), "1048576");
    assert_eq!(size(&format!("nbd://127.0.0.1:{port}")), "1048576");
    assert_eq!(size(&format!("nbd+unix:///?socket={}", own.display())), "1048576");
    kill_process(pid(server.id()), Signal::TERM).unwrap();
    assert!(server.wait().unwrap().success());
    assert!(one.exists() && !own.exists(), "only what it made is removed");
}

#[test]
fn vsock_is_served_where_there_is_any_and_its_absence_is_said() {
    // A number that nobody else on this machine should use.
    let port = (1_000_000 + std::process::id()).to_string();
    let output = blockhaul(&["serve", "--vsock", &port, "memory:1M", "--run", "echo \"$uri\""]);
    let said = text(&output.stderr);
    match output.status.code() {
        Some(0) => assert!(text(&output.stdout).contains("socket="), "{said}"),
        code => {
            assert_eq!(code, Some(3), "{said}");
            assert!(said.contains(&format!("vsock port {port}")), "{said}");
            assert!(said.contains("kernel module"), "{said}");
        }
    }
    // A context id that is certainly not this machine's: the hypervisor's.
    assert_fails(&["serve", "-f", "--vsock", "0:1", "memory:1M"], 3, &["vsock context 0, port 1"]);
}
