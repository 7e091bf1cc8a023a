//! From the start to the stop: readiness, the background, `--run`, signals.

use super::*;

/// Ends the server with this file of its process ID, and waits until its files are gone.
#[track_caller]
fn end(pidfile: &Path, others: &[&Path]) {
    let server = std::fs::read_to_string(pidfile).unwrap().trim().parse().unwrap();
    kill_process(pid(server), Signal::TERM).unwrap();
    tools::until_ok("its files are gone", || {
        others.iter().chain([&pidfile]).find(|file| file.exists()).map_or(Ok(()), Err)
    });
}

#[test]
fn in_the_background_it_returns_when_ready_and_cleans_up_when_stopped() {
    let scratch = ScratchDir::new().unwrap();
    let socket = scratch.socket("s");
    let pidfile = scratch.file("pid");
    let uri = format!("nbd+unix:///disk?socket={}", socket.display());
    let s = socket.to_str().unwrap();
    let p = pidfile.to_str().unwrap();
    let output =
        blockhaul(&["serve", "--background", "-U", s, "-P", p, "-e", "disk", "memory:64M"]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert_eq!(text(&blockhaul(&["info", "--size", &uri]).stdout), "67108864\n");
    end(&pidfile, &[&socket]);
}

#[test]
fn in_the_background_relative_names_keep_their_meaning() {
    let scratch = ScratchDir::new().unwrap();
    std::fs::write(scratch.file("disk.raw"), vec![7; 1 << 20]).unwrap();
    let socket = scratch.socket("s");
    let s = socket.to_str().unwrap();
    // Each client opens the disk.
    let mut command = Command::new(OURS);
    command.current_dir(scratch.path()).args(["serve", "--background", "-U", s, "-P", "pid"]);
    command.args(["--per-client", "--control", "ctl", "--export", "a=disk.raw"]);
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", text(&output.stderr));
    let uri = format!("nbd+unix:///a?socket={s}");
    assert_eq!(text(&blockhaul(&["info", "--size", &uri]).stdout), "1048576\n");
    end(&scratch.file("pid"), &[&scratch.file("ctl")]);
}

#[test]
fn in_the_background_bitmaps_are_kept_in_a_relative_directory() {
    let scratch = ScratchDir::new().unwrap();
    std::fs::write(scratch.file("disk.raw"), vec![7; 1 << 20]).unwrap();
    std::fs::create_dir(scratch.file("bitmaps")).unwrap();
    let socket = scratch.socket("s");
    let mut command = Command::new(OURS);
    command.current_dir(scratch.path()).args(["serve", "--background", "-P", "pid", "-U"]);
    command.arg(&socket).args(["--control", "ctl", "--bitmaps", "bitmaps", "disk.raw"]);
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", text(&output.stderr));
    let control = scratch.file("ctl");
    let added = blockhaul(&["ctl", control.to_str().unwrap(), "bitmap-add", "", "b0"]);
    assert!(added.status.success(), "{}", text(&added.stderr));
    end(&scratch.file("pid"), &[]);
    let kept = std::fs::read_dir(scratch.file("bitmaps")).unwrap().count();
    assert_eq!(kept, 1, "the file of the bitmap");
}

#[test]
fn in_the_background_a_failure_is_told_before_it_returns() {
    let scratch = ScratchDir::new().unwrap();
    let socket = scratch.socket("s");
    assert_fails(
        &["serve", "--background", "-U", socket.to_str().unwrap(), "/no/such/file"],
        3,
        &["/no/such/file"],
    );
    assert!(!socket.exists());
}

#[test]
fn in_the_background_a_failure_to_print_leaves_no_server() {
    let scratch = ScratchDir::new().unwrap();
    let socket = scratch.socket("s");
    let script = "exec \"$0\" serve --background -U \"$1\" --print-uri memory:1M >/dev/full";
    let mut command = Command::new("sh");
    let output = tools::output(command.args(["-c", script, OURS]).arg(&socket), LIMIT).unwrap();
    let said = text(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("standard output"), "{said}");
    assert!(!socket.exists());
}

#[test]
fn data_that_a_cache_cannot_write_back_is_no_success() {
    let copy = format!("{OURS} copy pattern:1M \"$uri\"");
    for below in ["error?error=EIO&flush=100%", "error?error=ENOSPC&write=100%"] {
        let layers = ["--layer", below, "--layer", "cache"];
        let output = blockhaul(&[&["serve"], &layers[..], &["--run", &copy, "memory:1M"]].concat());
        let said = text(&output.stderr);
        assert!(said.contains("cache: written data is lost"), "{below}: {said}");
        assert_eq!(output.status.code(), Some(5), "{below}: {said}");
    }
    let output = blockhaul(&["serve", "--layer", "cache", "--run", &copy, "memory:1M"]);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
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
fn the_uri_comes_with_a_command_of_this_program() {
    let output = blockhaul(&["serve", "--print-uri", "--run", "true", "memory:1M"]);
    let said = text(&output.stdout);
    assert!(
        said.contains("\n  blockhaul info 'nbd+unix://") && !said.contains("nbdinfo"),
        "{said}"
    );
}

#[test]
fn a_private_socket_is_removed() {
    let output = blockhaul(&["serve", "-U", "-", "--run", "echo $unixsocket", "memory:1M"]);
    let said = text(&output.stdout);
    let socket = Path::new(said.trim());
    assert!(socket.is_absolute() && !socket.exists(), "{said}");
    assert!(!socket.parent().unwrap().exists(), "{said}");
}

/// A connection to a server that has just been started.
fn connected<T, E: std::fmt::Debug>(server: &mut Child, connect: impl Fn() -> Result<T, E>) -> T {
    tools::until_ok("it listens", || {
        assert_eq!(server.try_wait().unwrap(), None);
        connect()
    })
}

#[test]
fn it_stops_with_idle_and_half_connected_clients() {
    for signal in [Signal::TERM, Signal::INT] {
        let scratch = ScratchDir::new().unwrap();
        let socket = scratch.socket("s");
        let mut command = Command::new(OURS);
        command.args(["serve", "-f", "--exit-with-parent", "memory:1M", "-U"]).arg(&socket);
        let mut server = command.spawn().unwrap();
        let silent = connected(&mut server, || UnixStream::connect(&socket));
        let mut idle = blockhaul_testkit::peer::Conversation::connect(&socket).unwrap();
        idle.open("", blockhaul_wire::ReplyForm::Structured).unwrap();
        kill_process(pid(server.id()), signal).unwrap();
        // Not asked again: a second signal is another matter.
        let ended = tools::wait_within(&mut server, LIMIT);
        assert!(ended.is_some_and(|status| status.success()), "{signal:?}: {ended:?}");
        assert!(!socket.exists(), "{signal:?}");
        drop((silent, idle));
    }
}

#[test]
fn a_command_that_runs_is_stopped_with_the_server() {
    let mut server = Command::new(OURS)
        .args(["serve", "memory:1M", "--run", "echo ready; exec sleep 600"])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut line = String::new();
    BufReader::new(server.stdout.take().unwrap()).read_line(&mut line).unwrap();
    let begun = Instant::now();
    kill_process(pid(server.id()), Signal::TERM).unwrap();
    assert_eq!(server.wait().unwrap().code(), Some(143));
    assert!(begun.elapsed() < Duration::from_secs(300));
}

#[test]
fn what_cannot_be_served_is_said_in_one_line() {
    let scratch = ScratchDir::new().unwrap();
    let taken = scratch.file("taken");
    std::fs::write(&taken, "").unwrap();
    let taken = taken.to_str().unwrap();
    assert_fails(&["serve", "-f", "-U", taken, "memory:1M"], 3, &["no socket", "another name"]);
    assert_fails(&["serve", "-f", "-U", "/no/dir/s", "memory:1M"], 3, &["/no/dir/s"]);
    let long = format!("/{}", "x".repeat(200));
    assert_fails(&["serve", "-f", "-U", &long, "memory:1M"], 3, &["107 bytes"]);
    assert_fails(&["serve", "-f", "tape:1M"], 2, &["tape", "known are", "memory"]);
    assert_fails(&["serve", "-f", "memory:1M?sise=1"], 2, &["sise"]);
    assert_fails(&["serve", "-f", "memory:lots"], 2, &["lots", "not a size"]);
    assert_fails(
        &["serve", "-f", "--layer", "ratte", "memory:1M"],
        2,
        &["ratte", "did you mean rate?"],
    );
    assert_fails(&["serve", "-f", "-"], 2, &["pipe"]);
    assert_fails(&["serve", "-f", "[", "memory:1M"], 2, &["[ without ]"]);
    let busy = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = busy.local_addr().unwrap().port().to_string();
    let args = ["serve", "-f", "-i", "127.0.0.1", "-p", &port, "memory:1M"];
    assert_fails(&args, 3, &[port.as_str(), "choose another one with -p"]);
}

#[test]
fn a_stop_gives_up_what_devices_hold_and_says_so() {
    let scratch = ScratchDir::new().unwrap();
    let socket = scratch.socket("s");
    let own = socket.to_str().unwrap();
    let log = scratch.file("log");
    let serve = ["serve", "-f", "--exit-with-parent", "-U", own, "memory:1M", "-e", "disk"];
    let slow = ["--layer", "delay?read=1000s&zero=200ms", "--drain-timeout"];
    for second in [false, true] {
        let mut command = Command::new(OURS);
        command.args(serve).args(slow).arg(if second { "1000s" } else { "300ms" });
        let mut server = command.stderr(std::fs::File::create(&log).unwrap()).spawn().unwrap();
        let mut client =
            connected(&mut server, || blockhaul_testkit::peer::Conversation::connect(&socket));
        client.open("disk", blockhaul_wire::ReplyForm::Structured).unwrap();
        let read = client.request(blockhaul_wire::CommandCode::Read, 4096, 512);
        client.send_request(&read, &[]).unwrap();
        let zero = client.request(blockhaul_wire::CommandCode::WriteZeroes, 8192, 512);
        if second {
            client.send_request(&zero, &[]).unwrap();
        }
        // Requests are begun in order: once this one is answered, the device has the others.
        let write = client.request(blockhaul_wire::CommandCode::Write, 0, 512);
        assert_eq!(client.ask(&write, &[1; 512]).unwrap().error, 0);
        let begun = Instant::now();
        kill_process(pid(server.id()), Signal::TERM).unwrap();
        if second {
            // One that arrives before the first was handled counts as the same signal.
            tools::until("nobody listens", || UnixStream::connect(&socket).is_err());
            let answer = client.receive_answer(&zero).unwrap();
            assert_eq!((answer.error, server.try_wait().unwrap()), (0, None), "it waits");
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
        assert!(begun.elapsed() < Duration::from_secs(300), "{:?}", begun.elapsed());
        assert!(!socket.exists(), "it cleans up");
    }
}

#[test]
fn the_socket_of_a_killed_server_is_replaced_and_that_of_a_living_one_is_not() {
    let scratch = ScratchDir::new().unwrap();
    let socket = scratch.socket("s");
    let start = || Command::new(OURS).args(["serve", "-f", "memory:1M", "-U"]).arg(&socket).spawn();
    let connect = || UnixStream::connect(&socket);
    let mut killed = start().unwrap();
    connected(&mut killed, connect);
    killed.kill().unwrap();
    killed.wait().unwrap();
    assert!(socket.exists());
    let mut server = start().unwrap();
    // The kernel may still hold the first one's socket, and accept connections: only a server answers.
    connected(&mut server, || blockhaul_testkit::peer::Conversation::connect(&socket)?.hello(3));
    let path = socket.to_str().unwrap();
    assert_fails(&["serve", "-f", "-U", path, "memory:1M"], 3, &["listens there", path]);
    connect().unwrap();
    kill_process(pid(server.id()), Signal::TERM).unwrap();
    assert!(server.wait().unwrap().success());
    assert!(!socket.exists());
}

/// Starts a server, has a client open its export, and stops it: status and time. Where the export never
/// opens, this file shows that its script runs.
fn stopped(args: &[&str], opening: Option<&Path>) -> (Option<i32>, Duration, String) {
    let scratch = ScratchDir::new().unwrap();
    let socket = scratch.socket("s");
    let mut command = Command::new(OURS);
    command.args(["serve", "-f", "-U"]).arg(&socket).args(args).stderr(Stdio::piped());
    let mut server = command.spawn().unwrap();
    let mut client =
        connected(&mut server, || blockhaul_testkit::peer::Conversation::connect(&socket));
    if let Some(opening) = opening {
        client.hello(3).unwrap();
        client.send_option(blockhaul_wire::magic::OPT_GO, &[0; 6]).unwrap();
        tools::until("the script runs", || opening.exists());
    } else {
        client.open("", blockhaul_wire::ReplyForm::Structured).unwrap();
    }
    let begun = Instant::now();
    kill_process(pid(server.id()), Signal::TERM).unwrap();
    let status = tools::wait_within(&mut server, LIMIT).and_then(|status| status.code());
    let time = begun.elapsed();
    let mut said = String::new();
    std::io::Read::read_to_string(&mut server.stderr.take().unwrap(), &mut said).unwrap();
    (status, time, said)
}

#[test]
fn a_script_that_hangs_is_given_up_after_the_drain_timeout() {
    for method in ["open", "close", "unload"] {
        let scratch = ScratchDir::new().unwrap();
        let file = |name| scratch.file(name).to_str().unwrap().to_owned();
        let [first, second] = ["first", "second"].map(file);
        let opening = |file| (method == "open").then(|| Path::new(file));
        let script = format!("eval:get_size=echo 1M&{method}=echo >{first}; exec sleep 300");
        let (status, time, said) = stopped(&["--drain-timeout=1s", &script], opening(&first));
        assert_eq!(status, Some(9), "{method}: {said}");
        assert!(said.contains("has not ended in time"), "{method}: {said}");
        // Well below the ten seconds that other commands wait.
        assert!(time < Duration::from_secs(8), "{method}: {time:?}");
        // It is waited for as long as it is to be.
        let script = format!("eval:get_size=echo 1M&{method}=echo >{second}; sleep 3");
        let args = ["--quiet", "--drain-timeout=100s", &script];
        let (status, _, said) = stopped(&args, opening(&second));
        assert_eq!((status, &*said), (Some(0), ""), "{method}");
    }
}

/// A plugin in Python whose process ends at a read. The next one writes its number to a file, and takes
/// a minute to load.
const LOADS_SLOWLY: &str = "
import nbdkit, os, time
API_VERSION = 2
here = os.environ['HERE']
if os.path.exists(here + '/slow'):
    os.mkdir(here + '/loading-%d' % os.getpid())
    time.sleep(60)
def thread_model(): return nbdkit.THREAD_MODEL_PARALLEL
def open(readonly): return 1
def get_size(h): return 1 << 20
def pread(h, buf, offset, flags): os._exit(7)
";

#[test]
fn a_stop_gives_up_the_start_of_a_plugins_process() {
    if tools::PeerProgram::require("python3").is_none() {
        return;
    }
    for processes in [1, 2] {
        let scratch = ScratchDir::new().unwrap();
        std::fs::write(scratch.file("p.py"), LOADS_SLOWLY).unwrap();
        let device = format!("python:{}?@processes={processes}", scratch.file("p.py").display());
        let mut command = Command::new(OURS);
        let socket = scratch.socket("s");
        command.env("HERE", scratch.path()).args(["serve", "--foreground", "--exit-with-parent"]);
        command.args(["--drain-timeout", "4s", "--unix"]).arg(&socket).arg(device);
        let server = PeerServer::start(command, &socket).unwrap();
        std::fs::write(scratch.file("slow"), "").unwrap();
        // Each read ends a process.
        let uri = server.uri("");
        let reading = ["copy", "--no-progress", "--retries=0", "-C", "1", &uri, "null:"];
        assert!(!blockhaul(&reading).status.success());
        // One that waits for a process.
        let mut waiting = Command::new(OURS).args(reading).stderr(Stdio::null()).spawn().unwrap();
        tools::until("a process is being loaded", || {
            let files = std::fs::read_dir(scratch.path()).unwrap();
            let is_loading =
                |name: std::ffi::OsString| name.to_string_lossy().starts_with("loading-");
            files.filter_map(Result::ok).any(|file| is_loading(file.file_name()))
        });
        let status = server.stop().unwrap();
        assert_eq!(status.code(), Some(0), "with {processes} processes");
        assert!(!waiting.wait().unwrap().success());
    }
}

#[test]
fn times_without_an_end_are_taken() {
    let forever = "9223372036854775807";
    let script = format!("eval:get_size=echo 1M&@timeout={forever}");
    for args in [
        &["--drain-timeout", forever, "memory:1M"][..],
        &["--timeout", forever, "memory:1M"],
        &["--limit", &format!("stalled={forever}"), "memory:1M"],
        &[&script],
    ] {
        assert_eq!(stopped(args, None).0, Some(0), "{args:?}");
    }
}

#[test]
fn silent_connections_that_take_all_descriptors_keep_nobody_out() {
    let scratch = ScratchDir::new().unwrap();
    let socket = scratch.socket("s");
    let mut command = Command::new("sh");
    let script = "ulimit -n 64; exec \"$0\" serve -f -U \"$1\" memory:1M";
    command.args(["-c", script, OURS]).arg(&socket).stderr(Stdio::piped());
    let mut server = command.spawn().unwrap();
    connected(&mut server, || UnixStream::connect(&socket));
    let silent: Vec<_> = (0..100).map(|_| UnixStream::connect(&socket).unwrap()).collect();
    let mut client = blockhaul_testkit::peer::Conversation::connect(&socket).unwrap();
    client.open("", blockhaul_wire::ReplyForm::Structured).unwrap();
    assert_eq!(client.read(0, 512).unwrap(), [0; 512]);
    drop((silent, client));
    kill_process(pid(server.id()), Signal::TERM).unwrap();
    assert!(server.wait().unwrap().success());
    let mut said = String::new();
    std::io::Read::read_to_string(&mut server.stderr.take().unwrap(), &mut said).unwrap();
    let lines = said.lines().filter(|line| line.contains("cannot accept")).count();
    assert!((1..=6).contains(&lines), "{said}");
}

#[test]
fn it_stays_in_the_foreground_and_says_what_it_serves_to_whom() {
    let scratch = ScratchDir::new().unwrap();
    let socket = scratch.socket("s");
    let s = socket.to_str().unwrap();
    for (more, wanted) in [
        (
            &["-U", s, "-r"][..],
            format!(
                "serving memory:1M (read-only) at nbd+unix://?socket={s} to users with access to the \
                 socket, without TLS"
            ),
        ),
        (
            &["-i", "127.0.0.1", "-p", "0", "--tls", "off"],
            "to this machine, without TLS".to_string(),
        ),
        (&["-p", "0"], "to every host that reaches it, without TLS; limit that with".to_string()),
    ] {
        let mut command = Command::new(OURS);
        command.arg("serve").args(more).arg("memory:1M");
        let mut server = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(server.stderr.take().unwrap()).read_line(&mut line).unwrap();
        assert!(line.starts_with("blockhaul: ") && line.contains(&wanted), "{line}");
        assert!(server.try_wait().unwrap().is_none(), "it has ended");
        kill_process(pid(server.id()), Signal::TERM).unwrap();
        assert!(server.wait().unwrap().success());
    }
    // Several exports by their names: they may have the same storage.
    let disk = scratch.file("d.raw");
    std::fs::write(&disk, [0; 4096]).unwrap();
    let exports = ["a", "b"].map(|name| format!("{name}={}", disk.display()));
    let memory = ["--export", "c=memory:1M"];
    for (more, wanted) in [
        (&["-r"][..], "serving exports \"a\", \"b\" (read-only) at nbd+unix:"),
        (&memory, "serving exports \"c\", \"a\", \"b\" (\"a\", \"b\" read-only) at nbd+unix:"),
    ] {
        let mut command = Command::new(OURS);
        command.args(["serve", "-U", s]).args(more);
        for export in &exports {
            let (name, disk) = export.split_once('=').unwrap();
            command.args(["--export", &format!("{name}=["), disk, "-r", "]"]);
        }
        let mut server = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(server.stderr.take().unwrap()).read_line(&mut line).unwrap();
        assert!(line.contains(wanted), "{line}");
        kill_process(pid(server.id()), Signal::TERM).unwrap();
        assert!(server.wait().unwrap().success());
    }
    // A command of its own is not disturbed.
    let output = blockhaul(&["serve", "--run", "true", "memory:1M"]);
    assert!(output.status.success() && output.stderr.is_empty(), "{}", text(&output.stderr));
    let output = blockhaul(&["serve", "--background", "--run", "true", "memory:1M"]);
    assert_eq!(output.status.code(), Some(2), "{}", text(&output.stderr));
}

#[test]
fn in_the_background_messages_go_to_a_file_that_standard_error_leads_to() {
    let scratch = ScratchDir::new().unwrap();
    let socket = scratch.socket("s");
    let pidfile = scratch.file("pid");
    let log = scratch.file("log");
    let mut command = Command::new(OURS);
    command.args(["serve", "--background", "--layer", "error?error=EIO&read=100%", "pattern:1M"]);
    command.arg("-U").arg(&socket).arg("-P").arg(&pidfile);
    let status = command.stderr(std::fs::File::create(&log).unwrap()).status().unwrap();
    assert!(status.success());
    let server = pid(std::fs::read_to_string(&pidfile).unwrap().trim().parse().unwrap());
    let uri = format!("nbd+unix:///?socket={}", socket.display());
    let copied = blockhaul(&["copy", "--retries", "0", &uri, "null:"]);
    kill_process(server, Signal::TERM).unwrap();
    assert_eq!(copied.status.code(), Some(4), "{}", text(&copied.stderr));
    let said = std::fs::read_to_string(&log).unwrap();
    assert!(said.contains("serving pattern:1M") && said.contains("EIO"), "{said}");
}

#[test]
fn a_file_that_is_no_pid_file_is_not_overwritten() {
    let scratch = ScratchDir::new().unwrap();
    let socket = scratch.socket("s");
    let pidfile = scratch.file("a.raw");
    let s = socket.to_str().unwrap();
    let p = pidfile.to_str().unwrap();
    for content in [&b"data"[..], &[b'1'; 100]] {
        std::fs::write(&pidfile, content).unwrap();
        assert_fails(&["serve", "-U", s, "-P", p, "memory:1M"], 2, &["--pidfile", p]);
        assert_eq!(std::fs::read(&pidfile).unwrap(), content);
    }
    for content in ["", "4711\n"] {
        std::fs::write(&pidfile, content).unwrap();
        let output = blockhaul(&["serve", "-P", p, "--run", "true", "memory:1M"]);
        assert!(output.status.success(), "{}", text(&output.stderr));
    }
}

#[test]
fn a_socket_belongs_to_the_user_of_the_server() {
    if !rustix::process::geteuid().is_root() {
        return tools::skip("only root changes the user");
    }
    let scratch = ScratchDir::new().unwrap();
    let socket = scratch.socket("s");
    let path = std::path::PathBuf::from(socket.parent().unwrap());
    // The folder of the tests may be below one that only root may enter.
    let own = path.join("blockhaul");
    std::fs::copy(OURS, &own).unwrap();
    let at = socket.display();
    let own = own.display();
    let script = format!("stat -c %u {at}; {own} info --size \"$uri\"");
    std::fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    let output = blockhaul(&[
        "serve",
        "-U",
        socket.to_str().unwrap(),
        "--user",
        "nobody",
        "--run",
        &script,
        "memory:1M",
    ]);
    assert_eq!(text(&output.stdout), "65534\n1048576\n", "{}", text(&output.stderr));
}
