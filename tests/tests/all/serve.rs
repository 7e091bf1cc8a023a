//! `blockhaul serve` as a program: where it listens, what it runs, how it starts and stops, who may
//! use it.

use std::fs;
use std::io::{BufRead as _, BufReader};
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};

use blockhaul_testkit::image;
use blockhaul_testkit::peer::Conversation;
use blockhaul_testkit::require_peer;
use blockhaul_testkit::rng;
use blockhaul_testkit::tools::{
    self, PeerProgram, PeerServer, ScratchDir, is_running, until, until_ok, wait_within,
};
use blockhaul_tests::{
    LIMIT, assert_same, blockhaul, bounded, done, garbage, lossy, peer, program, serve, succeed,
    text,
};
use blockhaul_wire::ReplyForm;

/// A process that is killed when this is dropped.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A server in the background, by its process id. It is killed when this is dropped.
struct Background(u32);

impl Background {
    /// Sends a signal by its name; whether there was such a process.
    fn signal(&self, name: &str) -> bool {
        let mut command = Command::new("sh");
        command.args(["-c", "kill -s \"$0\" \"$1\" 2>/dev/null", name, &self.0.to_string()]);
        command.status().unwrap().success()
    }

    /// Waits until it has ended.
    #[track_caller]
    fn ends(&self) {
        until("it ends", || !is_running(&self.0.to_string()));
    }
}

impl Drop for Background {
    fn drop(&mut self) {
        self.signal("KILL");
    }
}

/// Sends a signal to a server of ours, which has to end and be content.
#[track_caller]
fn stops_in_time(child: Running, signal: &str) {
    let status = stopped_in_time(child, signal);
    assert!(status.success(), "{status} after SIG{signal}");
}

/// The status of a server that has to end after a signal.
#[track_caller]
fn stopped_in_time(mut child: Running, signal: &str) -> ExitStatus {
    // The child is not waited for before: its process id is its own.
    assert!(
        Command::new("kill")
            .args(["-s", signal, &child.0.id().to_string()])
            .status()
            .unwrap()
            .success()
    );
    let status = wait_within(&mut child.0, LIMIT);
    status.unwrap_or_else(|| panic!("it goes on after SIG{signal}"))
}

/// Starts a server in the foreground and waits until it listens.
fn start(socket: &Path, args: &[&str]) -> Running {
    let mut command = blockhaul(&["serve", "--exit-with-parent", "-f", "-U", text(socket)]);
    let running = Running(command.args(args).spawn().unwrap());
    until_ok("it listens", || Conversation::connect(socket));
    running
}

/// A client that has gone through the handshake.
fn connected(socket: &Path) -> Conversation {
    let mut client = Conversation::connect(socket).unwrap();
    client.hello(3).unwrap();
    client.negotiate(ReplyForm::Structured).unwrap();
    client.go("").unwrap();
    client
}

#[test]
fn a_command_gets_the_address_and_gives_the_status() {
    let scratch = ScratchDir::new().unwrap();
    let run = |options: &[&str], script: &str| {
        let args = [&["serve"], options, &["memory:1M", "--run", script]].concat();
        bounded(&mut blockhaul(&args), LIMIT)
    };
    for (script, status) in
        [("true", 0), ("exit 7", 7), ("kill -TERM $$", 143), ("nosuch 2>&-", 127)]
    {
        let output = run(&[], script);
        assert_eq!(output.status.code(), Some(status), "{script}: {}", lossy(&output.stderr));
    }
    // The program itself is among what it may run.
    let me = text(program());
    let output = run(&[], &format!("{me} info --size \"$uri\"; {me} info --size $nbd"));
    assert_eq!(lossy(&output.stdout), "1048576\n1048576\n", "{}", lossy(&output.stderr));

    let socket = scratch.socket("s");
    let output = run(&["-U", text(&socket), "-e", "a b"], "echo \"$unixsocket|$exportname|$uri\"");
    let expected = format!("{0}|a b|nbd+unix:///a%20b?socket={0}\n", text(&socket));
    assert_eq!(lossy(&output.stdout), expected);
    assert!(!socket.exists(), "the socket is left");
    let output = run(&["-U", "-"], "stat -c %a $(dirname $unixsocket); echo $unixsocket");
    let said = lossy(&output.stdout);
    let (mode, socket) = said.trim().split_once('\n').unwrap();
    assert_eq!(mode, "700", "others could connect");
    assert!(!Path::new(socket).parent().unwrap().exists(), "{socket} is left");
    let output =
        run(&["-p", "0", "-i", "127.0.0.1"], &format!("{me} info --size $uri && echo $port"));
    let said = lossy(&output.stdout);
    let lines: Vec<&str> = said.lines().collect();
    assert!(lines.contains(&"1048576"), "{said}{}", lossy(&output.stderr));
    assert!(lines.last().unwrap().parse::<u16>().unwrap() > 0, "{said}");
    // What is written in between is there for the next client.
    let copied = scratch.file("copied");
    let pattern = scratch.file("pattern");
    let to = text(&copied);
    let script = format!("{me} copy pattern:1M $uri && {me} copy --verify $uri {to}");
    let output = run(&[], &script);
    assert!(output.status.success(), "{}", lossy(&output.stderr));
    succeed(&["copy", "pattern:1M", text(&pattern)]);
    assert_same(&pattern, &copied, "through a command");
}

#[test]
fn it_goes_to_the_background_and_says_its_process_id() {
    let scratch = ScratchDir::new().unwrap();
    let socket = scratch.socket("s");
    let pidfile = scratch.file("pid");
    let args = ["serve", "--background", "-U", text(&socket), "-P", text(&pidfile), "memory:1M"];
    let output = bounded(&mut blockhaul(&args), LIMIT);
    let pid = fs::read_to_string(&pidfile).unwrap();
    let server = Background(pid.trim().parse().unwrap());
    assert!(output.status.success(), "{}", lossy(&output.stderr));
    assert!(lossy(&output.stderr).contains("serving memory:1M (read-write) at nbd+unix:"));
    assert_eq!(pid, format!("{}\n", server.0));
    let uri = format!("nbd+unix:///?socket={}", text(&socket));
    assert_eq!(succeed(&["info", "--size", &uri]), "1048576\n");
    let dir = fs::read_link(format!("/proc/{}/cwd", server.0)).unwrap();
    assert_eq!(dir, std::env::current_dir().unwrap(), "relative names have another meaning");
    let client = connected(&socket);
    assert!(server.signal("TERM"));
    server.ends();
    drop(client);
    assert!(!socket.exists(), "the socket is left");

    // A port chosen by the system is printed before it goes to the background.
    let args =
        ["serve", "--background", "-i", "127.0.0.1", "-p", "0", "-P", text(&pidfile), "memory:2M"];
    let output = bounded(&mut blockhaul(&args), LIMIT);
    let server = Background(fs::read_to_string(&pidfile).unwrap().trim().parse().unwrap());
    let port = lossy(&output.stdout);
    let uri = format!("nbd://127.0.0.1:{}/", port.trim());
    assert_eq!(succeed(&["info", "--size", &uri]), "2097152\n");
    assert!(server.signal("INT"));
    server.ends();

    // Errors are printed before that, too.
    let absent = scratch.file("absent");
    let output = bounded(
        &mut blockhaul(&["serve", "--background", "-U", text(&socket), text(&absent)]),
        LIMIT,
    );
    assert_eq!(output.status.code(), Some(3), "{}", lossy(&output.stderr));
    assert_eq!(lossy(&output.stderr).lines().count(), 1, "{}", lossy(&output.stderr));
    assert!(!socket.exists());
}

/// Sends a read that the device will hold. Requests are begun in order: once the one behind it is
/// answered, the device has it.
fn held_read(client: &mut Conversation) {
    let read = client.request(blockhaul_wire::CommandCode::Read, 0, 4096);
    client.send_request(&read, &[]).unwrap();
    let write = client.request(blockhaul_wire::CommandCode::Write, 0, 512);
    assert_eq!(client.ask(&write, &[1; 512]).unwrap().error, 0);
}

#[test]
fn it_stops_whoever_is_connected() {
    let scratch = ScratchDir::new().unwrap();
    for (number, signal) in ["TERM", "INT"].into_iter().enumerate() {
        let socket = scratch.socket(&number.to_string());
        let server = start(&socket, &["memory:1M"]);
        let idle: Vec<_> = (0..20).map(|_| connected(&socket)).collect();
        // One says nothing at all, one stops in the middle of a request.
        let silent = Conversation::connect(&socket).unwrap();
        let mut half = connected(&socket);
        half.send(&[0x25, 0x60, 0x95, 0x13, 0, 0]).unwrap();
        stops_in_time(server, signal);
        drop((idle, silent, half));
        assert!(!socket.exists(), "the socket is left");
    }
    // Requests that a device holds are given up when it had its time, and the status says so.
    let socket = scratch.socket("slow");
    let slow = ["--layer", "delay?read=1000s", "--drain-timeout", "200ms", "memory:1M"];
    let server = start(&socket, &slow);
    let mut client = connected(&socket);
    held_read(&mut client);
    assert_eq!(stopped_in_time(server, "TERM").code(), Some(9));
}

#[test]
fn a_second_signal_stops_it_at_once() {
    let scratch = ScratchDir::new().unwrap();
    let socket = scratch.socket("s");
    let slow = ["--layer", "delay?read=1000s&zero=200ms", "--drain-timeout", "1000s", "memory:1M"];
    let mut server = start(&socket, &slow);
    let mut client = connected(&socket);
    let zero = client.request(blockhaul_wire::CommandCode::WriteZeroes, 8192, 512);
    client.send_request(&zero, &[]).unwrap();
    held_read(&mut client);
    done(Command::new("kill").args(["-s", "TERM", &server.0.id().to_string()]));
    // The first has been handled before the second arrives.
    until("it does not listen any more", || Conversation::connect(&socket).is_err());
    assert_eq!(client.receive_answer(&zero).unwrap().error, 0, "it waits for its device");
    assert_eq!(server.0.try_wait().unwrap(), None, "and for the read");
    // The status is that of the second.
    assert_eq!(stopped_in_time(server, "INT").code(), Some(130));
    assert!(!socket.exists(), "the socket is left");
}

#[test]
fn clients_start_it_by_socket_activation() {
    let nbdcopy = require_peer!("nbdcopy");
    let nbdinfo = require_peer!("nbdinfo");
    let nbdsh = require_peer!("nbdsh");
    let scratch = ScratchDir::new().unwrap();
    let image = scratch.file("image");
    let target = scratch.file("target");
    let seed = rng::seed();
    println!("BLOCKHAUL_SEED={seed}");
    image::sparse(&image, 10 << 20, seed).unwrap();
    let me = text(program());
    let source = ["--", "[", me, "serve", "-r", text(&image), "]"];
    peer(&nbdcopy, &[&source[..], &[text(&target)]].concat());
    assert_same(&image, &target, "from us");
    garbage(&target, 10 << 20).unwrap();
    peer(&nbdcopy, &["--flush", "--", text(&image), "[", me, "serve", text(&target), "]"]);
    assert_same(&image, &target, "to us");
    assert_eq!(peer(&nbdinfo, &[&["--size"], &source[..]].concat()), "10485760\n");
    let map = peer(&nbdinfo, &[&["--map"], &source[..]].concat());
    assert_eq!(map, succeed(&["map", text(&image)]));
    let script = format!(
        "h.connect_systemd_socket_activation(['{me}', 'serve', 'pattern:1M'])\n\
         assert h.pread(8, 4096) == (4096).to_bytes(8, 'big')"
    );
    peer(&nbdsh, &["-c", &script]);
    // What makes no sense with a socket from outside is refused.
    let output = bounded(
        nbdinfo.command().args([
            "--size",
            "--",
            "[",
            me,
            "serve",
            "--run",
            "true",
            "memory:1M",
            "]",
        ]),
        LIMIT,
    );
    assert!(!output.status.success());
    assert!(lossy(&output.stderr).contains("LISTEN_FDS"), "{}", lossy(&output.stderr));
}

#[test]
fn it_starts_other_servers_by_socket_activation() {
    let nbdinfo = require_peer!("nbdinfo");
    let qemu_img = require_peer!("qemu-img");
    require_peer!("nbdkit");
    require_peer!("qemu-nbd");
    let scratch = ScratchDir::new().unwrap();
    let qcow2 = scratch.file("qcow2");
    peer(&qemu_img, &["create", "-q", "-f", "qcow2", text(&qcow2), "32M"]);
    let servers: [&[&str]; 3] = [
        &["[", "nbdkit", "-r", "pattern", "10M", "]"],
        &["[", "nbdkit", "--filter=exportname", "data", "1 @1000 2", "default-export=x", "]"],
        &["[", "qemu-nbd", "-f", "qcow2", text(&qcow2), "]"],
    ];
    for server in servers {
        for options in [&["--size"][..], &["--map"], &["--json", "--no-content"], &["--no-content"]]
        {
            let args = [options, &["--"], server].concat();
            // The same words, from us and from nbdinfo.
            let mut theirs = nbdinfo.command();
            let path = blockhaul(&[]).get_envs().find_map(|(name, value)| {
                (name == "PATH").then(|| value.map(ToOwned::to_owned)).flatten()
            });
            theirs.envs(path.map(|path| ("PATH", path))).args(&args);
            let ours = succeed(&[&["info"], &args[..]].concat());
            assert_eq!(ours, done(&mut theirs), "{args:?}");
        }
    }
}

#[test]
fn the_name_is_what_clients_ask_for() {
    let scratch = ScratchDir::new().unwrap();
    let server = serve(&scratch, "s", &["-e", "ein Name/mit ünf", "memory:1M"]);
    let uri = |name: &str| server.uri(name);
    assert_eq!(succeed(&["info", "--size", &uri("ein Name/mit ünf")]), "1048576\n");
    // The empty name selects it, too.
    assert_eq!(succeed(&["info", "--size", &uri("")]), "1048576\n");
    let output = bounded(&mut blockhaul(&["info", "--size", &uri("another")]), LIMIT);
    assert_eq!(output.status.code(), Some(1), "{}", lossy(&output.stderr));
    let list = succeed(&["info", "--list", &uri("")]);
    assert!(list.contains("export=\"ein Name/mit ünf\":"), "{list}");
    if let Some(nbdinfo) = PeerProgram::require("nbdinfo") {
        assert_eq!(peer(&nbdinfo, &["--list", &uri("")]), list);
        assert_eq!(peer(&nbdinfo, &["--size", &uri("ein Name/mit ünf")]), "1048576\n");
    }
}

#[test]
fn what_is_served_read_only_stays_as_it_is() {
    let scratch = ScratchDir::new().unwrap();
    let file = scratch.file("file");
    let before = scratch.file("before");
    garbage(&file, 1 << 20).unwrap();
    fs::copy(&file, &before).unwrap();
    // Files that may only be read, too; root may write them all the same.
    fs::set_permissions(&file, fs::Permissions::from_mode(0o444)).unwrap();
    for (name, device) in [("s", text(&file)), ("t", "memory:1M"), ("u", "null:1M")] {
        let server = serve(&scratch, name, &["-r", device]);
        let asked = blockhaul(&["info", "--can", "write", &server.uri("")]).status().unwrap();
        assert_eq!(asked.code(), Some(2), "{device}");
        let mut client = Conversation::connect(server.socket()).unwrap();
        client.hello(3).unwrap();
        client.negotiate(ReplyForm::Simple).unwrap();
        client.go("").unwrap();
        // EPERM, and the connection continues.
        assert_eq!(client.write(0, b"x").unwrap(), 1, "{device}");
        for command in [blockhaul_wire::CommandCode::WriteZeroes, blockhaul_wire::CommandCode::Trim]
        {
            let request = client.request(command, 0, 4096);
            assert_eq!(client.ask(&request, &[]).unwrap().error, 1, "{device} {command:?}");
        }
        assert_eq!(client.read(0, 4).unwrap().len(), 4);
    }
    assert_same(&file, &before, "it was served read-only");
}

#[test]
fn read_only_stands_above_layers_that_can_always_be_written() {
    let scratch = ScratchDir::new().unwrap();
    let folder = scratch.file("d");
    fs::create_dir(&folder).unwrap();
    garbage(&folder.join("a"), 1 << 20).unwrap();
    let (folder, file) = (format!("dir:{}", text(&folder)), folder.join("a"));
    for (index, device) in [folder.as_str(), text(&file)].into_iter().enumerate() {
        for layer in ["cow", "checkwrite"] {
            let server =
                serve(&scratch, &format!("{layer}{index}"), &["-r", "--layer", layer, device]);
            let mut client = Conversation::connect(server.socket()).unwrap();
            let flags = client.open(["a", ""][index], ReplyForm::Structured).unwrap().flags;
            assert_eq!(flags & 2, 2, "{device} under {layer} is told to be read-only");
            assert_eq!(client.write(0, b"x").unwrap(), 1, "{device} under {layer}: EPERM");
        }
    }
}

#[test]
fn it_listens_on_both_kinds_of_loopback() {
    for (address, in_uri) in
        [("127.0.0.1", "127.0.0.1"), ("::1", "[::1]"), ("localhost", "localhost")]
    {
        if address == "::1" && std::net::TcpListener::bind("[::1]:0").is_err() {
            tools::skip("no address ::1: IPv6 is not checked");
            continue;
        }
        let mut command =
            blockhaul(&["serve", "-f", "--exit-with-parent", "-p", "0", "-i", address]);
        let child = command.arg("pattern:5M").stdout(Stdio::piped()).spawn().unwrap();
        let mut server = Running(child);
        let mut line = String::new();
        BufReader::new(server.0.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let port: u16 = line.trim().parse().unwrap();
        let uri = format!("nbd://{in_uri}:{port}/");
        succeed(&["copy", "--verify", &uri, "memory:5M"]);
        if let Some(nbdinfo) = PeerProgram::require("nbdinfo") {
            assert_eq!(peer(&nbdinfo, &["--size", &uri]), "5242880\n");
        }
        stops_in_time(server, "TERM");
    }
}

#[test]
fn many_clients_are_served_at_once() {
    let nbdcopy = require_peer!("nbdcopy");
    let scratch = ScratchDir::new().unwrap();
    let image = scratch.file("image");
    let seed = rng::seed();
    println!("BLOCKHAUL_SEED={seed}");
    image::sparse(&image, 24 << 20, seed).unwrap();
    let one = scratch.socket("a");
    let two = scratch.socket("b");
    let server =
        serve(&scratch, "s", &["-U", text(&one), "-U", text(&two), "-t", "2", text(&image)]);
    // Neither one that is silent nor many that are idle keep others waiting.
    let _silent = Conversation::connect(&one).unwrap();
    let _idle: Vec<_> = (0..100).map(|_| connected(&one)).collect();
    std::thread::scope(|scope| {
        for number in 0..8 {
            let socket = [&one, &two, server.socket()][number % 3];
            let uri = format!("nbd+unix:///?socket={}", text(socket));
            let target = scratch.file(&format!("t{number}"));
            let nbdcopy = &nbdcopy;
            let image = &image;
            scope.spawn(move || {
                if number % 2 == 0 {
                    peer(nbdcopy, &[&uri, text(&target)]);
                } else {
                    succeed(&["copy", "--verify", &uri, text(&target)]);
                }
                assert_same(image, &target, "one of many clients");
            });
        }
    });
    // What one client has written and flushed, all others read.
    let writer = Conversation::connect(&one).unwrap();
    drop(writer);
    let mut writer = connected(&one);
    let mut reader = connected(&two);
    assert_eq!(writer.write(12345, b"seen by all").unwrap(), 0);
    assert_eq!(reader.read(12345, 11).unwrap(), b"seen by all");
}

#[test]
fn a_socket_that_exists_is_left_alone() {
    let scratch = ScratchDir::new().unwrap();
    let server = serve(&scratch, "s", &["memory:1M"]);
    let file = scratch.file("file");
    fs::write(&file, "precious").unwrap();
    for (path, why) in [(server.socket(), "listens there"), (&*file, "no socket")] {
        let output =
            bounded(&mut blockhaul(&["serve", "-f", "-U", text(path), "memory:1M"]), LIMIT);
        let said = lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(3), "{said}");
        assert_eq!(said.lines().count(), 1, "{said}");
        assert!(said.contains(text(path)) && said.contains(why), "{said}");
    }
    assert_eq!(fs::read_to_string(&file).unwrap(), "precious");
    assert_eq!(succeed(&["info", "--size", &server.uri("")]), "1048576\n");
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    let args = ["serve", "-f", "-i", "127.0.0.1", "-p", &port, "memory:1M"];
    let output = bounded(&mut blockhaul(&args), LIMIT);
    let said = lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(3), "{said}");
    assert!(said.contains(&port) && said.lines().count() == 1, "{said}");
}

/// A server of another server's export.
#[test]
fn exports_of_others_are_served_on() {
    let nbdkit = require_peer!("nbdkit");
    let nbdinfo = require_peer!("nbdinfo");
    let scratch = ScratchDir::new().unwrap();
    let image = scratch.file("image");
    let target = scratch.file("target");
    let seed = rng::seed();
    println!("BLOCKHAUL_SEED={seed}");
    image::sparse(&image, 20 << 20, seed).unwrap();
    let args = ["-r", "file", text(&image)];
    let first = PeerServer::nbdkit(&nbdkit, &scratch.socket("k"), &args).unwrap();
    let second = serve(&scratch, "s", &["-r", &first.uri("")]);
    let layer = ["-r", "--layer", "offset?offset=1M&range=3M", &second.uri("")];
    let third = serve(&scratch, "t", &layer);
    succeed(&["copy", "--verify", &second.uri(""), text(&target)]);
    assert_same(&image, &target, "through two servers");
    let maps = [&first, &second].map(|server| peer(&nbdinfo, &["--map", &server.uri("")]));
    assert_eq!(maps[0], maps[1]);
    succeed(&["copy", &third.uri(""), text(&target)]);
    assert_eq!(image::space(&target).unwrap().apparent, 3 << 20);
    image::compare_ranges((&image, 1 << 20), (&target, 0), 3 << 20).unwrap();
}
