//! `serve --control` and `blockhaul ctl`: what they show is what clients do, and what they change is
//! changed.

use std::fs::{self, File};
use std::io::{BufRead as _, BufReader, ErrorKind, Write as _};
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Output};
use std::time::{Duration, Instant};

use blockhaul_testkit::peer::Conversation;
use blockhaul_testkit::require_peer;
use blockhaul_testkit::tools::{PeerProgram, PeerServer, ScratchDir, until, wait_within};
use blockhaul_tests::{LIMIT, blockhaul, bounded, lossy, run, serve, succeed, text};
use blockhaul_wire::{CommandCode, ReplyForm};
use serde_json::{Value, json};

/// A server with a control socket.
struct Served {
    server: PeerServer,
    control: PathBuf,
}

impl Served {
    #[track_caller]
    fn start(scratch: &ScratchDir, args: &[&str]) -> Served {
        let control = scratch.socket("control");
        let args = [&["--control", text(&control)], args].concat();
        Served { server: serve(scratch, "s", &args), control }
    }

    fn run(&self, words: &[&str]) -> Output {
        run(&[&["ctl", text(&self.control)], words].concat())
    }

    /// What a command that has to succeed prints.
    #[track_caller]
    fn ctl(&self, words: &[&str]) -> String {
        succeed(&[&["ctl", text(&self.control)], words].concat())
    }

    #[track_caller]
    fn json(&self, words: &[&str]) -> Value {
        serde_json::from_str(&self.ctl(&[words, &["--json"]].concat())).unwrap()
    }

    /// A command that has to fail: its status and what it says.
    #[track_caller]
    fn refused(&self, words: &[&str]) -> (i32, String) {
        let output = self.run(words);
        assert!(!output.status.success(), "{words:?}: {}", lossy(&output.stdout));
        let said = lossy(&output.stderr);
        assert_eq!(said.lines().count(), 1, "{said}");
        (output.status.code().unwrap(), said)
    }

    fn clients(&self) -> Vec<Value> {
        self.json(&["clients"])["clients"].as_array().unwrap().clone()
    }

    fn connected(&self, export: &str) -> Conversation {
        let mut client = Conversation::connect(self.server.socket()).unwrap();
        client.hello(3).unwrap();
        client.negotiate(ReplyForm::Structured).unwrap();
        client.go(export).unwrap();
        client
    }
}

/// A process that is killed when this is dropped.
struct Killed(Child);

impl Drop for Killed {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn clients_and_what_they_do_are_shown() {
    let scratch = ScratchDir::new().unwrap();
    let served = Served::start(
        &scratch,
        &[
            "--export",
            "a=memory:1M",
            "--export",
            "b=[",
            "memory:2M",
            "-r",
            "--layer",
            "rate?rate=1G",
            "]",
        ],
    );
    let mode = fs::metadata(&served.control).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600, "others could look after it");
    assert!(served.clients().is_empty());
    let mut one = served.connected("a");
    one.write(0, &[7; 4096]).unwrap();
    one.read(4096, 512).unwrap();
    one.read(0, 512).unwrap();
    let beyond = one.request(CommandCode::Read, 2 << 20, 512);
    assert!(one.ask(&beyond, &[]).unwrap().error != 0);
    let mut silent = Conversation::connect(served.server.socket()).unwrap();
    silent.hello(3).unwrap();
    // What an answer was counted as may be seen a moment after it.
    until("they are counted", || {
        let clients = served.clients();
        clients.len() == 2 && clients[0]["errors"] == 1 && clients[0]["in_flight"] == 0
    });
    let shown = served.clients();
    let [client, silent_one] = &shown[..] else { panic!("{shown:?}") };
    assert_eq!(client["number"], 1);
    assert_eq!(client["export"], "a");
    assert_eq!(client["tls"], Value::Null);
    assert_eq!((&client["requests"]["read"], &client["requests"]["write"]), (&json!(3), &json!(1)));
    assert_eq!((&client["bytes"]["read"], &client["bytes"]["write"]), (&json!(1024), &json!(4096)));
    assert_eq!((&client["errors"], &client["in_flight"]), (&json!(1), &json!(0)));
    assert!(client["age"].as_f64().unwrap() > 0.0 && client["leaving"] == false);
    assert_eq!(silent_one["export"], Value::Null, "its handshake lasts");
    let table = served.ctl(&["clients"]);
    assert!(table.starts_with("CLIENT  ADDRESS"), "{table}");
    assert!(table.contains("1       a local client  a") && table.contains("4.0K"), "{table}");
    assert!(table.contains("(handshake)"), "{table}");

    let exports = served.json(&["exports"]);
    let a = &exports["exports"][0];
    assert_eq!((&a["name"], &a["size"], &a["clients"]), (&json!("a"), &json!(1 << 20), &json!(1)));
    let b = &exports["exports"][1];
    assert_eq!((&b["readonly"], &b["clients"]), (&json!(true), &json!(0)));
    assert_eq!(b["layers"][0]["options"], json!({ "rate": "1G" }));
    let table = served.ctl(&["exports"]);
    assert!(table.contains("b       2.0M  ro    0        memory:2M  rate?rate=1G"), "{table}");

    // A real client that asks several at a time.
    if let Some(qemu) = PeerProgram::require("qemu-io") {
        let mut command = qemu.command();
        command.args(["-f", "raw", "-c", "write -P 5 0 64k", "-c", "read 0 64k"]);
        command.args(["-c", "flush", &served.server.uri("a")]);
        assert!(bounded(&mut command, LIMIT).status.success());
    }
    drop((one, silent));
    until("they leave", || served.clients().is_empty());
}

#[test]
fn one_client_is_sent_away_and_the_others_stay() {
    let scratch = ScratchDir::new().unwrap();
    let layers = ["--layer", "delay?write=0", "--layer", "pause"];
    let served = Served::start(&scratch, &[&["memory:1M"], &layers[..]].concat());
    let mut gone = served.connected("");
    let mut stays = served.connected("");
    // What is in progress is answered.
    served.ctl(&["set", "", "pause", "paused=on"]);
    let write = gone.request(CommandCode::Write, 0, 512);
    gone.send_request(&write, &[1; 512]).unwrap();
    until("it is in progress", || served.clients()[0]["in_flight"] == 1);
    assert!(served.ctl(&["disconnect", "1"]).contains("when its requests are answered"));
    assert_eq!(served.clients()[0]["leaving"], true);
    served.ctl(&["set", "", "pause", "paused=off"]);
    assert_eq!(gone.receive_answer(&write).unwrap().error, 0);
    gone.expect_close().unwrap();
    until("it leaves", || served.clients().len() == 1);
    assert_eq!(stays.read(0, 512).unwrap(), [1; 512]);
    assert_eq!(served.refused(&["disconnect", "1"]).0, 3);

    // The second time it is cut; also one that has said nothing yet.
    let silent = Conversation::connect(served.server.socket()).unwrap();
    until("it comes", || served.clients().len() == 2);
    let number = served.clients()[1]["number"].to_string();
    served.ctl(&["disconnect", &number]);
    until("it leaves", || served.clients().len() == 1);
    drop(silent);
    served.ctl(&["set", "", "delay", "write=1h"]);
    let write = stays.request(CommandCode::Write, 0, 512);
    stays.send_request(&write, &[2; 512]).unwrap();
    until("it is in progress", || served.clients()[0]["in_flight"] == 1);
    served.ctl(&["disconnect", "2"]);
    assert!(served.ctl(&["disconnect", "2"]).contains("is disconnected"));
    stays.expect_close().unwrap();
    let mut kill = std::process::Command::new("kill");
    kill.args(["-s", "KILL", &served.server.pid().to_string()]);
    assert!(bounded(&mut kill, LIMIT).status.success());
}

#[test]
fn layers_are_changed_while_clients_wait_in_them() {
    let scratch = ScratchDir::new().unwrap();
    let served = Served::start(
        &scratch,
        &[
            "--export",
            "x=[",
            "memory:1M",
            "--layer",
            "rate?rate=1&burst=1",
            "--layer",
            "delay?read=0",
            "--layer",
            "pause",
            "--layer",
            "rate?rate=1G",
            "]",
        ],
    );
    let mut client = served.connected("x");
    // A request that would wait for hours passes when the rate is changed.
    let read = client.request(CommandCode::Read, 0, 65536);
    client.send_request(&read, &[]).unwrap();
    until("it waits", || served.clients()[0]["in_flight"] == 1);
    served.ctl(&["set", "x", "rate:1", "rate=1G"]);
    assert_eq!(client.receive_answer(&read).unwrap().error, 0);

    served.ctl(&["set", "x", "delay", "read=300ms", "write=1ms"]);
    let begun = Instant::now();
    client.read(0, 512).unwrap();
    assert!(begun.elapsed() >= Duration::from_millis(300), "{:?}", begun.elapsed());
    served.ctl(&["set", "x", "delay", "read=0"]);

    served.ctl(&["set", "x", "pause", "paused=on"]);
    let read = client.request(CommandCode::Read, 0, 512);
    client.send_request(&read, &[]).unwrap();
    until("it waits", || served.clients()[0]["in_flight"] == 1);
    served.ctl(&["set", "x", "pause", "paused=off"]);
    assert_eq!(client.receive_answer(&read).unwrap().error, 0);

    let layers = served.json(&["exports"])["exports"][0]["layers"].clone();
    assert_eq!(layers[0]["options"], json!({ "rate": "1G", "burst": "1" }));
    assert_eq!(layers[1]["options"], json!({ "read": "0", "write": "1ms" }));
    assert_eq!(layers[2]["changeable"], json!(["paused"]));

    for (words, status, word) in [
        (["y", "rate", "rate=1"], 3, "known are \"x\""),
        (["x", "fua", "rate=1"], 3, "known are rate, delay, pause, rate"),
        (["x", "rate", "rate=1"], 3, "rate:1, rate:2"),
        (["x", "rate:3", "rate=1"], 3, "rate:1, rate:2"),
        (["x", "rate:1", "rate=0"], 2, "above 0"),
        (["x", "rate:1", "rate=fast"], 2, "rate: rate:"),
        (["x", "delay", "exclusive=on"], 2, "cannot be changed"),
    ] {
        let (found, said) = served.refused(&[&["set"], &words[..]].concat());
        assert!(found == status && said.contains(word), "{words:?}: {found}: {said}");
    }
    assert_eq!(client.read(0, 4).unwrap(), [0; 4]);
}

#[test]
fn it_drains_and_stops() {
    let scratch = ScratchDir::new().unwrap();
    let served = Served::start(&scratch, &["memory:1M"]);
    let mut client = served.connected("");
    assert_eq!(served.ctl(&["drain"]), "no more clients are accepted; 1 client is connected\n");
    until("it accepts nobody", || UnixStream::connect(served.server.socket()).is_err());
    assert_eq!(client.read(0, 4).unwrap(), [0; 4], "who is there is served");
    let mut waits = blockhaul(&["ctl", text(&served.control), "drain", "--wait"]);
    let mut waits = Killed(waits.stdout(std::process::Stdio::null()).spawn().unwrap());
    assert!(wait_within(&mut waits.0, Duration::from_millis(300)).is_none(), "a client is there");
    drop(client);
    assert!(wait_within(&mut waits.0, LIMIT).unwrap().success());
    // It has let go of the clients before it ends.
    until("no sockets are left", || !served.control.exists() && !served.server.socket().exists());
    let (status, said) = served.refused(&["clients"]);
    assert!(status == 3 && said.contains("--control"), "{said}");
    assert!(served.server.stop().unwrap().success());

    // The stop does not wait for clients.
    let scratch = ScratchDir::new().unwrap();
    let served = Served::start(&scratch, &["memory:1M"]);
    let mut client = served.connected("");
    served.ctl(&["stop", "--wait"]);
    client.expect_close().unwrap();
    assert!(served.server.stop().unwrap().success());
}

#[test]
fn a_socket_in_use_is_left_alone_and_a_left_one_taken_over() {
    let scratch = ScratchDir::new().unwrap();
    let served = Served::start(&scratch, &["memory:1M"]);
    let second = |control: &Path| {
        let socket = scratch.socket("second");
        let args = ["serve", "-f", "-U", text(&socket), "--control", text(control), "memory:1M"];
        run(&[&args[..], &["--run", "true"]].concat())
    };
    let output = second(&served.control);
    assert_eq!(output.status.code(), Some(3), "{}", lossy(&output.stderr));
    assert!(lossy(&output.stderr).contains("choose another path"), "{}", lossy(&output.stderr));
    assert!(served.clients().is_empty(), "the first one answers on");
    let left = scratch.socket("left");
    drop(UnixListener::bind(&left).unwrap());
    assert!(left.exists());
    // A process that another test is just starting may have it still.
    until("nobody listens", || UnixStream::connect(&left).is_err());
    let output = second(&left);
    assert!(output.status.success(), "{}", lossy(&output.stderr));
    assert!(!left.exists(), "it is removed in the end");
    // Nothing stays behind of a server that does not start.
    let args = ["serve", "-f", "--control", text(&left), "/nonexistent/disk"];
    assert_eq!(run(&args).status.code(), Some(3));
    assert!(!left.exists());
}

#[test]
fn whatever_is_said_on_the_socket_is_answered_or_ends_it() {
    let scratch = ScratchDir::new().unwrap();
    let served = Served::start(&scratch, &["memory:1M"]);
    let stream = UnixStream::connect(&served.control).unwrap();
    stream.set_read_timeout(Some(LIMIT)).unwrap();
    let mut stream = BufReader::new(stream);
    for (line, kind) in [
        ("", "usage"),
        ("x", "usage"),
        ("[]", "usage"),
        ("{}", "usage"),
        ("{\"command\":7}", "usage"),
        ("{\"command\":\"fly\"}", "usage"),
        ("{\"command\":\"disconnect\"}", "usage"),
        ("{\"command\":\"disconnect\",\"number\":-1}", "usage"),
        ("{\"command\":\"disconnect\",\"number\":99}", "absent"),
        ("{\"command\":\"set\",\"export\":\"\"}", "usage"),
        ("\u{ff}\u{0}", "usage"),
    ] {
        stream.get_mut().write_all(format!("{line}\n").as_bytes()).unwrap();
        let mut answer = String::new();
        stream.read_line(&mut answer).unwrap();
        let answer: Value = serde_json::from_str(&answer).unwrap();
        assert_eq!((&answer["ok"], &answer["kind"]), (&json!(false), &json!(kind)), "{line}");
    }
    // Several at once, and a line that never ends.
    stream.get_mut().write_all(b"{\"command\":\"clients\"}\n{\"command\":\"clients\"}\n").unwrap();
    for _ in 0..2 {
        let mut answer = String::new();
        stream.read_line(&mut answer).unwrap();
        assert_eq!(answer, "{\"clients\":[],\"ok\":true}\n");
    }
    let mut ended = false;
    for _ in 0..64 {
        ended = ended || stream.get_mut().write_all(&[b'x'; 4096]).is_err();
    }
    // A reset is an end, too: what was sent need not have been read.
    let end = stream.read_line(&mut String::new());
    let reset = |error: &std::io::Error| error.kind() == ErrorKind::ConnectionReset;
    assert!(ended || end.as_ref().is_ok_and(|len| *len == 0) || end.as_ref().is_err_and(reset));
    assert!(served.clients().is_empty());
}

/// fio writes at random and verifies, while layers are put over the export and taken away.
#[test]
fn layers_come_and_go_under_a_client_that_verifies() {
    let fio = require_peer!("fio");
    let scratch = ScratchDir::new().unwrap();
    let image = scratch.file("disk.raw");
    File::create(&image).unwrap().set_len(32 << 20).unwrap();
    let served = Served::start(&scratch, &["--export", &format!("a={}", text(&image))]);
    let mut command = fio.command();
    command.args([
        "--name=verified",
        "--thread",
        "--ioengine=nbd",
        "--rw=randwrite",
        "--bsrange=4k-64k",
    ]);
    command.args([
        "--size=32M",
        "--io_size=256M",
        "--iodepth=16",
        "--verify=crc32c",
        "--verify_state_save=0",
    ]);
    command.args(["--verify_backlog=64", "--verify_fatal=1", "--fsync=97", "--randrepeat=1"]);
    command.arg(format!("--uri={}", served.server.uri("a"))).arg("--output-format=terse");
    // Where it keeps what it has verified.
    command.arg(format!("--aux-path={}", text(scratch.path())));
    let log = File::create(scratch.file("fio.log")).unwrap();
    let said = || fs::read_to_string(scratch.file("fio.log")).unwrap();
    command.stdout(log.try_clone().unwrap()).stderr(log);
    let mut client = Killed(command.spawn().unwrap());
    let layers =
        ["stats", "cache", "delay?write=1ms", "readahead", "cache?cache=writethrough", "fua"];
    let mut changes = 0;
    let status = loop {
        if let Some(status) = client.0.try_wait().unwrap() {
            break status;
        }
        let layer = layers[changes / 2 % layers.len()];
        let name = layer.split('?').next().unwrap();
        match changes % 2 {
            0 => served.ctl(&["layer-add", "a", layer]),
            _ => served.ctl(&["layer-remove", "a", name]),
        };
        changes += 1;
    };
    assert!(status.success(), "{status}: {}", said());
    assert!(changes > 3, "{changes} changes");
    if changes % 2 == 1 {
        let left = layers[changes / 2 % layers.len()].split('?').next().unwrap();
        served.ctl(&["layer-remove", "a", left]);
    }
    // With two layers the lower one goes first.
    served.ctl(&["layer-add", "a", "rate?rate=1G"]);
    served.ctl(&["layer-add", "a", "stats"]);
    served.ctl(&["layer-remove", "a", "rate"]);
    let exports = served.json(&["exports"]);
    let layers = exports["exports"][0]["layers"].as_array().unwrap();
    assert_eq!(layers.iter().map(|layer| &layer["name"]).collect::<Vec<_>>(), ["stats"]);
}

#[test]
fn layers_that_clients_would_see_stay_as_they_are() {
    let scratch = ScratchDir::new().unwrap();
    let served = Served::start(
        &scratch,
        &["--export", "a=memory:1M", "--layer", "cow", "--layer", "cache?cache=unsafe"],
    );
    let mut client = served.connected("a");
    client.write(0, &[7; 512]).unwrap();
    for (words, status, what) in [
        (&["layer-remove", "a", "cow"][..], 2, "another disk"),
        (&["layer-remove", "a", "cache"], 2, "keeps writes"),
        (&["layer-add", "a", "offset?offset=512"], 2, "another disk"),
        (&["layer-add", "a", "limit?limit=1"], 2, "decides about clients"),
        (&["layer-add", "a", "colour"], 2, "unknown layer"),
        (&["layer-remove", "a", "delay"], 3, "known are cow, cache"),
        (&["layer-add", "b", "delay"], 3, "known are \"a\""),
    ] {
        let (code, said) = served.refused(words);
        assert_eq!(code, status, "{words:?}: {said}");
        assert!(said.contains(what), "{words:?}: {said}");
    }
    // A change that would have to wait for too long is not made.
    served.ctl(&["layer-add", "a", "pause?paused=on"]);
    let reading = std::thread::spawn(move || (client.read(0, 512).unwrap(), client));
    until("it is in flight", || served.clients()[0]["in_flight"] == 1);
    let (code, said) = served.refused(&["layer-remove", "a", "pause", "--within", "100ms"]);
    assert!(code == 1 && said.contains("still in flight"), "{code}: {said}");
    served.ctl(&["set", "a", "pause", "paused=off"]);
    let (content, mut client) = reading.join().unwrap();
    assert_eq!(content, [7; 512]);
    served.ctl(&["layer-remove", "a", "pause"]);
    assert_eq!(client.read(0, 512).unwrap(), [7; 512]);
}

#[test]
fn exports_come_and_go() {
    let scratch = ScratchDir::new().unwrap();
    let first = scratch.file("first");
    let second = scratch.file("second");
    fs::write(&first, vec![1; 1 << 20]).unwrap();
    fs::write(&second, vec![2; 2 << 20]).unwrap();
    let served = Served::start(&scratch, &["--export", &format!("a={}", text(&first))]);
    let mut old = served.connected("a");
    served.ctl(&["export-add", &format!("b={}", text(&second)), "--description", "later"]);
    let names = |served: &Served| -> Vec<String> {
        let exports = served.json(&["exports"])["exports"].as_array().unwrap().clone();
        exports.iter().map(|one| one["name"].as_str().unwrap().to_string()).collect()
    };
    assert_eq!(names(&served), ["a", "b"]);
    let listed = succeed(&["info", "--list", &served.server.uri("")]);
    assert!(listed.contains("later"), "{listed}");
    let mut new = served.connected("b");
    assert_eq!(new.read(0, 512).unwrap(), [2; 512]);
    // A server of its own, which ctl has no words for, and layers.
    let own = blockhaul_tests::program().to_str().unwrap();
    let words = json!([own, "serve", "pattern:1M"]);
    let add = json!({ "command": "export-add", "name": "c", "device": words, "readonly": true, "layers": ["log"] });
    let mut socket = UnixStream::connect(&served.control).unwrap();
    socket.write_all(format!("{add}\n").as_bytes()).unwrap();
    let mut answer = String::new();
    BufReader::new(&socket).read_line(&mut answer).unwrap();
    assert!(answer.contains("added"), "{answer}");
    let mut third = served.connected("c");
    third.read(0, 512).unwrap();
    for (words, status, what) in [
        (&["export-add", "b=memory:1M"][..], 2, "two exports"),
        (&["export-add", "d=/no/such/disk"], 1, "/no/such/disk"),
        (&["export-add", "d=odd:x"], 2, "unknown scheme"),
        (&["export-add", "d"], 2, "NAME=DEVICE"),
        (&["export-remove", "d"], 3, "known are \"a\", \"b\", \"c\""),
        (&["export-remove", "b"], 1, "1 client uses"),
    ] {
        let (code, said) = served.refused(words);
        assert_eq!(code, status, "{words:?}: {said}");
        assert!(said.contains(what), "{words:?}: {said}");
    }
    served.ctl(&["export-remove", "b", "--force"]);
    let refused = new.request(CommandCode::Read, 0, 512);
    assert_eq!(new.ask(&refused, &[]).unwrap().error, 108, "ESHUTDOWN");
    drop((new, third));
    until("one is left", || served.clients().len() == 1);
    served.ctl(&["export-remove", "c"]);
    assert_eq!(old.read(0, 512).unwrap(), [1; 512]);
    assert_eq!(names(&served), ["a"]);
    // Any program can open it again: it was closed.
    served.ctl(&["export-add", &format!("b={}", text(&second))]);
    assert_eq!(served.connected("b").read(0, 512).unwrap(), [2; 512]);
}
