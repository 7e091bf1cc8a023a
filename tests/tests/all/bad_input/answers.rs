//! What is answered is wrong, late or cut off, and copies that are stopped.

use super::*;

/// Every way to answer wrongly, from the third request on: either the copy fails with one line, or the
/// bytes are right.
#[test]
fn a_wrong_answer_ends_the_copy_or_the_bytes_are_right() {
    let ways = [
        ReplyFaultKind::Silence,
        ReplyFaultKind::Hang,
        ReplyFaultKind::Close,
        ReplyFaultKind::CloseInHead,
        ReplyFaultKind::CloseInPayload,
        ReplyFaultKind::WrongCookie,
        ReplyFaultKind::Garbage,
        ReplyFaultKind::Twice,
        ReplyFaultKind::Slow { first: Duration::from_millis(50), piece: Duration::from_micros(10) },
        ReplyFaultKind::Error(5),
        ReplyFaultKind::Error(12345),
        ReplyFaultKind::ErrorAt(5, 300_000, "a bad place".into()),
        ReplyFaultKind::ErrorZero,
        ReplyFaultKind::UnknownError,
        ReplyFaultKind::UnknownChunk,
        ReplyFaultKind::Oversized,
        ReplyFaultKind::OutsideRange,
        ReplyFaultKind::Missing,
        ReplyFaultKind::Overlap,
        ReplyFaultKind::Backwards,
        ReplyFaultKind::Hole,
        ReplyFaultKind::SimpleInstead,
        ReplyFaultKind::NeverDone,
        ReplyFaultKind::ErrorHalfway(5),
        ReplyFaultKind::WrongOffset,
        ReplyFaultKind::WrongContext,
        ReplyFaultKind::EmptyExtent,
        ReplyFaultKind::NoExtents,
        ReplyFaultKind::NoStatus,
        ReplyFaultKind::LongExtent,
    ];
    let size = 8 << 20;
    let scratch = ScratchDir::new().unwrap();
    let image = scratch.file("image");
    let content = WriteFill::Random(1).bytes(size);
    fs::write(&image, &content).unwrap();
    let cases: Vec<_> = [
        blockhaul_wire::CommandCode::Read,
        blockhaul_wire::CommandCode::Write,
        blockhaul_wire::CommandCode::BlockStatus,
    ]
    .into_iter()
    .flat_map(|command| {
        let forms = [ReplyForm::Simple, ReplyForm::Structured, ReplyForm::Extended];
        let ways = &ways;
        forms
            .into_iter()
            .flat_map(move |form| ways.iter().map(move |how| (command, form, how.clone())))
    })
    .collect();
    let check = |(index, (command, form, how)): (
        usize,
        &(blockhaul_wire::CommandCode, ReplyForm, ReplyFaultKind),
    )| {
        let what = format!("{command:?} {form:?} {how:?}");
        // Zeroes in place of a hole are correct.
        let hole = *how == ReplyFaultKind::Hole;
        let reading = *command != blockhaul_wire::CommandCode::Write;
        let model = Model::new(size as u64);
        let model = if reading { model.with_content(content.clone()) } else { model };
        let offer =
            Offer::new(model).replies(*form).spoil(ReplyFault::from(*command, 3, how.clone()));
        let memory = offer.model.clone();
        let server = ScriptedServer::offer(offer);
        let uri = server.uri();
        let target = scratch.file(&index.to_string());
        let ends = if reading { [&uri, text(&target)] } else { [text(&image), &uri] };
        // Errors of block status only cost knowledge: nothing else is awaited there.
        let harmless = *command == blockhaul_wire::CommandCode::BlockStatus
            && matches!(how, ReplyFaultKind::Error(_));
        let timeout = if harmless { "60" } else { "1" };
        let args = [&["copy", "--timeout", timeout], &ends[..]].concat();
        let output = without_warnings(bounded(&mut blockhaul(&args), SOON));
        if output.status.success() {
            if reading && !hole {
                assert_same(&image, &target, &what);
            } else if !reading {
                let memory = memory.lock().unwrap();
                assert!(memory.bytes() == content, "{what}: success with wrong bytes");
            }
        } else {
            let status = output.status.code().unwrap_or(-1);
            assert!([OPEN, SOURCE, TARGET, LOST].contains(&status), "{what}: {status}");
            refused_by(&output, &what, status, &[text(server.path())]);
        }
        if harmless {
            assert!(output.status.success(), "{what}: {}", lossy(&output.stderr));
        }
        let fails = matches!(
            how,
            ReplyFaultKind::Close
                | ReplyFaultKind::CloseInHead
                | ReplyFaultKind::Garbage
                | ReplyFaultKind::WrongCookie
                | ReplyFaultKind::Hang
                | ReplyFaultKind::Silence
        );
        if fails && *command != blockhaul_wire::CommandCode::BlockStatus {
            assert!(!output.status.success(), "{what}: success");
        }
        let _ = fs::remove_file(&target);
    };
    // Most of them wait.
    let count = 8;
    let check = &check;
    let cases = &cases;
    std::thread::scope(|scope| {
        for first in 0..count {
            scope
                .spawn(move || cases.iter().enumerate().skip(first).step_by(count).for_each(check));
        }
    });
}

#[test]
fn a_server_that_stops_answering_is_given_up_after_the_timeout() {
    let nbdkit = require_peer!("nbdkit");
    let scratch = ScratchDir::new().unwrap();
    let image = scratch.file("image");
    let target = scratch.file("target");
    garbage(&image, 8 << 20).unwrap();
    let layer = ["--layer", "delay?read=1000s&write=1000s"];
    let ours = serve(&scratch, "s", &[&layer[..], &["memory:8M"]].concat());
    let args = ["--filter=delay", "memory", "8M", "rdelay=1000", "wdelay=1000"];
    let nbdkits = PeerServer::nbdkit(&nbdkit, &scratch.socket("k"), &args).unwrap();
    for server in [&ours, &nbdkits] {
        let uri = server.uri("");
        let place = text(server.socket());
        let copy = ["copy", "--no-extents", "--timeout", "2"];
        refused(
            &[&copy[..], &[&uri, text(&target)]].concat(),
            LOST,
            &["source", place, "2 s", "; "],
        );
        refused(
            &[&copy[..], &[text(&image), &uri]].concat(),
            LOST,
            &["target", place, "2 s", "; "],
        );
    }
}

/// Without warnings that depend on time: a second connection may be on its way when the server goes, and on a
/// busy machine answers are late.
fn without_warnings(mut output: Output) -> Output {
    const OF_TIME: &[&str] = &["continuing with fewer connections: ", ": no complete reply for "];
    let said = lossy(&output.stderr);
    let is_one = |line: &str| {
        line.starts_with("blockhaul: warning: ") && OF_TIME.iter().any(|words| line.contains(words))
    };
    let rest = said.lines().filter(|line| !is_one(line));
    output.stderr = rest.map(|line| format!("{line}\n")).collect::<String>().into_bytes();
    output
}

#[test]
fn a_connection_cut_in_the_middle_names_its_side() {
    let nbdkit = require_peer!("nbdkit");
    let scratch = ScratchDir::new().unwrap();
    let image = scratch.file("image");
    let target = scratch.file("target");
    garbage(&image, 256 << 20).unwrap();
    let layer = ["--layer", "rate?rate=10M"];
    let ours = |name| serve(&scratch, name, &[&layer[..], &[text(&image)]].concat());
    let nbdkits = |name| {
        let args = ["--filter=rate", "file", text(&image), "rate=80M"];
        PeerServer::nbdkit(&nbdkit, &scratch.socket(name), &args).unwrap()
    };
    for server in [ours("0"), nbdkits("1")] {
        let uri = server.uri("");
        let place = text(server.socket()).to_owned();
        let output =
            without_warnings(meanwhile(&["copy", "-C2", &uri, text(&target)], &target, || {
                drop(server)
            }));
        refused_by(&output, "the source is killed", LOST, &["source", &place, "; "]);
        fs::remove_file(&target).unwrap();
    }
    let served = scratch.file("served");
    File::create(&served).unwrap().set_len(256 << 20).unwrap();
    let server = serve(&scratch, "2", &[&layer[..], &[text(&served)]].concat());
    let uri = server.uri("");
    let place = text(server.socket()).to_owned();
    let output =
        without_warnings(meanwhile(&["copy", "-C2", text(&image), &uri], &served, || drop(server)));
    refused_by(&output, "the target is killed", LOST, &["target", &place, "; "]);
    // A server that is stopped notifies its clients.
    let server = ours("3");
    let uri = server.uri("");
    let place = text(server.socket()).to_owned();
    let stop = || assert!(server.stop().unwrap().success());
    let output = without_warnings(meanwhile(&["copy", "-C2", &uri, text(&target)], &target, stop));
    refused_by(&output, "the source is stopped", LOST, &["source", &place, "; "]);
}

#[test]
fn a_signal_stops_a_copy_soon_with_its_status() {
    let scratch = ScratchDir::new().unwrap();
    let target = scratch.file("target");
    for (signal, status) in [("TERM", 143), ("INT", 130)] {
        let mut copy = blockhaul(&["copy", "--source-layer", "rate?rate=5M", "pattern:4G"]);
        let copy = copy.arg(&target).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut copy = copy.spawn().unwrap();
        until("something is copied", || {
            image::space(&target).map_or(0, |space| space.allocated) > 0
        });
        let pid = copy.id().to_string();
        done(Command::new("kill").args(["-s", signal, &pid]));
        // Far from its end.
        assert!(wait_within(&mut copy, SOON).is_some(), "it goes on after SIG{signal}");
        let output = copy.wait_with_output().unwrap();
        fs::remove_file(&target).unwrap();
        let said = lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(status), "{signal}: {said}");
        assert!(said.contains("signal") && !said.contains("panicked"), "{said}");
    }
}
