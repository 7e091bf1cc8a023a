//! Sessions of real programs, captured by a proxy on the Unix socket between client and server,
//! decoded and encoded again.
//!
//! Each file of `tests/golden` names its programs and versions in its first lines (`#`), contains
//! what the client (`C`) and the server (`S`) sent in chronological order, in hexadecimal (`+`
//! continues the previous line), and the meaning (`=`). Every message must decode to that and
//! encode to the same bytes again; our state machines run the handshake in both roles.

// Test helpers may panic like tests.

use std::collections::HashMap;
use std::path::Path;

use blockhaul_wire::handshake::client::{self, ClientHandshakeEvent};
use blockhaul_wire::handshake::negotiation::{
    Negotiation, NegotiationGoal, NegotiationOptions, NegotiationStep,
};
use blockhaul_wire::handshake::server;
use blockhaul_wire::option::{InfoRequest, MetaRequest, OptionHeader};
use blockhaul_wire::reply::{ChunkKind, ErrorChunk, HoleChunk};
use blockhaul_wire::request::StatusFilter;
use blockhaul_wire::status::{ExtentForm, StatusView};
use blockhaul_wire::{
    CommandCode, ExportFlags, ListEntry, MetaContext, OptionCode, ReplyForm, RequestForm,
    printable, reply, request,
};

struct Capture {
    name: &'static str,
    client: Vec<u8>,
    server: Vec<u8>,
    meaning: Vec<String>,
}

fn bytes(hex: &str) -> Vec<u8> {
    assert!(hex.len().is_multiple_of(2), "{hex}");
    (0..hex.len()).step_by(2).map(|i| u8::from_str_radix(&hex[i..i + 2], 16).unwrap()).collect()
}

fn capture(name: &'static str) -> Capture {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name);
    let text = std::fs::read_to_string(file.with_extension("txt")).unwrap();
    let mut capture = Capture { name, client: vec![], server: vec![], meaning: vec![] };
    let mut from_client = false;
    for line in text.lines() {
        let (mark, rest) = line.split_once(' ').unwrap();
        match mark {
            "#" => continue,
            "=" => {
                capture.meaning.push(rest.to_owned());
                continue;
            }
            "C" => from_client = true,
            "S" => from_client = false,
            "+" => {}
            _ => panic!("{name}: {line}"),
        }
        let side = if from_client { &mut capture.client } else { &mut capture.server };
        side.extend(bytes(rest));
    }
    capture
}

/// A session as text, and the result of its negotiation.
struct Decoded {
    lines: Vec<String>,
    agreed: Option<client::ClientHandshakeResult>,
}

/// Runs our client on the server's bytes, with the options that the captured client sent, and
/// decodes what follows.
fn decode(capture: &Capture) -> Decoded {
    let mut lines = Vec::new();
    let mut ours = client::ClientHandshake::new();
    let mut sent = Vec::new();
    let mut used = 0;
    let mut options = 0;
    let agreed = loop {
        let left = &capture.server[used..];
        let (consumed, event) = match ours.receive(left, &mut sent) {
            Ok(received) => received,
            Err(error) => panic!("{}: {error}", capture.name),
        };
        used += consumed;
        match event {
            ClientHandshakeEvent::NeedMore { .. } => {
                assert!(left.len() == consumed, "{}: the capture ends early", capture.name);
                let end = match ours.closed(&[]) {
                    Ok(()) => "closed".to_owned(),
                    Err(error) => error.to_string(),
                };
                lines.push(format!("server: {end}"));
                break None;
            }
            ClientHandshakeEvent::Transmission(agreed) => {
                lines.push(format!("server: {agreed:?}"));
                break Some(*agreed);
            }
            ClientHandshakeEvent::Aborted => {
                lines.push("server: Aborted".to_owned());
                break None;
            }
            event => lines.push(format!("server: {event:?}")),
        }
        if options == 0 {
            // The client's flags.
            options = 4;
        }
        let rest = &capture.client[options..];
        let Some(head) = OptionHeader::parse(rest).unwrap() else {
            lines.push("client: closed".to_owned());
            break None;
        };
        let end = OptionHeader::LEN + head.length as usize;
        let start = sent.len();
        send(&mut ours, head.code, &rest[OptionHeader::LEN..end], &mut sent, &mut lines);
        assert_eq!(sent[start..], rest[..end], "{}: {}", capture.name, head.code);
        options += end;
    };
    assert_eq!(sent, capture.client[..sent.len()], "{}", capture.name);
    if let Some(agreed) = &agreed {
        let requests = &capture.client[sent.len()..];
        let replies = &capture.server[used..];
        let lengths = decode_requests(agreed, requests, &mut lines);
        decode_replies(agreed, replies, &lengths, &mut lines);
    } else {
        assert_eq!(sent.len(), capture.client.len(), "{}", capture.name);
    }
    Decoded { lines, agreed }
}

fn send(
    ours: &mut client::ClientHandshake,
    code: OptionCode,
    payload: &[u8],
    out: &mut Vec<u8>,
    lines: &mut Vec<String>,
) {
    let mut line = format!("client: {code}");
    match code {
        OptionCode::Abort => ours.abort(out),
        OptionCode::List => ours.list(out),
        OptionCode::StartTls => ours.starttls(out),
        OptionCode::StructuredReply => ours.structured_replies(out),
        OptionCode::ExtendedHeaders => ours.extended_headers(out),
        OptionCode::ExportName => ours.export_name(str::from_utf8(payload).unwrap(), out),
        OptionCode::Info | OptionCode::Go => {
            let InfoRequest { name, wants } = InfoRequest::parse(payload).unwrap();
            line += &format!(" {name:?} {wants:?}");
            match code {
                OptionCode::Go => ours.go(&name, wants, out),
                _ => ours.info(&name, wants, out),
            }
        }
        OptionCode::ListMetaContext | OptionCode::SetMetaContext => {
            let MetaRequest { export, queries } = MetaRequest::parse(payload).unwrap();
            line += &format!(" {export:?} {queries:?}");
            match code {
                OptionCode::SetMetaContext => ours.set_meta_contexts(&export, &queries, out),
                _ => ours.list_meta_contexts(&export, &queries, out),
            }
        }
        OptionCode::Other(_) => panic!("{code}"),
    }
    .unwrap();
    lines.push(line);
}

/// Decodes requests; returns the lengths of reads by cookie.
fn decode_requests(
    agreed: &client::ClientHandshakeResult,
    mut rest: &[u8],
    lines: &mut Vec<String>,
) -> HashMap<u64, u64> {
    let mut lengths = HashMap::new();
    while !rest.is_empty() {
        let (header, used) = request::RequestHeader::parse(rest, agreed.headers).unwrap().unwrap();
        assert_eq!(*header.encode(agreed.headers).unwrap(), rest[..used]);
        let (payload, behind) =
            rest[used..].split_at(header.payload_len(agreed.headers).try_into().unwrap());
        rest = behind;
        let request::RequestHeader { flags, command, cookie, offset, length } = header;
        let mut line = format!("client: {command:?} {flags:?} cookie {cookie} {offset}+{length}");
        if command == CommandCode::BlockStatus && !payload.is_empty() {
            let known = |id| agreed.contexts.iter().any(|context| context.id == id);
            let filter = StatusFilter::parse(payload, known).unwrap();
            let mut out = Vec::new();
            filter.emit(&mut out);
            assert_eq!(out, payload);
            line += &format!(" {filter:?}");
        } else if !payload.is_empty() {
            line += &format!(" \"{}\"", printable(payload, 32));
        }
        lines.push(line);
        if command == CommandCode::Read {
            lengths.insert(cookie, length);
        }
    }
    lengths
}

fn decode_replies(
    agreed: &client::ClientHandshakeResult,
    mut rest: &[u8],
    reads: &HashMap<u64, u64>,
    lines: &mut Vec<String>,
) {
    while !rest.is_empty() {
        let (header, used) = reply::ReplyHeader::parse(rest, agreed.replies).unwrap().unwrap();
        let mut again = header.encode().unwrap().to_vec();
        let mut line = format!("server: cookie {} ", header.cookie());
        let length = match header {
            reply::ReplyHeader::Simple { cookie, error } => {
                line += &format!("{error:?}");
                let read = reads.get(&cookie).filter(|_| error.is_none());
                let length = read.copied().unwrap_or(0);
                again.extend(&rest[used..used + length as usize]);
                length
            }
            reply::ReplyHeader::Chunk(chunk) => {
                let payload = &rest[used..used + chunk.length as usize];
                line += &format!("{:?} {:?} offset {:?}", chunk.kind, chunk.flags, chunk.offset);
                line += &payload_text(chunk.kind, payload, &mut again);
                chunk.length
            }
        };
        let (message, behind) = rest.split_at(used + length as usize);
        assert_eq!(again, message, "{line}");
        rest = behind;
        lines.push(line);
    }
}

/// The payload of a chunk as text; encodes it again to `again`.
fn payload_text(kind: ChunkKind, payload: &[u8], again: &mut Vec<u8>) -> String {
    match kind {
        ChunkKind::None => String::new(),
        ChunkKind::OffsetData => {
            again.extend(payload);
            let at = reply::data_at(payload).unwrap();
            format!(" {at}+{} \"{}\"", payload.len() - 8, printable(&payload[8..], 32))
        }
        ChunkKind::OffsetHole => {
            let hole = HoleChunk::parse(payload).unwrap();
            again.extend(hole.at.to_be_bytes());
            again.extend(hole.len.to_be_bytes());
            format!(" {}+{}", hole.at, hole.len)
        }
        ChunkKind::BlockStatus | ChunkKind::BlockStatusExt => {
            let form = ExtentForm::of(kind).unwrap();
            let status = StatusView::parse(form, payload).unwrap();
            let mut text = format!(" context {}", status.context());
            for extent in status.extents() {
                text += &format!(" {}:{}", extent.len, extent.flags);
            }
            let all = blockhaul_wire::status::StatusLimits::new(
                status.extents().map(|extent| extent.len).sum(),
            );
            let context = status.context();
            let extents = status.extents();
            blockhaul_wire::status::emit_payload(form, context, all, extents, again).unwrap();
            text
        }
        ChunkKind::Error | ChunkKind::ErrorOffset => {
            let failure = ErrorChunk::parse(kind, payload).unwrap();
            failure.emit(again);
            format!(" {failure:?}")
        }
        ChunkKind::Other(_) => panic!("{kind:?}"),
    }
}

/// Checks that a session has the meaning in its file.
fn check(name: &'static str) -> (Capture, Decoded) {
    let capture = capture(name);
    let decoded = decode(&capture);
    let found: String = decoded.lines.iter().map(|line| format!("= {line}\n")).collect();
    assert_eq!(decoded.lines, capture.meaning, "{name} means:\n{found}");
    (capture, decoded)
}

/// Our server, offering what the captured client requested, negotiates the same result.
fn serve(
    capture: &Capture,
    config: server::HandshakeConfig,
    agreed: &client::ClientHandshakeResult,
) {
    let exports = [("hello", "world")]
        .map(|(name, text)| ListEntry { name: name.to_owned(), description: text.to_owned() });
    let mut out = Vec::new();
    let mut ours = server::ServerHandshake::new(config, &mut out);
    let mut used = 0;
    let negotiated = loop {
        let (consumed, event) = ours.receive(&capture.client[used..], &mut out).unwrap();
        used += consumed;
        match event {
            server::ServerHandshakeEvent::Export { name, .. } => {
                assert_eq!(name, agreed.export);
                let info = server::ExportReply {
                    size: agreed.info.size,
                    flags: agreed.info.flags,
                    block_sizes: agreed.info.block_sizes,
                    ..server::ExportReply::default()
                };
                ours.answer_export(Ok(info), &mut out).unwrap();
            }
            server::ServerHandshakeEvent::List => ours.answer_list(Ok(&exports), &mut out).unwrap(),
            server::ServerHandshakeEvent::MetaContext { queries, set, .. } => {
                let known = agreed
                    .contexts
                    .iter()
                    .filter(|context| queries.contains(&context.name) || !set);
                ours.answer_contexts(Ok(known.cloned().collect()), &mut out).unwrap();
            }
            server::ServerHandshakeEvent::Transmission(negotiated) => break negotiated,
            event => panic!("{event:?}"),
        }
    };
    assert_eq!(negotiated.headers, agreed.headers);
    assert_eq!(negotiated.replies, agreed.replies);
    assert_eq!(negotiated.contexts, agreed.contexts);
    assert_eq!(negotiated.flags, agreed.info.flags);
    let requests = &capture.client[used..];
    assert!(request::RequestHeader::parse(requests, negotiated.headers).unwrap().is_some());
}

/// Our negotiation sends exactly the bytes of libnbd, from greeting to transmission.
fn negotiate(capture: &Capture, wants: NegotiationOptions) -> client::ClientHandshakeResult {
    let mut ours = Negotiation::new(wants).unwrap();
    let mut out = Vec::new();
    let (_, step) = ours.receive(&capture.server, &mut out).unwrap();
    let NegotiationStep::Transmission(agreed) = step else { panic!("{step:?}") };
    assert_eq!(out, capture.client[..out.len()]);
    let requests = &capture.client[out.len()..];
    assert!(request::RequestHeader::parse(requests, agreed.headers).unwrap().is_some());
    *agreed
}

#[test]
fn nbdkit_and_libnbd_with_structured_replies() {
    let (capture, decoded) = check("nbdkit-libnbd");
    let agreed = decoded.agreed.unwrap();
    assert_eq!((agreed.headers, agreed.replies), (RequestForm::Compact, ReplyForm::Structured));
    assert_eq!(negotiate(&capture, NegotiationOptions::new("")), agreed);
    serve(
        &capture,
        server::HandshakeConfig { extended: false, ..server::HandshakeConfig::default() },
        &agreed,
    );
}

#[test]
fn qemu_and_libnbd_with_extended_headers() {
    let (capture, decoded) = check("qemu-libnbd");
    let agreed = decoded.agreed.unwrap();
    assert_eq!((agreed.headers, agreed.replies), (RequestForm::Extended, ReplyForm::Extended));
    assert!(agreed.info.flags.contains(ExportFlags::BLOCK_STATUS_PAYLOAD));
    assert_eq!(negotiate(&capture, NegotiationOptions::new("")), agreed);
    serve(&capture, server::HandshakeConfig::default(), &agreed);
}

#[test]
fn qemu_and_libnbd_with_structured_replies_and_holes() {
    let (capture, decoded) = check("qemu-libnbd-structured");
    let agreed = decoded.agreed.unwrap();
    let wants = NegotiationOptions { extended: false, ..NegotiationOptions::new("") };
    assert_eq!(negotiate(&capture, wants), agreed);
    serve(&capture, server::HandshakeConfig::default(), &agreed);
}

#[test]
fn nbdkit_and_libnbd_with_simple_replies() {
    let (capture, decoded) = check("nbdkit-libnbd-simple");
    let agreed = decoded.agreed.unwrap();
    assert_eq!((agreed.headers, agreed.replies), (RequestForm::Compact, ReplyForm::Simple));
    let wants =
        NegotiationOptions { extended: false, structured: false, ..NegotiationOptions::new("") };
    assert_eq!(negotiate(&capture, wants), agreed);
    serve(&capture, server::HandshakeConfig::default(), &agreed);
}

#[test]
fn nbdkit_oldstyle() {
    let (capture, decoded) = check("nbdkit-oldstyle");
    let agreed = decoded.agreed.unwrap();
    // Our own greeting is identical.
    let mut out = Vec::new();
    server::oldstyle(agreed.info.size, agreed.info.flags, &mut out);
    assert_eq!(out, capture.server[..out.len()]);
    // A client that wants to send options is already in transmission.
    let wants = NegotiationOptions { end: NegotiationGoal::Options, ..NegotiationOptions::new("") };
    assert_eq!(negotiate(&capture, wants), agreed);
}

// nbd: flags.df-set
#[test]
fn qemu_options() {
    let (capture, decoded) = check("qemu-options");
    let agreed = decoded.agreed.unwrap();
    let names: Vec<_> =
        agreed.contexts.iter().map(|MetaContext { name, .. }| name.as_str()).collect();
    assert_eq!(names, ["base:allocation", "qemu:allocation-depth"]);
    serve(&capture, server::HandshakeConfig::default(), &agreed);
}

#[test]
fn qemu_refuses() {
    check("qemu-unknown-export");
    check("qemu-starttls-refused");
}

#[test]
fn qemu_and_qemu() {
    let (capture, decoded) = check("qemu-qemu");
    serve(&capture, server::HandshakeConfig::default(), &decoded.agreed.unwrap());
}

#[test]
fn nbdkit_and_nbdinfo_list() {
    check("nbdkit-nbdinfo-list");
}
