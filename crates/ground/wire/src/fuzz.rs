//! Fuzz targets: each takes any bytes and asserts what must hold for all of them. Run by
//! tests with seeded mutations, and by coverage-guided fuzzers.
//!
//! All assert: no panic; no more bytes are consumed than are available; parsing an emitted value
//! gives the same value; the memory that a parser requests is bounded.

use crate::handshake::client::{self, ClientHandshake as Client};
use crate::handshake::negotiation::{
    Negotiation, NegotiationGoal, NegotiationOptions, NegotiationStep,
};
use crate::handshake::server::{
    self, ExportReply, HandshakeConfig, OptionRefusal, ServerHandshake as Server, TlsRequirement,
};
use crate::option::{
    BlockSizeInfo, InfoItem, InfoRequest, InfoSet, ListEntry, MetaContext, MetaRequest,
    OptionError, OptionHeader, OptionReplyHeader,
};
use crate::reply::{self, ChunkKind, ErrorChunk, HoleChunk, ReplyEncoder};
use crate::request::{self, StatusFilter};
use crate::status::{self, ExtentForm, StatusLimits, StatusView};
use crate::uri::Uri;
use crate::{ExportFlags, ProtocolError, ReplyFlags, ReplyForm, RequestForm, limits, printable};

#[cfg(test)]
mod tests;
pub(crate) mod transmission;

pub use transmission::fuzz_transmission;

/// A target's name and function.
pub type Target = (&'static str, fn(&[u8]));

/// All targets. Corpus files are in `tests/corpus/NAME`.
pub const TARGETS: &[Target] = &[
    ("request_compact", fuzz_request_compact),
    ("request_extended", fuzz_request_extended),
    ("request_filter", fuzz_request_filter),
    ("reply_simple", fuzz_reply_simple),
    ("reply_structured", fuzz_reply_structured),
    ("reply_extended", fuzz_reply_extended),
    ("reply_payload", fuzz_reply_payload),
    ("status_32", fuzz_status_32),
    ("status_64", fuzz_status_64),
    ("option_payload", fuzz_option_payload),
    ("server_handshake", fuzz_server_handshake),
    ("client_handshake", fuzz_client_handshake),
    ("negotiation", fuzz_negotiation),
    ("transmission", fuzz_transmission),
    ("uri", fuzz_uri),
    ("http_request", fuzz_http_request),
    ("http_answer", fuzz_http_answer),
    ("printable", fuzz_printable),
];

/// The HTTP request before NBD, as a server reads it.
pub fn fuzz_http_request(data: &[u8]) {
    head(data, |bytes| crate::http::request(bytes).map(|found| found.map(|(_, used)| used)));
}

/// The answer to that request, as a client reads it.
pub fn fuzz_http_answer(data: &[u8]) {
    head(data, |bytes| crate::http::answer(bytes).map(|found| found.map(|(_, used)| used)));
}

/// The head of an HTTP message: its length is bounded, and depends on nothing behind it.
fn head(data: &[u8], parse: impl Fn(&[u8]) -> Result<Option<usize>, crate::http::HttpError>) {
    match parse(data) {
        Ok(None) => assert!(data.len() <= crate::http::HEAD_MAX),
        Ok(Some(used)) => {
            assert!(used <= data.len() && used <= crate::http::HEAD_MAX);
            assert_eq!(parse(&data[..used]).ok(), Some(Some(used)));
        }
        Err(error) => assert!(!error.to_string().is_empty()),
    }
}

/// A request of 28 bytes.
pub fn fuzz_request_compact(data: &[u8]) {
    request(data, RequestForm::Compact);
}

/// A request of 32 bytes.
pub fn fuzz_request_extended(data: &[u8]) {
    request(data, RequestForm::Extended);
}

fn request(data: &[u8], headers: RequestForm) {
    match request::RequestHeader::parse(data, headers) {
        Ok(None) => assert!(data.len() < headers.len()),
        Ok(Some((header, used))) => {
            assert_eq!(used, headers.len());
            let mut out = Vec::new();
            header.emit(headers, &mut out).expect("what came in this form goes in this form");
            assert_eq!(out, data[..used]);
            assert!(header.payload_len(headers) <= header.length);
        }
        Err(_) => assert!(data.len() >= 4),
    }
}

/// The payload of a BLOCK_STATUS request. Even contexts count as negotiated.
pub fn fuzz_request_filter(data: &[u8]) {
    if let Ok(filter) = StatusFilter::parse(data, |id| id % 2 == 0) {
        assert!(!filter.contexts.is_empty() && filter.contexts.len() <= limits::CONTEXTS);
        assert!(filter.contexts.iter().all(|id| id % 2 == 0));
        let mut out = Vec::new();
        filter.emit(&mut out);
        assert_eq!(out, data);
        assert_eq!(filter.payload_len(), data.len() as u64);
    }
}

/// A reply with nothing negotiated.
pub fn fuzz_reply_simple(data: &[u8]) {
    reply(data, ReplyForm::Simple);
}

/// A reply with structured replies.
pub fn fuzz_reply_structured(data: &[u8]) {
    reply(data, ReplyForm::Structured);
}

/// A reply with extended headers.
pub fn fuzz_reply_extended(data: &[u8]) {
    reply(data, ReplyForm::Extended);
}

fn reply(data: &[u8], replies: ReplyForm) {
    match reply::ReplyHeader::parse(data, replies) {
        Ok(None) => assert!(data.len() < reply::EXTENDED_LEN),
        Ok(Some((header, used))) => {
            assert!(used <= data.len());
            assert_eq!(*header.encode().expect("what came in a form goes in it"), data[..used]);
            let reply::ReplyHeader::Chunk(chunk) = header else { return };
            assert_ne!(replies, ReplyForm::Simple);
            assert_eq!(chunk.offset.is_some(), replies == ReplyForm::Extended);
            assert!(chunk.length <= u64::from(limits::PAYLOAD_HARD) + 8);
            // A complete payload is parsed as the chunk says, and may be invalid.
            let length = usize::try_from(chunk.length).unwrap_or(usize::MAX);
            let Some(payload) = data[used..].get(..length) else { return };
            payload_of(chunk.kind, payload);
        }
        Err(_) => assert!(data.len() >= 4),
    }
}

fn payload_of(kind: ChunkKind, payload: &[u8]) {
    if let Some(form) = ExtentForm::of(kind) {
        return block_status(form, payload);
    }
    match kind {
        ChunkKind::OffsetHole => {
            if let Ok(hole) = HoleChunk::parse(payload) {
                let answer = ReplyEncoder { replies: ReplyForm::Structured, cookie: 1, offset: 2 };
                let out = answer.hole(ReplyFlags::DONE, hole).expect("chunks can say it");
                assert_eq!(out[reply::STRUCTURED_LEN..], *payload);
            }
        }
        kind if kind.is_error() => {
            if let Ok(failure) = ErrorChunk::parse(kind, payload) {
                assert!(failure.text().len() <= limits::ERROR_TEXT + 3);
                assert!(!failure.text().chars().any(char::is_control));
                let mut out = Vec::new();
                failure.emit(&mut out);
                if failure.text.len() <= limits::STRING && !matches!(kind, ChunkKind::Other(_)) {
                    assert_eq!(out, payload);
                }
                let kind = failure.at.map_or(ChunkKind::Error, |_| ChunkKind::ErrorOffset);
                let again = ErrorChunk::parse(kind, &out).expect("what is emitted is parsed");
                assert_eq!((again.error, again.at), (failure.error, failure.at));
            }
        }
        _ => {}
    }
}

/// Payloads of chunks; the first byte chooses the kind.
pub fn fuzz_reply_payload(data: &[u8]) {
    let Some((kind, payload)) = data.split_first() else { return };
    let kind = match kind % 4 {
        0 => ChunkKind::OffsetHole,
        1 => ChunkKind::Error,
        2 => ChunkKind::ErrorOffset,
        _ => ChunkKind::Other(0x8000 | u16::from(*kind)),
    };
    payload_of(kind, payload);
}

/// Block status in 32 bits.
pub fn fuzz_status_32(data: &[u8]) {
    block_status(ExtentForm::Bits32, data);
}

/// Block status in 64 bits.
pub fn fuzz_status_64(data: &[u8]) {
    block_status(ExtentForm::Bits64, data);
}

fn block_status(form: ExtentForm, payload: &[u8]) {
    let Ok(status) = StatusView::parse(form, payload) else { return };
    assert_eq!(status.extents().count(), status.len());
    let sum: u64 = status.extents().map(|extent| extent.len).sum();
    let mut last = None;
    let mut joined = 0;
    for extent in status.extents() {
        assert_ne!(extent.len, 0);
        joined += usize::from(last != Some(extent.flags));
        last = Some(extent.flags);
    }
    let mut out = Vec::new();
    let wanted = StatusLimits::new(sum);
    let encoded = status::emit_payload(form, status.context(), wanted, status.extents(), &mut out)
        .expect("what came in this form goes in this form");
    assert_eq!(encoded.covered, sum);
    if joined == status.len() {
        assert_eq!(out, payload);
    }
    let again = StatusView::parse(form, &out).expect("what is emitted is parsed");
    assert_eq!(again.context(), status.context());
    assert_eq!(again.len(), encoded.extents);
    // One extent, no longer than requested.
    let half = sum / 2 + 1;
    let one = StatusLimits { one: true, ..StatusLimits::new(half) };
    out.clear();
    let encoded =
        status::emit_payload(form, 0, one, status.extents(), &mut out).expect("there is an extent");
    assert_eq!(encoded.extents, 1);
    assert!(encoded.covered <= half);
}

/// Payloads of options and of replies to them; the first byte chooses.
pub fn fuzz_option_payload(data: &[u8]) {
    let Some((which, payload)) = data.split_first() else { return };
    let mut out = Vec::new();
    match which % 5 {
        0 => {
            let Ok(request) = InfoRequest::parse(payload) else { return };
            request.emit(&mut out);
            assert_eq!(InfoRequest::parse(&out).as_ref(), Ok(&request));
        }
        1 => {
            let Ok(request) = MetaRequest::parse(payload) else { return };
            assert!(request.queries.len() <= limits::QUERIES);
            request.emit(&mut out);
            assert_eq!(out, payload);
        }
        2 => {
            let Ok(entry) = ListEntry::parse(payload) else { return };
            assert!(!entry.description.chars().any(char::is_control));
            entry.emit(&mut out);
            let again = ListEntry::parse(&out).map(|again| again.name);
            assert_eq!(again, Ok(entry.name));
        }
        3 => {
            let Ok(context) = MetaContext::parse(payload) else { return };
            context.emit(&mut out);
            assert_eq!(out, payload);
        }
        _ => {
            let Ok(info) = InfoItem::parse(payload) else { return };
            info.emit(&mut out);
            if !matches!(info, InfoItem::Description(_)) {
                assert_eq!(InfoItem::parse(&out).as_ref(), Ok(&info));
            }
        }
    }
}

/// A server's handshake: the first byte chooses what is offered, the second how the rest, the
/// client's bytes, is cut.
pub fn fuzz_server_handshake(data: &[u8]) {
    let [offers, cut, input @ ..] = data else { return };
    let bit = |n: u8| offers >> n & 1 != 0;
    let config = HandshakeConfig {
        fixed_newstyle: !bit(0),
        no_zeroes: !bit(1),
        structured: !bit(2),
        extended: !bit(3),
        meta_contexts: !bit(4),
        tls: [
            TlsRequirement::Off,
            TlsRequirement::Off,
            TlsRequirement::Offered,
            TlsRequirement::Required,
        ][usize::from(offers >> 5 & 3)],
        ..HandshakeConfig::default()
    };
    let whole = serve(config, input, input.len().max(1));
    // The cuts make no difference, except to what may follow STARTTLS.
    if config.tls == TlsRequirement::Off {
        let cut = serve(config, input, usize::from(*cut).max(1));
        assert_eq!(whole, cut);
    }
}

/// Everything that a server sent and did.
type Transcript = (Vec<u8>, Vec<String>, Option<ProtocolError>);

fn serve(config: HandshakeConfig, input: &[u8], step: usize) -> Transcript {
    let mut out = Vec::new();
    let mut events = Vec::new();
    let mut server = Server::new(config, &mut out);
    let greeting = out.len();
    let mut used = 0;
    let mut there = step.min(input.len());
    let mut transmission = false;
    let end = loop {
        let (consumed, event) = match server.receive(&input[used..there], &mut out) {
            Ok(received) => received,
            Err(error) => break Some(error),
        };
        used += consumed;
        assert!(used <= there);
        if let server::ServerHandshakeEvent::NeedMore { bytes } = event {
            assert!(bytes > there - used && bytes <= Server::MAX_MESSAGE);
            if there == input.len() {
                break None;
            }
            there = input.len().min(there + step);
            continue;
        }
        events.push(format!("{event:?}"));
        let done = match event {
            server::ServerHandshakeEvent::NeedMore { .. } => Ok(()),
            server::ServerHandshakeEvent::Export { name, .. } => {
                server.answer_export(export(&name), &mut out)
            }
            server::ServerHandshakeEvent::List => server.answer_list(Ok(&exports()), &mut out),
            server::ServerHandshakeEvent::MetaContext { export, queries, .. } => {
                let refusal = OptionRefusal::new(OptionError::Unknown, "no such export");
                let answer = if export == "none" { Err(refusal) } else { Ok(contexts(&queries)) };
                server.answer_contexts(answer, &mut out)
            }
            server::ServerHandshakeEvent::StartTls => server.tls_started(),
            server::ServerHandshakeEvent::Abort => break None,
            server::ServerHandshakeEvent::Transmission(negotiated) => {
                assert!(negotiated.contexts.len() <= limits::CONTEXTS);
                assert!(negotiated.contexts.is_empty() || negotiated.replies != ReplyForm::Simple);
                transmission = true;
                break None;
            }
        };
        if let Err(error) = done {
            break Some(error);
        }
    };
    if let Some(ProtocolError::Caller { what }) = &end {
        panic!("the driver breaks the contract: {what}");
    }
    // Every reply is complete and well-formed; EXPORT_NAME's has no head and is the last.
    let mut rest = &out[greeting..];
    while let Ok(Some(head)) = OptionReplyHeader::parse(rest) {
        rest = &rest[OptionReplyHeader::LEN + head.length as usize..];
    }
    assert!(rest.is_empty() || transmission && (rest.len() == 10 || rest.len() == 134));
    let most = limits::OPTIONS + 2 * limits::OPTIONS_PER_EXPORT + 1;
    assert!(u32::try_from(events.len()).is_ok_and(|count| count <= most));
    (out, events, end)
}

fn export(name: &str) -> Result<ExportReply, OptionRefusal> {
    if name == "none" {
        return Err(OptionRefusal::new(OptionError::Unknown, "no such export"));
    }
    Ok(ExportReply {
        size: name.len() as u64,
        flags: ExportFlags::from_bits(name.bytes().map(u16::from).sum()),
        block_sizes: name.len().is_multiple_of(2).then_some(BlockSizeInfo::DEFAULT),
        require_block_sizes: name.starts_with('r'),
        name: name.starts_with('c').then(|| "canonical".to_owned()),
        description: name.starts_with('d').then(|| "described".to_owned()),
    })
}

fn exports() -> [ListEntry; 2] {
    ["a", "b"].map(|name| ListEntry { name: name.to_owned(), description: String::new() })
}

fn contexts(queries: &[String]) -> Vec<MetaContext> {
    let known = queries.iter().filter(|query| query.contains(':'));
    known.zip(3..).map(|(name, id)| MetaContext { id, name: name.clone() }).collect()
}

/// A client's handshake: the first byte chooses the options, the second how the rest, the server's
/// bytes, is cut.
pub fn fuzz_client_handshake(data: &[u8]) {
    let [options, cut, input @ ..] = data else { return };
    let whole = ask(*options, input, input.len().max(1));
    let cut = ask(*options, input, usize::from(*cut).max(1));
    // The cuts make a difference only to what may follow the reply to STARTTLS, and to how much of
    // an invalid greeting is reported.
    let tls = |transcript: &Transcript| transcript.1.iter().any(|event| event == "StartTls");
    let behind =
        matches!(whole.2, Some(ProtocolError::Unexpected { .. } | ProtocolError::NotNbd { .. }));
    if !tls(&whole) && !behind {
        assert_eq!(whole, cut);
    }
}

fn ask(options: u8, input: &[u8], step: usize) -> Transcript {
    let mut out = Vec::new();
    let mut events = Vec::new();
    let mut client = Client::new();
    let mut used = 0;
    let mut there = step.min(input.len());
    let mut turn = options;
    let end = loop {
        let (consumed, event) = match client.receive(&input[used..there], &mut out) {
            Ok(received) => received,
            Err(error) => break Some(error),
        };
        used += consumed;
        assert!(used <= there);
        if let client::ClientHandshakeEvent::NeedMore { bytes } = event {
            assert!(bytes > there - used && bytes <= Client::MAX_MESSAGE);
            if there == input.len() {
                break None;
            }
            there = input.len().min(there + step);
            continue;
        }
        events.push(format!("{event:?}"));
        match event {
            client::ClientHandshakeEvent::Aborted => break None,
            client::ClientHandshakeEvent::Transmission(negotiated) => {
                check_negotiated(&negotiated);
                break None;
            }
            client::ClientHandshakeEvent::StartTls => {
                client.tls_started().expect("it was the last event");
            }
            client::ClientHandshakeEvent::Info(info) => check_info(&info),
            client::ClientHandshakeEvent::Refused { text, .. } => {
                assert!(text.len() <= limits::ERROR_TEXT + 3);
                assert!(!text.chars().any(char::is_control));
            }
            _ => {}
        }
        let sent = send_option(&mut client, &mut turn, &mut out);
        if !sent && client.export_name("a", &mut out).is_err() {
            panic!("nothing can be sent after {events:?}");
        }
    };
    if let Some(ProtocolError::Caller { what }) = &end {
        panic!("the driver breaks the contract: {what}");
    }
    check_options(&out);
    // A close is explained in every state.
    if let Err(error) = client.closed(&input[used..]) {
        assert!(!error.to_string().chars().any(char::is_control));
    }
    (out, events, end)
}

/// Sends an option that `turn` chooses; if the handshake refuses to send it now, another one. False
/// if it refuses all.
fn send_option(client: &mut Client, turn: &mut u8, out: &mut Vec<u8>) -> bool {
    let queries = ["base:allocation".to_owned()];
    (0..11).any(|_| {
        *turn = turn.wrapping_mul(5).wrapping_add(1);
        let sent = match *turn % 11 {
            0 => client.list(out),
            1 => client.info("a", InfoSet::ALL, out),
            2 => client.go("a", InfoSet::BLOCK_SIZE, out),
            3 => client.export_name("a", out),
            4 => client.structured_replies(out),
            5 => client.extended_headers(out),
            6 => client.list_meta_contexts("a", &[], out),
            7 | 8 => client.set_meta_contexts("a", &queries, out),
            9 => client.starttls(out),
            _ => client.abort(out),
        };
        sent.is_ok()
    })
}

/// Checks what a client sends: its flags, then whole options.
fn check_options(out: &[u8]) {
    let mut rest = out.get(4..).unwrap_or(&[]);
    while !rest.is_empty() {
        let head = OptionHeader::parse(rest).expect("an option").expect("a whole head");
        rest = &rest[OptionHeader::LEN + head.length as usize..];
    }
}

fn check_info(info: &client::ExportInfo) {
    assert!(info.block_sizes.is_none_or(|sizes| sizes.is_valid()));
    assert!(info.description.as_ref().is_none_or(|text| !text.chars().any(char::is_control)));
}

fn check_negotiated(negotiated: &client::ClientHandshakeResult) {
    check_info(&negotiated.info);
    assert!(negotiated.contexts.len() <= limits::CONTEXTS);
    let extended = negotiated.headers == RequestForm::Extended;
    assert_eq!(extended, negotiated.replies == ReplyForm::Extended);
    assert!(negotiated.contexts.is_empty() || negotiated.replies != ReplyForm::Simple);
}

/// A client's negotiation: the first byte chooses its wishes, the rest are the server's bytes.
pub fn fuzz_negotiation(data: &[u8]) {
    let Some((wants, input)) = data.split_first() else { return };
    let bit = |n: u8| wants >> n & 1 != 0;
    let wants = NegotiationOptions {
        contexts: if bit(0) { Vec::new() } else { vec!["base:allocation".to_owned()] },
        extended: !bit(1),
        structured: !bit(2),
        infos: if bit(3) { InfoSet::ALL } else { InfoSet::default() },
        end: if bit(4) { NegotiationGoal::Options } else { NegotiationGoal::Transmission },
        tls: bit(5),
        ..NegotiationOptions::new("a")
    };
    let mut negotiation = Negotiation::new(wants).expect("a good name");
    let mut out = Vec::new();
    let mut used = 0;
    for there in 0..=input.len() {
        match negotiation.receive(&input[used..there], &mut out) {
            Ok((consumed, step)) => {
                used += consumed;
                assert!(used <= there);
                match step {
                    NegotiationStep::NeedMore { bytes } => assert!(bytes > there - used),
                    NegotiationStep::Options => break,
                    NegotiationStep::StartTls => {
                        negotiation.tls_started().expect("it was asked for")
                    }
                    NegotiationStep::Transmission(negotiated) => {
                        check_negotiated(&negotiated);
                        break;
                    }
                }
            }
            Err(ProtocolError::Caller { what }) => {
                panic!("the negotiation breaks the contract: {what}")
            }
            Err(error) => {
                assert!(!error.to_string().chars().any(char::is_control));
                break;
            }
        }
    }
    check_options(&out);
}

/// A URI.
pub fn fuzz_uri(data: &[u8]) {
    let Ok(text) = str::from_utf8(data) else { return };
    match Uri::parse(text) {
        Ok(uri) => {
            let canonical = uri.to_string();
            assert!(canonical.is_ascii());
            assert_eq!(Uri::parse(&canonical).as_ref(), Ok(&uri), "{canonical}");
        }
        Err(error) => {
            let error = error.to_string();
            assert!(!error.is_empty() && !error.chars().any(char::is_control), "{error}");
        }
    }
}

/// A peer's text for printing; the first byte is the maximum length.
pub fn fuzz_printable(data: &[u8]) {
    let Some((max, text)) = data.split_first() else { return };
    let shown = printable(text, (*max).into());
    assert!(shown.len() <= usize::from(*max) + 3);
    assert!(!shown.chars().any(char::is_control));
}
