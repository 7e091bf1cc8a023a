//! What the log of a server says as JSON, by member.

use std::net::TcpStream;
use std::time::Instant;

use blockhaul_testkit::peer::Conversation;
use blockhaul_testkit::tools::{PeerServer, ScratchDir, until_some};
use blockhaul_tests::{program, run, serve, succeed, text, with_port};
use blockhaul_wire::{CommandCode, ReplyForm};
use serde_json::{Value, json};

/// The records of a server; each line is one, but for the last, which may not be there whole.
#[track_caller]
fn records(server: &PeerServer) -> Vec<Value> {
    let said = server.said();
    let count = said.lines().count();
    let mut records = Vec::new();
    for (index, line) in said.lines().enumerate() {
        match serde_json::from_str(line) {
            Ok(record) => records.push(record),
            Err(why) => assert!(index + 1 == count, "{why}: {line}"),
        }
    }
    records
}

/// Waits for a record whose message has this text in it; it has time and level as well.
#[track_caller]
fn record(server: &PeerServer, message: &str) -> Value {
    let about = |record: &Value| record["message"].as_str().unwrap().contains(message);
    let found = until_some(&format!("a record about {message:?}"), || {
        records(server).into_iter().find(about)
    });
    let time = found["time"].as_str().unwrap();
    assert!(time.starts_with("20") && time.ends_with('Z'), "{found}");
    assert!(found["level"].is_string(), "{found}");
    found
}

/// Asserts that a record has these members, whatever it has besides; null: not that one.
#[track_caller]
fn has(record: &Value, members: Value) {
    for (name, value) in members.as_object().unwrap() {
        assert_eq!(&record[name], value, "{name} of {record}");
    }
}

fn client(server: &PeerServer, export: &str) -> Conversation {
    let mut client = Conversation::connect(server.socket()).unwrap();
    client.open(export, ReplyForm::Structured).unwrap();
    client
}

#[test]
fn clients_come_fail_and_leave() {
    let scratch = ScratchDir::new().unwrap();
    let exports = [
        "--export",
        "good=memory:1M",
        "--export",
        "bad=[",
        "--layer",
        "error?write=100%",
        "memory:1M",
        "]",
    ];
    let (server, port) = with_port(|port| {
        let port = port.to_string();
        let listen = ["--log-format", "json", "-v", "-i", "127.0.0.1", "-p", &port];
        let args = [&listen[..], &exports].concat();
        PeerServer::blockhaul(program(), &scratch.socket("s"), &args)
    });

    let mut bad = client(&server, "bad");
    has(
        &record(&server, "connection 1 from"),
        json!({
            "level": "debug", "connection": 1, "client": "a local client", "export": null,
        }),
    );
    // Success is not logged.
    bad.read(0, 4096).unwrap();
    bad.write(8192, &[1; 512]).unwrap();
    let failed = json!({
        "connection": 1, "client": "a local client", "export": "bad", "user": null,
        "request": "write", "offset": 8192, "length": 512,
    });
    let told = record(&server, "write of 512 bytes");
    has(&told, failed);
    has(&told, json!({ "level": "warn" }));
    let error = told["error"].as_str().unwrap();
    assert!(told["message"].as_str().unwrap().ends_with(error), "{told}");
    // What the device is not asked for.
    let unknown = bad.request(CommandCode::Other(77), 4096, 1);
    assert_ne!(bad.ask(&unknown, &[]).unwrap().error, 0);
    has(
        &record(&server, "unknown command 77"),
        json!({
            "level": "debug", "connection": 1, "export": "bad", "request": "unknown", "offset": 4096,
            "length": 1,
        }),
    );
    let leave = bad.request(CommandCode::Disconnect, 0, 0);
    bad.send_request(&leave, &[]).unwrap();
    has(&record(&server, "connection 1 ended"), json!({ "connection": 1, "export": "bad" }));
    assert!(records(&server).iter().all(|record| record["request"] != "read"));

    // One that talks nonsense, over TCP: it has no export yet.
    let mut stream = TcpStream::connect(format!("127.0.0.1:{port}")).unwrap();
    let address = stream.local_addr().unwrap().to_string();
    std::io::Write::write_all(&mut stream, &[0xff; 64]).unwrap();
    let told = record(&server, &format!("connection 2 from {address}: "));
    has(&told, json!({ "level": "warn", "connection": 2, "client": address, "export": null }));
    let error = told["error"].as_str().unwrap();
    assert!(told["message"].as_str().unwrap().ends_with(error), "{told}");
}

#[test]
fn who_tls_is_for() {
    let scratch = ScratchDir::new().unwrap();
    let keys = scratch.file("keys.psk");
    succeed(&["tls", "init", "--psk", "alice", text(&keys)]);
    let tls = ["--tls", "require", "--tls-psk", text(&keys)];
    let server =
        serve(&scratch, "s", &[&["--log-format", "json", "-v"], &tls[..], &["memory:1M"]].concat());
    let socket = server.socket().display().to_string();
    let plain = run(&["info", &format!("nbd+unix:///?socket={socket}")]);
    assert_eq!(plain.status.code(), Some(1));
    let told = record(&server, "refused connection 1");
    has(
        &told,
        json!({ "level": "warn", "connection": 1, "client": "a local client", "user": null }),
    );
    assert!(told["error"].as_str().unwrap().starts_with("TLS is required"), "{told}");

    let keys = keys.display();
    succeed(&["info", &format!("nbds+unix://alice@/?socket={socket}&tls-psk-file={keys}")]);
    has(
        &record(&server, "with alice"),
        json!({
            "level": "debug", "connection": 2, "user": "alice", "tls": "TLSv1.3",
        }),
    );
    has(&record(&server, "connection 2 ended"), json!({ "user": "alice" }));
}

#[test]
fn an_export_that_cannot_be_opened_is_named() {
    let scratch = ScratchDir::new().unwrap();
    let folder = scratch.file("folder");
    std::fs::create_dir(&folder).unwrap();
    let device = format!("dir:{}", folder.display());
    let server = serve(&scratch, "s", &["--log-format", "json", &device]);
    let mut client = Conversation::connect(server.socket()).unwrap();
    assert!(client.open("no\nfile", ReplyForm::Structured).is_err());
    let told = record(&server, "cannot open export");
    has(&told, json!({ "level": "warn", "connection": 1, "export": "no\nfile" }));
    assert!(told["error"].is_string(), "{told}");
}

/// Who makes up names, or comes again and again, fills no disk.
#[test]
fn floods_of_refusals_are_a_few_lines_a_second() {
    let scratch = ScratchDir::new().unwrap();
    let folder = format!("files=dir:{}", scratch.path().display());
    let bad = ["--export", "bad=[", "--layer", "error?write=100%", "memory:1M", "]"];
    let options = ["--log-format", "json", "--limit", "connections=1", "--export", &folder];
    let args = [&options[..], &bad].concat();
    let server = PeerServer::blockhaul(program(), &scratch.socket("s"), &args).unwrap();
    let begun = Instant::now();
    for _ in 0..10 {
        let mut client = Conversation::connect(server.socket()).unwrap();
        client.hello(3).unwrap();
        client.negotiate(ReplyForm::Structured).unwrap();
        for nth in 0..50 {
            client.select(&format!("files/none-{nth}"), &["base:allocation"]).unwrap_err();
        }
    }
    let mut bad = client(&server, "bad");
    for _ in 0..500 {
        let mut other = Conversation::connect(server.socket()).unwrap();
        other.expect_close().unwrap();
    }
    let spans = 2 + begun.elapsed().as_secs() as usize;
    // What comes behind all this in the log.
    let write = bad.request(CommandCode::Write, 0, 512);
    assert_ne!(bad.ask(&write, &[1; 512]).unwrap().error, 0);
    record(&server, "write of 512 bytes");
    for (what, all) in [("cannot open export", 500), ("are open already", 500)] {
        let about = |record: &&Value| record["message"].as_str().unwrap().contains(what);
        let told: Vec<_> = records(&server).into_iter().filter(|record| about(&record)).collect();
        assert!(!told.is_empty() && told.len() <= 20 * spans, "{what}: {} of {all}", told.len());
        assert!(told.iter().all(|record| record["level"] == "warn"), "{told:?}");
    }
}
