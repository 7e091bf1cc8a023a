//! `serve` as a service: figures, new keys while it runs, what it tells a service manager, another user,
//! what it logs, the system calls that it needs.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{self, ErrorKind, Read as _, Write as _};
use std::net::TcpStream;
use std::os::fd::OwnedFd;
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::{UnixDatagram, UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use blockhaul_testkit::peer::Conversation;
use blockhaul_testkit::tools::{
    self, PeerProgram, PeerServer, ScratchDir, SkipReason, skip_or_fail, until, wait_within,
};
use blockhaul_tests::{LIMIT, blockhaul, bounded, done, lossy, run, succeed, text};
use blockhaul_wire::ReplyForm;
use serde_json::Value;

/// A server in the foreground with a log and a control socket. It is killed when this is dropped.
struct Running {
    child: Child,
    socket: PathBuf,
    control: PathBuf,
    log: PathBuf,
}

impl Running {
    #[track_caller]
    fn start(scratch: &ScratchDir, args: &[&str]) -> Running {
        Self::start_with(scratch, args, |command| command)
    }

    #[track_caller]
    fn start_with(
        scratch: &ScratchDir,
        args: &[&str],
        change: impl Fn(&mut Command) -> &mut Command,
    ) -> Running {
        let mut running = Self::spawn(scratch, args, change);
        until(&format!("it listens, says {}", running.log.display()), || {
            assert!(running.child.try_wait().unwrap().is_none(), "{}", running.logged());
            Conversation::connect(&running.socket).is_ok() && running.control.exists()
        });
        running
    }

    /// Does not wait until it is ready.
    fn spawn(
        scratch: &ScratchDir,
        args: &[&str],
        change: impl Fn(&mut Command) -> &mut Command,
    ) -> Running {
        let socket = scratch.socket("s");
        let control = scratch.socket("c");
        let log = scratch.file("log");
        let mut command = blockhaul(&["serve", "--exit-with-parent", "-U", text(&socket)]);
        command.args(["--control", text(&control)]).args(args);
        let child = change(&mut command).stderr(File::create(&log).unwrap()).spawn().unwrap();
        Running { child, socket, control, log }
    }

    fn logged(&self) -> String {
        fs::read_to_string(&self.log).unwrap()
    }

    #[track_caller]
    fn ctl(&self, words: &[&str]) -> String {
        succeed(&[&["ctl", text(&self.control)], words].concat())
    }

    #[track_caller]
    fn signal(&self, name: &str) {
        // The child is not waited for before: its process id is its own.
        done(Command::new("kill").args(["-s", name, &self.child.id().to_string()]));
    }

    #[track_caller]
    fn ends(mut self) {
        self.signal("TERM");
        assert!(wait_within(&mut self.child, LIMIT).unwrap().success(), "{}", self.logged());
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn connected(socket: &Path, export: &str) -> Conversation {
    let mut client = Conversation::connect(socket).unwrap();
    client.hello(3).unwrap();
    client.negotiate(ReplyForm::Structured).unwrap();
    client.go(export).unwrap();
    client
}

/// The value of a figure.
#[track_caller]
fn figure(page: &str, name: &str) -> f64 {
    let line = page.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
    line.unwrap_or_else(|| panic!("no {name} in {page}")).parse().unwrap()
}

/// How often each thread of a process has gone to sleep so far.
fn sleeps(pid: u32) -> BTreeMap<OsString, u64> {
    let threads = fs::read_dir(format!("/proc/{pid}/task")).unwrap();
    let of_thread = |thread: io::Result<fs::DirEntry>| {
        let thread = thread.unwrap();
        // A helper thread may have ended.
        let status = fs::read_to_string(thread.path().join("status")).ok()?;
        let count = status.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"));
        Some((thread.file_name(), count.unwrap().trim().parse().unwrap()))
    };
    threads.filter_map(of_thread).collect()
}

#[test]
fn an_idle_server_does_not_wake_up() {
    let scratch = ScratchDir::new().unwrap();
    let args = ["-p", "0", "-i", "127.0.0.1", "--metrics", "127.0.0.1:0", "memory:1M"];
    let server = Running::start(&scratch, &args);
    // A client that is connected and asks for nothing, too.
    let _client = connected(&server.socket, "");
    const SECONDS: u64 = 5;
    // What belongs to the start may come late on a busy machine.
    let mut least = u64::MAX;
    for _ in 0..5 {
        let before = sleeps(server.child.id());
        std::thread::sleep(Duration::from_secs(SECONDS));
        let after = sleeps(server.child.id());
        let more = after.iter().map(|(thread, count)| count - before.get(thread).unwrap_or(&0));
        least = least.min(more.sum());
        if least <= SECONDS {
            return;
        }
    }
    panic!("threads slept {least} times in {SECONDS} s");
}

#[test]
fn figures_are_what_clients_do() {
    let scratch = ScratchDir::new().unwrap();
    let exports = ["--export", "a\"b=memory:1M", "--export", "b=memory:1M"];
    let metrics = ["--metrics", "127.0.0.1:0", "--layer", "delay?flush=60ms"];
    let server = Running::start(&scratch, &[&exports[..], &metrics[..]].concat());
    // It listens before it says where its figures are.
    let mut address = String::new();
    until("there are figures", || {
        // It may say something else, too, and the last line need not be there whole.
        let logged = server.logged();
        let whole = logged.split_inclusive('\n').filter_map(|line| line.strip_suffix('\n'));
        let mut told =
            whole.filter_map(|line| line.strip_prefix("blockhaul: serve: metrics on http://"));
        address = told.next().unwrap_or_default().trim_end_matches("/metrics").to_string();
        !address.is_empty()
    });
    let address = address.as_str();
    let page = || {
        let mut peer = TcpStream::connect(address).unwrap();
        peer.write_all(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n").unwrap();
        let mut page = String::new();
        peer.read_to_string(&mut page).unwrap();
        page
    };
    let mut one = connected(&server.socket, "b");
    for _ in 0..100 {
        one.read(512, 1024).unwrap();
    }
    one.write(0, &[1; 512]).unwrap();
    let flush = one.request(blockhaul_wire::CommandCode::Flush, 0, 0);
    one.ask(&flush, &[]).unwrap();
    let beyond = one.request(blockhaul_wire::CommandCode::Read, 1 << 20, 1);
    one.ask(&beyond, &[]).unwrap();
    let two = connected(&server.socket, "a\"b");
    let mut broken = UnixStream::connect(&server.socket).unwrap();
    broken.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
    broken.read_to_end(&mut Vec::new()).unwrap();
    // What an answer or an end was counted as may be seen a moment after it.
    until("it leaves", || {
        let page = page();
        let of = |name: &str| figure(&page, &format!("blockhaul_serve_{name}"));
        of("connections") == 2.0
            && of("handshakes_failed_total") >= 1.0
            && of("request_errors_total{export=\"b\"}") == 1.0
            && of("requests_in_flight{export=\"b\"}") == 0.0
    });
    let check = |page: &str| {
        let of = |name: &str| figure(page, &format!("blockhaul_serve_{name}"));
        assert_eq!(of("requests_total{export=\"b\",kind=\"read\"}"), 101.0);
        assert_eq!(of("bytes_total{export=\"b\",kind=\"read\"}"), 102_400.0);
        assert_eq!(of("bytes_total{export=\"b\",kind=\"write\"}"), 512.0);
        assert_eq!(of("request_errors_total{export=\"b\"}"), 1.0);
        assert_eq!(of("requests_in_flight{export=\"b\"}"), 0.0);
        assert!(of("handshakes_failed_total") >= 1.0);
        assert!(of("connections_total{result=\"accepted\"}") >= 4.0);
        // All but the last few of those that were answered at once.
        let reads = of("request_duration_seconds_count{kind=\"read\"}");
        assert!((86.0..=101.0).contains(&reads), "{reads}");
        assert_eq!(of("request_duration_seconds_count{kind=\"flush\"}"), 1.0);
        assert_eq!(of("request_duration_seconds_bucket{kind=\"flush\",le=\"0.025\"}"), 0.0);
        assert!(of("request_duration_seconds_sum{kind=\"flush\"}") >= 0.03);
    };
    let text = page();
    check(&text);
    assert_eq!(figure(&text, "blockhaul_serve_clients{export=\"a\\\"b\"}"), 1.0);
    assert!(text.contains("200 OK\r\n") && text.contains("text/plain; version=0.0.4"), "{text}");
    // What has left still counts, and the control socket says the same.
    drop((one, two));
    until("they leave", || {
        let page = page();
        figure(&page, "blockhaul_serve_connections") == 0.0
            && figure(&page, "blockhaul_serve_clients{export=\"b\"}") == 0.0
    });
    let told = server.ctl(&["metrics"]);
    check(&told);
    assert_eq!(figure(&told, "blockhaul_serve_clients{export=\"b\"}"), 0.0);
    server.ends();
    assert!(TcpStream::connect(address).is_err());
}

#[test]
fn keys_are_read_again_and_sessions_stay() {
    let scratch = ScratchDir::new().unwrap();
    let keys = scratch.file("keys");
    let later = scratch.file("later");
    succeed(&["tls", "init", "--psk", "alice", text(&keys)]);
    succeed(&["tls", "init", "--psk", "bob", text(&later)]);
    let device = ["--layer", "pause", "pattern:64M"];
    let server =
        Running::start(&scratch, &[&["-r", "--tls-psk", text(&keys)], &device[..]].concat());
    let uri = |user: &str, file: &Path| {
        let socket = text(&server.socket);
        let file = text(file);
        format!("nbds+unix://{user}@/?socket={socket}&tls-psk-file={file}")
    };
    let alice = uri("alice", &scratch.file("alice"));
    let bob = uri("bob", &later);
    fs::copy(&keys, scratch.file("alice")).unwrap();
    succeed(&["info", &alice]);
    assert!(!run(&["info", &bob]).status.success());
    // A session that lasts until it is let go on: with alice's key, which goes meanwhile.
    server.ctl(&["set", "", "pause", "paused=on"]);
    let image = scratch.file("image");
    let mut copy = blockhaul(&["copy", "--no-progress", &alice, text(&image)]);
    let mut copy = copy.spawn().unwrap();
    let tls = || {
        let clients: Value = serde_json::from_str(&server.ctl(&["clients", "--json"])).unwrap();
        let client = &clients["clients"][0];
        client["tls"]["name"] == "alice" && client["in_flight"].as_u64() > Some(0)
    };
    until("it comes", tls);
    assert!(server.ctl(&["clients"]).contains("alice"));
    fs::copy(&later, &keys).unwrap();
    assert_eq!(server.ctl(&["reload"]), "keys and certificates reloaded\n");
    succeed(&["info", "--size", &bob]);
    assert!(!run(&["info", "--size", &alice]).status.success(), "her key is gone");
    server.ctl(&["set", "", "pause", "paused=off"]);
    assert!(wait_within(&mut copy, LIMIT).unwrap().success(), "her session has ended");

    // An invalid file changes nothing, and is reported.
    for broken in ["no colon\n", "carol:xyz\n"] {
        fs::write(&keys, broken).unwrap();
        let output = run(&["ctl", text(&server.control), "reload"]);
        assert_eq!(output.status.code(), Some(1));
        assert!(lossy(&output.stderr).contains("stay in use"), "{}", lossy(&output.stderr));
        succeed(&["info", &bob]);
    }
    fs::remove_file(&keys).unwrap();
    server.signal("HUP");
    until("it tries three times", || server.logged().matches("stay in use").count() == 3);
    succeed(&["info", &bob]);
    fs::copy(scratch.file("alice"), &keys).unwrap();
    server.signal("HUP");
    until("it is read", || run(&["info", &alice]).status.success());
    server.ends();
}

#[test]
fn certificates_are_read_again_and_revoked() {
    let Some(certtool) = PeerProgram::require("certtool") else { return };
    let scratch = ScratchDir::new().unwrap();
    let pki = scratch.file("pki");
    let other = scratch.file("other");
    succeed(&["tls", "init", text(&pki)]);
    succeed(&["tls", "init", text(&other)]);
    let options = ["--tls-certificates", text(&pki), "--tls-verify-peer", "memory:1M"];
    let server = Running::start(&scratch, &options);
    let client = scratch.file("client");
    fs::create_dir(&client).unwrap();
    for name in ["ca-cert.pem", "client-cert.pem", "client-key.pem"] {
        fs::copy(pki.join(name), client.join(name)).unwrap();
    }
    let uri = |dir: &Path| {
        let socket = text(&server.socket);
        let dir = text(dir);
        format!("nbds+unix:///?socket={socket}&tls-certificates={dir}&tls-hostname=localhost")
    };
    succeed(&["info", &uri(&client)]);
    let template = scratch.file("template");
    fs::write(&template, "crl_next_update = 100\ncrl_number = 1\n").unwrap();
    let at = |name: &str| text(&pki.join(name)).to_string();
    let mut command = certtool.command();
    command.args(["--generate-crl", "--load-ca-privkey", &at("ca-key.pem")]);
    command.args(["--load-ca-certificate", &at("ca-cert.pem"), "--template", text(&template)]);
    command.args(["--load-certificate", &at("client-cert.pem"), "--outfile", &at("ca-crl.pem")]);
    done(&mut command);
    succeed(&["info", &uri(&client)]);
    server.signal("HUP");
    until("the revoked one is kept out", || !run(&["info", &uri(&client)]).status.success());
    until("it says why", || server.logged().contains("certificate revoked"));
    // Another authority.
    for name in ["ca-cert.pem", "server-cert.pem", "server-key.pem"] {
        fs::copy(other.join(name), pki.join(name)).unwrap();
    }
    fs::remove_file(pki.join("ca-crl.pem")).unwrap();
    server.ctl(&["reload"]);
    succeed(&["info", &uri(&other)]);
    assert!(!run(&["info", &uri(&client)]).status.success());
    server.ends();
}

#[test]
fn a_service_manager_is_told() {
    let scratch = ScratchDir::new().unwrap();
    let path = scratch.socket("notify");
    let manager = UnixDatagram::bind(&path).unwrap();
    manager.set_read_timeout(Some(LIMIT)).unwrap();
    let heard = || {
        let mut said = [0; 4096];
        loop {
            match manager.recv(&mut said) {
                Ok(len) => return lossy(&said[..len]),
                // As after this process was stopped for a while.
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => panic!("{error}"),
            }
        }
    };
    let keys = scratch.file("keys");
    succeed(&["tls", "init", "--psk", "alice", text(&keys)]);
    let child = scratch.file("child");
    let script = format!("echo \"${{NOTIFY_SOCKET-none}}\" > {}; exec sleep 1000", text(&child));
    let mut server = Running::start_with(
        &scratch,
        &["--tls-psk", text(&keys), "memory:1M", "--run", &script],
        |command| command.env("NOTIFY_SOCKET", &path).env("WATCHDOG_USEC", "400000"),
    );
    let ready = heard();
    let pid = server.child.id();
    assert!(
        ready.starts_with(&format!("READY=1\nMAINPID={pid}\nSTATUS=serving memory:1M")),
        "{ready}"
    );
    assert_eq!(heard(), "WATCHDOG=1");
    assert_eq!(heard(), "WATCHDOG=1");
    server.signal("HUP");
    let next = || loop {
        let said = heard();
        if said != "WATCHDOG=1" {
            return said;
        }
    };
    let reloading = next();
    assert!(reloading.starts_with("RELOADING=1\nMONOTONIC_USEC="), "{reloading}");
    assert!(next().contains("STATUS=reloaded"));
    let mut client = UnixStream::connect(&server.socket).unwrap();
    client.read_exact(&mut [0; 16]).unwrap();
    // Else it may be ended before it has said anything.
    until("the child says something", || {
        fs::read_to_string(&child).is_ok_and(|said| said == "none\n")
    });
    server.ctl(&["drain"]);
    assert!(next().starts_with("STATUS=draining"));
    drop(client);
    assert!(next().starts_with("STOPPING=1\nSTATUS="));
    // It ends its child first.
    assert!(wait_within(&mut server.child, LIMIT).unwrap().success(), "{}", server.logged());
}

#[test]
fn it_runs_as_another_user_once_it_listens() {
    if rustix::process::geteuid().as_raw() != 0 {
        return skip_or_fail(&SkipReason::new("only root may become others"));
    }
    let scratch = ScratchDir::new().unwrap();
    let disk = scratch.file("disk");
    fs::write(&disk, [7; 4096]).unwrap();
    fs::set_permissions(&disk, fs::Permissions::from_mode(0o600)).unwrap();
    fs::set_permissions(scratch.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let server = Running::start(&scratch, &["--user", "nobody", text(&disk)]);
    server.ctl(&["clients"]);
    let uid = done(Command::new("id").args(["-u", "nobody"]));
    let gid = done(Command::new("id").args(["-g", "nobody"]));
    let groups = done(Command::new("id").args(["-G", "nobody"]));
    let four = |number: &str| [number.trim(); 4].join("\t");
    let mut seen = 0;
    for task in fs::read_dir(format!("/proc/{}/task", server.child.id())).unwrap() {
        // A thread that has ended meanwhile has none.
        let Ok(status) = fs::read_to_string(task.unwrap().path().join("status")) else { continue };
        seen += 1;
        let line = |name: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(name));
            line.unwrap().trim().to_string()
        };
        assert_eq!((line("Uid:"), line("Gid:")), (four(&uid), four(&gid)));
        assert_eq!(line("Groups:"), groups.trim());
        assert_eq!(line("CapEff:"), "0000000000000000");
    }
    assert!(seen > 1, "{seen} threads");
    // What was opened before is served, and written.
    let mut client = connected(&server.socket, "");
    assert_eq!(client.read(0, 4).unwrap(), [7; 4]);
    assert_eq!(client.write(0, &[8; 512]).unwrap(), 0);
    drop(client);
    server.ends();

    for (args, status, word) in [
        (["--user", "no such user"], 2, "there is no user"),
        (["--group", "no such group"], 2, "there is no group"),
        (["--user", "4000000000"], 2, "its group must be given"),
    ] {
        let socket = scratch.socket("t");
        let args = [&["serve", "-f", "-U", text(&socket), "memory:1M"], &args[..]].concat();
        let output = run(&args);
        let said = lossy(&output.stderr);
        assert!(output.status.code() == Some(status) && said.contains(word), "{said}");
    }
    // Missing permission is reported.
    let socket = scratch.socket("u");
    let mut command = Command::new("setpriv");
    command.args(["--reuid=65534", "--regid=65534", "--clear-groups"]);
    let shared = scratch.file("shared");
    fs::create_dir(&shared).unwrap();
    fs::set_permissions(&shared, fs::Permissions::from_mode(0o777)).unwrap();
    let program = shared.join("blockhaul");
    fs::copy(blockhaul_tests::program(), &program).unwrap();
    command.arg(&program).args(["serve", "-f", "-U", text(&shared.join("s"))]);
    command.args(["--user", "root", "memory:1M"]);
    let output = bounded(&mut command, LIMIT);
    assert_eq!(output.status.code(), Some(3), "{}", lossy(&output.stderr));
    assert!(lossy(&output.stderr).contains("start it as root"), "{}", lossy(&output.stderr));
    assert!(!socket.exists());
}

#[test]
fn a_failure_is_json_where_wanted() {
    let args = ["serve", "-f", "--log-format", "json", "--run", "true", "/nonexistent/disk"];
    let output = run(&args);
    let failure: Value = serde_json::from_str(&lossy(&output.stderr)).unwrap();
    assert_eq!((output.status.code(), &failure["level"]), (Some(3), &Value::from("error")));
}

#[test]
fn a_lost_terminal_ends_it_and_another_hangup_does_not() {
    let Some(python) = PeerProgram::require("python3") else { return };
    let scratch = ScratchDir::new().unwrap();
    let socket = scratch.socket("s");
    let script = "import os, pty, signal, sys, time\n\
                  def wait(is_, what):\n\
                  \x20   end = time.monotonic() + 60\n\
                  \x20   while not is_():\n\
                  \x20       assert time.monotonic() < end, what\n\
                  \x20       time.sleep(0.01)\n\
                  pid, terminal = pty.fork()\n\
                  if pid == 0: os.execv(sys.argv[1], sys.argv[1:])\n\
                  wait(lambda: os.path.exists(sys.argv[-1]), 'no socket')\n\
                  os.kill(pid, signal.SIGHUP)\n\
                  said = b''\n\
                  while b'reloaded' not in said: said += os.read(terminal, 4096)\n\
                  assert os.waitpid(pid, os.WNOHANG) == (0, 0), 'it has ended'\n\
                  os.close(terminal)\n\
                  left = [0, 0]\n\
                  def ended():\n\
                  \x20   left[:] = os.waitpid(pid, os.WNOHANG)\n\
                  \x20   return left[0] == pid\n\
                  wait(ended, 'it goes on')\n\
                  assert left[1] == 0, left\n";
    let mut command = python.command();
    command.args(["-c", script]).arg(blockhaul_tests::program());
    // With keys it reports when it has handled a hangup.
    let keys = scratch.file("keys");
    succeed(&["tls", "init", "--psk", "alice", text(&keys)]);
    command.args(["serve", "--exit-with-parent", "-v", "--tls-psk", text(&keys)]);
    command.args(["memory:1M", "-U"]).arg(&socket);
    done(&mut command);
    assert!(!socket.exists());
}

#[test]
fn a_hangup_before_it_is_ready_reloads_the_keys() {
    let scratch = ScratchDir::new().unwrap();
    let upstream = scratch.socket("upstream");
    let listener = UnixListener::bind(&upstream).unwrap();
    let keys = scratch.file("keys");
    succeed(&["tls", "init", "--psk", "alice", text(&keys)]);
    let source = format!("nbd+unix://?socket={}", text(&upstream));
    let args = ["-v", "--tls-psk", text(&keys), &source];
    let server = Running::spawn(&scratch, &args, |command| command);
    // It waits for the source, and has read the keys.
    let (connection, _) = listener.accept().unwrap();
    drop(listener);
    let status = format!("/proc/{}/status", server.child.id());
    until("it handles signals", || {
        let status = fs::read_to_string(&status).unwrap();
        let caught = status.lines().find_map(|line| line.strip_prefix("SigCgt:")).unwrap();
        u64::from_str_radix(caught.trim(), 16).unwrap() & 1 != 0
    });
    server.signal("HUP");
    let mut single = blockhaul(&["serve", "--single", "memory:1M"]);
    single.stdin(OwnedFd::from(connection.try_clone().unwrap())).stdout(OwnedFd::from(connection));
    let mut single = single.spawn().unwrap();
    until("it has reloaded", || server.logged().contains("certificates reloaded"));
    server.ends();
    assert!(wait_within(&mut single, LIMIT).unwrap().success());
}

#[test]
fn a_socket_that_a_dead_process_leaves_to_another_is_waited_for() {
    let Some(python) = PeerProgram::require("python3") else { return };
    let scratch = ScratchDir::new().unwrap();
    let path = scratch.file("ctl");
    // The kernel holds the socket of a killed server in the same way, on a busy machine.
    let script = "import os, socket, sys, time\n\
                  listener = socket.socket(socket.AF_UNIX)\n\
                  listener.bind(sys.argv[1])\n\
                  listener.listen(100)\n\
                  if os.fork(): os._exit(0)\n\
                  sys.stdout.close(), os.close(1), os.close(2)\n\
                  time.sleep(2.5)\n";
    done(python.command().args(["-c", script]).arg(&path));
    succeed(&["serve", "--control", text(&path), "--run", "true", "memory:1M"]);
}

/// The shell that led the session says so a moment after the terminal is gone, and the server began in between.
#[test]
fn a_terminal_that_was_lost_before_it_began_ends_it() {
    let Some(python) = PeerProgram::require("python3") else { return };
    let scratch = ScratchDir::new().unwrap();
    let socket = scratch.socket("s");
    let script = "import os, pty, signal, sys, time\n\
                  def wait(is_):\n\
                  \x20   end = time.monotonic() + 60\n\
                  \x20   while not is_():\n\
                  \x20       if time.monotonic() > end: os._exit(2)\n\
                  \x20       time.sleep(0.01)\n\
                  def lost():\n\
                  \x20   try: os.close(os.open('/dev/tty', os.O_RDONLY))\n\
                  \x20   except OSError: return True\n\
                  shell, terminal = pty.fork()\n\
                  if shell == 0:\n\
                  \x20   signal.signal(signal.SIGHUP, signal.SIG_IGN)\n\
                  \x20   os.write(1, b'x')\n\
                  \x20   wait(lost)\n\
                  \x20   pid = os.fork()\n\
                  \x20   if pid == 0:\n\
                  \x20       signal.signal(signal.SIGHUP, signal.SIG_DFL)\n\
                  \x20       os.execv(sys.argv[1], sys.argv[1:])\n\
                  \x20   wait(lambda: os.path.exists(sys.argv[-1]))\n\
                  \x20   os.kill(pid, signal.SIGHUP)\n\
                  \x20   left = [0, 0]\n\
                  \x20   def ended():\n\
                  \x20       left[:] = os.waitpid(pid, os.WNOHANG)\n\
                  \x20       return left[0] == pid\n\
                  \x20   wait(ended)\n\
                  \x20   os._exit(0 if left[1] == 0 else 3)\n\
                  os.read(terminal, 1)\n\
                  os.close(terminal)\n\
                  assert os.waitpid(shell, 0)[1] == 0, 'it goes on'\n";
    let mut command = python.command();
    command.args(["-c", script]).arg(blockhaul_tests::program());
    command.args(["serve", "--exit-with-parent", "memory:1M", "-U"]).arg(&socket);
    done(&mut command);
    assert!(!socket.exists());
}

/// The unit file that is an example.
fn unit() -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../examples/systemd/blockhaul.service");
    fs::read_to_string(path).unwrap()
}

#[test]
fn the_unit_allows_the_system_calls_that_a_server_makes() {
    let Some(strace) = PeerProgram::require("strace") else { return };
    let unit = unit();
    let allowed: BTreeSet<&str> = unit
        .lines()
        .filter_map(|line| line.strip_prefix("SystemCallFilter="))
        .flat_map(str::split_whitespace)
        .collect();
    assert!(allowed.len() > 50 && !allowed.contains("ptrace"), "{allowed:?}");
    let mut used = BTreeSet::new();
    for engine in ["uring", "threads"] {
        let scratch = ScratchDir::new().unwrap();
        let disk = scratch.file("disk");
        File::create(&disk).unwrap().set_len(8 << 20).unwrap();
        let keys = scratch.file("keys");
        let trace = scratch.file("trace");
        succeed(&["tls", "init", "--psk", "alice", text(&keys)]);
        let socket = scratch.socket("s");
        let control = scratch.socket("c");
        let mut command = strace.command();
        command.args(["-f", "-qq", "-o", text(&trace)]).arg(blockhaul_tests::program());
        command.args(["serve", "-f", "--engine", engine, "-U", text(&socket)]);
        command.args(["--control", text(&control), "--tls", "on", "--tls-psk", text(&keys)]);
        command.args(["-p", "0", "-i", "127.0.0.1", "--metrics", "127.0.0.1:0", text(&disk)]);
        let Ok(mut child) = command.stdout(File::create(scratch.file("out")).unwrap()).spawn()
        else {
            return skip_or_fail(&SkipReason::new("strace does not run"));
        };
        // The control socket is there before the server listens.
        until("it listens", || {
            UnixStream::connect(&socket).is_ok() || child.try_wait().unwrap().is_some()
        });
        if child.try_wait().unwrap().is_some() {
            return skip_or_fail(&SkipReason::new(format!("strace with --engine {engine} ends")));
        }
        let plain = format!("nbd+unix:///?socket={}", text(&socket));
        let secure =
            format!("nbds+unix://alice@/?socket={}&tls-psk-file={}", text(&socket), text(&keys));
        for uri in [&plain, &secure] {
            succeed(&["copy", "--no-progress", "--flush", "sample:8M", uri]);
            succeed(&["copy", "--no-progress", uri, text(&scratch.file("copy"))]);
            succeed(&["map", uri]);
        }
        for words in [&["clients"][..], &["metrics"], &["reload"], &["stop", "--wait"]] {
            succeed(&[&["ctl", text(&control)], words].concat());
        }
        assert!(wait_within(&mut child, LIMIT).unwrap().success());
        for line in fs::read_to_string(&trace).unwrap().lines() {
            let call = line.split_whitespace().nth(1).unwrap_or_default();
            let name = call.split('(').next().unwrap_or_default();
            if call.contains('(') && name.bytes().all(|c| c.is_ascii_alphanumeric() || c == b'_') {
                used.insert(name.to_string());
            }
        }
    }
    let missing: Vec<_> = used.iter().filter(|call| !allowed.contains(call.as_str())).collect();
    assert!(missing.is_empty(), "add to SystemCallFilter: {missing:?}");
}

/// A program of systemd's, which needs not run here; a test that needs it is skipped else.
fn of_systemd(name: &str) -> Option<Command> {
    let there = Command::new(name).arg("--version").stdout(Stdio::null()).status();
    if !there.is_ok_and(|status| status.success()) {
        tools::skip(format!("{name} is not installed"));
        return None;
    }
    Some(Command::new(name))
}

#[test]
fn systemd_understands_the_units() {
    let Some(mut analyze) = of_systemd("systemd-analyze") else { return };
    let scratch = ScratchDir::new().unwrap();
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../examples/systemd");
    analyze.args(["verify", "--man=no"]);
    for name in ["blockhaul.service", "blockhaul.socket", "blockhaul-mount.service"] {
        // The program has to be there.
        let unit = fs::read_to_string(folder.join(name)).unwrap();
        let unit = unit.replace("/usr/bin/blockhaul", text(blockhaul_tests::program()));
        fs::write(scratch.file(name), unit).unwrap();
        analyze.arg(scratch.file(name));
    }
    let output = bounded(&mut analyze, LIMIT);
    let said = lossy(&output.stderr);
    assert!(output.status.success() && !said.contains("blockhaul."), "{said}");
    // Words that it does not know are only warned of.
    let unit = scratch.file("blockhaul.service");
    fs::write(&unit, fs::read_to_string(&unit).unwrap() + "\n[Service]\nKillMood=mixed\n").unwrap();
    let said = lossy(&bounded(&mut analyze, LIMIT).stderr);
    assert!(said.contains("blockhaul.service") && said.contains("KillMood"), "{said}");
}

/// The unit with an instance, as systemd loads it, and with the program under test.
fn instance(scratch: &ScratchDir, name: &str, of: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../examples/systemd");
    let unit = fs::read_to_string(folder.join(name)).unwrap();
    let unit = unit.replace("/usr/bin/blockhaul", text(blockhaul_tests::program()));
    // The template is beside it: a timer starts the instance of its service.
    fs::write(scratch.file(name), &unit).unwrap();
    let path = scratch.file(&name.replace('@', &format!("@{of}")));
    fs::write(&path, unit).unwrap();
    path
}

#[test]
fn systemd_understands_the_units_of_backups_and_finds_them_confined() {
    let Some(mut analyze) = of_systemd("systemd-analyze") else { return };
    let scratch = ScratchDir::new().unwrap();
    analyze
        .args(["verify", "--man=no"])
        .env("SYSTEMD_UNIT_PATH", format!("{}:", scratch.path().display()));
    for name in
        ["blockhaul-failed@.service", "blockhaul-pull@.service", "blockhaul-restore-test@.service"]
    {
        analyze.arg(instance(&scratch, name, "vm1"));
    }
    for name in ["blockhaul-pull@.timer", "blockhaul-restore-test@.timer"] {
        analyze.arg(instance(&scratch, name, "vm1"));
    }
    let output = bounded(&mut analyze, LIMIT);
    let said = lossy(&output.stderr);
    assert!(output.status.success() && !said.contains("blockhaul-"), "{said}");
    for name in ["blockhaul-pull@vm1.service", "blockhaul-restore-test@vm1.service"] {
        let mut security = Command::new("systemd-analyze");
        // 2.5 of 10: 0 is the least exposure.
        security
            .args(["security", "--offline=true", "--threshold=25", "--no-pager"])
            .arg(scratch.file(name));
        let output = bounded(&mut security, LIMIT);
        assert!(output.status.success(), "{}{}", lossy(&output.stdout), lossy(&output.stderr));
    }
}

#[test]
fn systemd_understands_the_drop_ins_of_the_page() {
    let page = include_str!("../../../docs/backups.md");
    let drop_ins: Vec<_> = page.split("```ini\n").skip(1).collect();
    assert_eq!(drop_ins.len(), 3, "libvirt, QEMU, and a served disk");
    for drop_in in drop_ins {
        let drop_in = drop_in.split("```").next().unwrap();
        let Some(mut analyze) = of_systemd("systemd-analyze") else { return };
        let scratch = ScratchDir::new().unwrap();
        let program = text(blockhaul_tests::program());
        let drop_in = drop_in.replace("/usr/local/sbin/pull-vm1", program);
        let unit = instance(&scratch, "blockhaul-pull@.service", "vm1");
        instance(&scratch, "blockhaul-failed@.service", "vm1");
        let folder = scratch.file("blockhaul-pull@vm1.service.d");
        fs::create_dir(&folder).unwrap();
        let check = |analyze: &mut Command, text: &str| {
            let text = text.replace("/usr/bin/blockhaul", program);
            fs::write(folder.join("override.conf"), text).unwrap();
            lossy(&bounded(analyze, LIMIT).stderr)
        };
        analyze
            .args(["verify", "--man=no"])
            .env("SYSTEMD_UNIT_PATH", format!("{}:", scratch.path().display()))
            .arg(unit);
        let said = check(&mut analyze, &drop_in);
        assert!(!said.contains("blockhaul-"), "{said}");
        let said = check(&mut analyze, &drop_in.replace("ExecStart=", "ExecStrat="));
        assert!(said.contains("ExecStrat"), "{said}");
    }
}

#[test]
fn systemd_starts_it_for_the_first_client() {
    let Some(nbdinfo) = PeerProgram::require("nbdinfo") else { return };
    let scratch = ScratchDir::new().unwrap();
    for (name, how, words) in [
        ("all", &[][..], &["memory:1M"][..]),
        // One process for each client.
        ("each", &["--accept", "--inetd"], &["--single", "memory:1M"]),
    ] {
        let Some(mut activate) = of_systemd("systemd-socket-activate") else { return };
        let one = scratch.socket(name);
        let two = scratch.socket(&format!("{name}2"));
        activate.args(["-l", text(&one), "-l", text(&two)]).args(how);
        activate.arg(blockhaul_tests::program()).arg("serve").args(words);
        let server = PeerServer::start(activate, &two).unwrap();
        for socket in [&one, &two, &one] {
            let uri = format!("nbd+unix:///?socket={}", text(socket));
            let size = done(nbdinfo.command().args(["--size", &uri]));
            assert_eq!(size, "1048576\n", "{}", server.said());
        }
        // The server has the process id of what listened for it, if there is one for all clients.
        let status = server.stop().unwrap();
        assert!(status.success() || name == "each", "{status}");
    }
}
