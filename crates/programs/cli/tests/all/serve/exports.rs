//! Several exports: their names, lists, layers, and what of them is refused.

use super::*;

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

#[test]
fn several_exports_on_several_listeners_each_with_its_layers() {
    let scratch = ScratchDir::new().unwrap();
    let one = scratch.socket("one");
    let two = scratch.socket("two");
    let other = scratch.file("other.raw");
    std::fs::write(&other, vec![7; 1 << 20]).unwrap();
    let folder = scratch.file("folder");
    std::fs::create_dir(&folder).unwrap();
    std::fs::write(folder.join("x"), vec![1; 4096]).unwrap();
    std::os::unix::fs::symlink("../other.raw", folder.join("out")).unwrap();
    let vms = format!("vms=dir:{}", folder.display());
    let plain = format!("a%3Db={}", other.display());
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
    usage(&["-e", "a=[", "memory:1M", "--layer", "ratte", "]"], &["ratte", "did you mean rate?"]);
    usage(&["-e", "a=[", "memory:1M", "--what", "]"], &["--export a", "--what"]);
    usage(&["-e", "a=[", "-r", "]"], &["--export a", "DEVICE"]);
    usage(&["-e", "a=[", "memory:1M"], &["[ without ]"]);
    let long = format!("{}=memory:1M", "x".repeat(4097));
    usage(&["-e", &long], &["4096 bytes"]);
    usage(&["memory:1M", "--limit", "bytes=1M"], &["longest request", "32M"]);
    assert_fails(&["serve", "-f", "-U", "-", "dir:/no/such"], 3, &["/no/such"]);
    assert_fails(&["copy", "dir:/tmp", "null:"], 2, &["several devices"]);
    assert_fails(&["serve", "-f", "-s", "-p", "0", "memory:1M"], 2, &["--port 0"]);
}

/// The answer to an option about an export: the kind of the last reply, `None` if the connection ends.
fn asks(socket: &Path, code: u32, name: &[u8]) -> Option<u32> {
    let mut client = blockhaul_testkit::peer::Conversation::connect(socket).unwrap();
    client.hello(3).unwrap();
    client.negotiate(blockhaul_wire::ReplyForm::Structured).unwrap();
    let len = (name.len() as u32).to_be_bytes();
    let payload = match code {
        blockhaul_wire::magic::OPT_EXPORT_NAME => {
            client.send_option(code, name).unwrap();
            return client.receive(10).ok().map(|_| blockhaul_wire::magic::REP_ACK);
        }
        blockhaul_wire::magic::OPT_SET_META_CONTEXT => [&len[..], name, &[0; 4]].concat(),
        _ => [&len[..], name, &[0; 2]].concat(),
    };
    client.option(code, &payload).ok().and_then(|replies| replies.last().map(|last| last.kind))
}

#[test]
fn names_of_any_length_and_kind_are_taken_or_refused() {
    use blockhaul_wire::magic::{
        OPT_EXPORT_NAME, OPT_GO, OPT_INFO, OPT_SET_META_CONTEXT, REP_ACK, REP_ERR_INVALID,
        REP_ERR_TOO_BIG, REP_ERR_UNKNOWN,
    };
    let scratch = ScratchDir::new().unwrap();
    let folder = scratch.file("folder");
    std::fs::create_dir(&folder).unwrap();
    std::fs::write(scratch.file("secret"), "secret").unwrap();
    let long = "n".repeat(4096);
    let longest = format!("{long}=memory:1M");
    let dir = format!("d=dir:{}", folder.display());
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
    let mut client = blockhaul_testkit::peer::Conversation::connect(server.socket()).unwrap();
    client.hello(3).unwrap();
    client.negotiate(blockhaul_wire::ReplyForm::Structured).unwrap();
    assert!(client.select("", &["base:allocation"]).is_err());
    assert_eq!(client.select("", &[]), Ok(Vec::new()));
}

#[test]
fn lists_and_handshakes_have_their_limits() {
    let scratch = ScratchDir::new().unwrap();
    let folder = scratch.file("folder");
    std::fs::create_dir(&folder).unwrap();
    for name in 0..30 {
        std::fs::write(folder.join(format!("{name:02}")), "").unwrap();
    }
    let device = format!("dir:{}", folder.display());
    let server = start(&scratch, &[&device, "--limit=exports=20", "--limit=options=3"]);
    let mut client = blockhaul_testkit::peer::Conversation::connect(server.socket()).unwrap();
    client.hello(3).unwrap();
    let replies = client.option(blockhaul_wire::magic::OPT_LIST, &[]).unwrap();
    assert_eq!(replies.len(), 20 + 1);
    assert_eq!(replies[19].payload[4..6], *b"19");
    // Eight more for each that was listed; what is not listed can be had all the same.
    assert!(client.go("29").is_ok());
    let mut client = blockhaul_testkit::peer::Conversation::connect(server.socket()).unwrap();
    client.hello(3).unwrap();
    for _ in 0..3 {
        assert!(!client.agrees(99, &[]).unwrap());
    }
    assert!(client.agrees(99, &[]).is_err(), "the fourth option ends it");
}
