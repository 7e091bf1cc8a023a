//! Every kind of reply, cut at every byte, and servers that violate the protocol.

use super::{ReadRange, ReceiveResult, Transmission, TransmissionEvent};
use crate::fuzz::transmission::{Memory, ReadOutcome, Transcript, drive, machine};
use crate::reply::{ChunkKind, ErrorChunk, HoleChunk, ReplyChunk, ReplyEncoder};
use crate::request::RequestHeader;
use crate::status::{self, StatusChunk, StatusLimits};
use crate::{
    CommandCode, CommandFlags, Errno, ProtocolError, ReplyFlags, ReplyForm, RequestForm, limits,
    magic,
};

const CHUNKS: [ReplyForm; 2] = [ReplyForm::Structured, ReplyForm::Extended];

/// The indexes of the requests of [`machine`].
const READ: usize = 0;
const SHORT_READ: usize = 1;
const WRITE: usize = 2;
const FLUSH: usize = 3;
const STATUS: usize = 4;

/// The bytes of a server.
struct Server {
    replies: ReplyForm,
    cookies: Vec<u64>,
    out: Vec<u8>,
}

impl Server {
    fn answer(&self, request: usize) -> ReplyEncoder {
        let offset = [4096, 0, 512, 0, 0][request];
        ReplyEncoder { replies: self.replies, cookie: self.cookies[request], offset }
    }

    fn success(mut self, request: usize) -> Server {
        self.out.extend_from_slice(&self.answer(request).success());
        self
    }

    fn data(mut self, request: usize, flags: ReplyFlags, at: u64, data: &[u8]) -> Server {
        let len = u32::try_from(data.len()).unwrap();
        self.out.extend_from_slice(&self.answer(request).data(flags, at, len).unwrap());
        self.out.extend_from_slice(data);
        self
    }

    fn hole(mut self, request: usize, flags: ReplyFlags, at: u64, len: u32) -> Server {
        let head = self.answer(request).hole(flags, HoleChunk { at, len }).unwrap();
        self.out.extend_from_slice(&head);
        self
    }

    /// Any chunk.
    fn chunk(
        mut self,
        request: usize,
        flags: ReplyFlags,
        kind: ChunkKind,
        payload: &[u8],
    ) -> Server {
        let head = self.answer(request).chunk(flags, kind, payload.len() as u64);
        self.out.extend_from_slice(&head.encode().unwrap());
        self.out.extend_from_slice(payload);
        self
    }

    fn status(mut self, request: usize, flags: ReplyFlags, context: u32, lens: &[u64]) -> Server {
        let chunk = StatusChunk { flags, context, wanted: StatusLimits::new(1 << 20) };
        let extents =
            lens.iter().zip(0..).map(|(len, flags)| status::StatusExtent { len: *len, flags });
        let answer = self.answer(request);
        status::emit(&answer, chunk, extents, &mut self.out).unwrap();
        self
    }

    fn failure(mut self, request: usize, failure: &ErrorChunk<'_>) -> Server {
        let answer = self.answer(request);
        answer.error(failure, &mut self.out);
        self
    }
}

const MORE: ReplyFlags = ReplyFlags::NONE;
const DONE: ReplyFlags = ReplyFlags::DONE;

/// The transcript of a server's bytes, which is the same for each cut in two, and byte by byte.
fn transcript(replies: ReplyForm, script: impl Fn(Server) -> Server) -> Transcript {
    let cookies = machine(replies).1;
    let input = script(Server { replies, cookies, out: Vec::new() }).out;
    let whole = drive(&mut machine(replies).0, &input, |_| input.len());
    for cut in 0..input.len() {
        let next = |there| if there < cut { cut } else { input.len() };
        assert_eq!(drive(&mut machine(replies).0, &input, next), whole, "cut at {cut}");
    }
    assert_eq!(drive(&mut machine(replies).0, &input, |there| there + 1), whole);
    whole
}

/// The outcome of the only request that ends.
fn outcome(replies: ReplyForm, script: impl Fn(Server) -> Server) -> ReadOutcome {
    let Transcript { mut ended, error, .. } = transcript(replies, script);
    assert_eq!((ended.len(), error), (1, None));
    ended.remove(0).1
}

/// The error that ends the connection; no request ends before.
fn violation(replies: ReplyForm, script: impl Fn(Server) -> Server) -> String {
    let transcript = transcript(replies, script);
    assert_eq!(transcript.ended, []);
    transcript.error.expect("an error")
}

fn content(at: u64, len: usize) -> Vec<u8> {
    (at..).take(len).map(|at| at as u8).collect()
}

#[test]
fn simple_replies_in_any_order() {
    let found = transcript(ReplyForm::Simple, |server| {
        let server = server.success(FLUSH).data(SHORT_READ, DONE, 0, &content(0, 16));
        server.success(WRITE).data(READ, DONE, 4096, &content(4096, 64))
    });
    let cookies = machine(ReplyForm::Simple).1;
    let none = || Ok((Vec::new(), Vec::new()));
    let ended = [
        (cookies[FLUSH], none()),
        (cookies[SHORT_READ], Ok((content(0, 16), Vec::new()))),
        (cookies[WRITE], none()),
        (cookies[READ], Ok((content(4096, 64), Vec::new()))),
    ];
    assert_eq!(found, Transcript { ended: ended.into(), error: None, messages: 4 });
}

// nbd: read.reassemble
#[test]
fn every_kind_of_chunk_in_replies_that_mix() {
    for replies in CHUNKS {
        let found = transcript(replies, |server| {
            let server = server.data(READ, MORE, 4128, &content(4128, 32));
            let server = server.status(STATUS, MORE, 9, &[4096, 1 << 20]).success(WRITE);
            let server = server.hole(READ, MORE, 4100, 28).hole(SHORT_READ, DONE, 0, 16);
            let server = server.status(STATUS, MORE, 1, &[1 << 20]);
            let server = server.status(STATUS, DONE, 7, &[1 << 21]);
            let server = server.data(READ, MORE, 4096, &content(4096, 4));
            server.chunk(READ, DONE, ChunkKind::None, &[]).chunk(FLUSH, DONE, ChunkKind::None, &[])
        });
        assert_eq!((found.error, found.messages), (None, 10));
        let ended: Vec<_> = found.ended.into_iter().map(|(_, ended)| ended.unwrap()).collect();
        let read = [content(4096, 4), vec![0; 28], content(4128, 32)].concat();
        let status = vec![(7, vec![(1 << 21, 0)]), (9, vec![(4096, 0), (1 << 20, 1)])];
        let none = || (Vec::new(), Vec::new());
        let due =
            [none(), (vec![0; 16], Vec::new()), (Vec::new(), status), (read, Vec::new()), none()];
        assert_eq!(ended, due);
    }
}

// nbd: error.unknown, error-offset.nonzero
#[test]
fn errors_end_their_request_only() {
    let io = ErrorChunk::new(Errno::Io);
    for replies in [ReplyForm::Simple, ReplyForm::Structured, ReplyForm::Extended] {
        for request in [READ, WRITE, FLUSH, STATUS] {
            let found = outcome(replies, |server| server.failure(request, &io));
            assert_eq!(found.unwrap_err(), "the server answers input/output error");
        }
    }
    for replies in CHUNKS {
        let of =
            |failure: ErrorChunk<'_>| outcome(replies, |server| server.failure(READ, &failure));
        let found = of(ErrorChunk { text: b" no luck\n", ..io });
        assert_eq!(found.unwrap_err(), "the server answers input/output error (no luck\\n)");
        let found = of(ErrorChunk { text: b"no luck", at: Some(4100), ..io });
        assert_eq!(
            found.unwrap_err(),
            "the server answers input/output error (no luck at offset 4100)"
        );
        let found = of(ErrorChunk { at: Some(4100), ..io });
        assert_eq!(found.unwrap_err(), "the server answers input/output error (at offset 4100)");
        // The first of several errors counts, and data does not. An unknown kind is an error.
        let unknown = ChunkKind::Other(magic::REPLY_ERROR_BIT | 77);
        let found = outcome(replies, |server| {
            let server = server.data(READ, MORE, 4096, &content(4096, 64));
            let server = server.chunk(READ, MORE, unknown, &[0, 0, 0, 28, 0, 1, b'a', 1, 2, 3]);
            server.failure(READ, &io)
        });
        assert_eq!(found.unwrap_err(), "the server answers no space left on device (a)");
    }
}

// nbd: chunk.overlap-refused, read.incomplete-refused
#[test]
fn gaps_and_bytes_that_come_twice_end_their_request_only() {
    let incomplete = "the server left out bytes of a read, or sent some twice";
    type Parts = &'static [(u64, usize)];
    let wrong: [Parts; 7] = [
        &[],
        &[(4096, 63)],
        &[(4097, 63)],
        &[(4096, 64), (4096, 64)],
        &[(4096, 64), (4100, 1)],
        &[(4096, 32), (4127, 33)],
        &[(4128, 32), (4096, 31)],
    ];
    for (replies, parts) in CHUNKS.iter().flat_map(|form| wrong.map(|parts| (*form, parts))) {
        let scripts: [&dyn Fn(Server, (u64, usize)) -> Server; 2] = [
            &|server, (at, len)| server.data(READ, MORE, at, &content(at, len)),
            &|server, (at, len)| server.hole(READ, MORE, at, u32::try_from(len).unwrap()),
        ];
        for script in scripts {
            let found = outcome(replies, |server| {
                let server = parts.iter().fold(server, |server, part| script(server, *part));
                server.chunk(READ, DONE, ChunkKind::None, &[])
            });
            assert_eq!(found.unwrap_err(), incomplete, "{parts:?}");
        }
    }
    for replies in CHUNKS {
        let found = outcome(replies, |server| server.status(STATUS, DONE, 7, &[512]));
        assert_eq!(found.unwrap_err(), "the server left out a metadata context");
    }
}

// nbd: transmission.cookies-differ, error.inconsistent
#[test]
fn replies_to_nothing_end_the_connection() {
    let nothing = "a reply to a request that is not in flight";
    for replies in [ReplyForm::Simple, ReplyForm::Structured, ReplyForm::Extended] {
        for cookie in [0, 1, u64::MAX, 1 << 32 | 1, 2 << 32] {
            let found = violation(replies, |mut server| {
                server.cookies[FLUSH] = cookie;
                server.success(FLUSH)
            });
            assert_eq!(found, nothing, "{cookie:#x}");
        }
        let found = transcript(replies, |server| server.success(FLUSH).success(FLUSH));
        assert_eq!((found.ended.len(), found.error.as_deref()), (1, Some(nothing)));
    }
}

// nbd: structured.simple-read-refused, extended.offset-checked
#[test]
fn replies_of_another_form_end_the_connection() {
    let simple = |request| {
        violation(ReplyForm::Structured, move |mut server| {
            server.replies = ReplyForm::Simple;
            server.success(request)
        })
    };
    assert_eq!(simple(READ), "a simple reply to a read, with structured replies on");
    assert_eq!(simple(STATUS), "a simple reply to block status");
    let simple = violation(ReplyForm::Simple, |server| server.success(STATUS));
    assert_eq!(simple, "a simple reply to block status");
    let found = violation(ReplyForm::Extended, |mut server| {
        let chunk = ReplyChunk {
            offset: Some(4097),
            ..server.answer(READ).chunk(DONE, ChunkKind::None, 0)
        };
        server.out.extend_from_slice(&chunk.encode().unwrap());
        server
    });
    assert_eq!(found, "a reply with another offset than the request's");
}

#[test]
fn chunks_that_do_not_fit_the_request_end_the_connection() {
    for replies in CHUNKS {
        for (at, len) in [(4095, 1), (4096, 65), (4160, 1), (0, 1), (u64::MAX, 2)] {
            let found = violation(replies, |server| server.data(READ, MORE, at, &vec![0; len]));
            assert_eq!(found, "data outside of the request");
            let len = u32::try_from(len).unwrap();
            let found = violation(replies, |server| server.hole(READ, MORE, at, len));
            assert_eq!(found, "a hole outside of the request");
        }
        let found = violation(replies, |server| server.data(WRITE, MORE, 512, &[0; 512]));
        assert_eq!(found, "data in reply to another command than read");
        let found = violation(replies, |server| server.hole(WRITE, MORE, 512, 512));
        assert_eq!(found, "a hole in reply to another command than read");
        let found = violation(replies, |server| server.status(READ, DONE, 7, &[512]));
        assert_eq!(found, "extents in reply to another command than block status");
        let zero = [0, 0, 0, 0, 0, 0];
        let found = violation(replies, |server| server.chunk(READ, DONE, ChunkKind::Error, &zero));
        assert!(found.contains("error number is 0"), "{found}");
    }
}

#[test]
fn a_reply_has_a_maximum_number_of_chunks() {
    let (mut machine, cookies) = machine(ReplyForm::Structured);
    let server = Server { replies: ReplyForm::Structured, cookies, out: Vec::new() };
    let chunk = server.chunk(READ, MORE, ChunkKind::Error, &[0, 0, 0, 5, 0, 0]).out;
    let input = chunk.repeat(limits::CHUNKS as usize);
    assert_eq!(drive(&mut machine, &input, |_| input.len()).error, None);
    let found = drive(&mut machine, &chunk, |_| chunk.len()).error;
    assert_eq!(found.as_deref(), Some("a reply in too many chunks"));
}

#[test]
fn a_payload_may_be_taken_in_parts() {
    let (mut machine, cookies) = machine(ReplyForm::Structured);
    let cookie = cookies[READ];
    let server = Server { replies: ReplyForm::Structured, cookies, out: Vec::new() };
    let input = server.data(READ, DONE, 4096, &content(4096, 64)).out;
    let head = input.len() - 64;
    let mut next = |input: &[u8], took: u64| {
        machine.took(took);
        assert!(!machine.is_between_messages() || took == 0);
        machine.receive(input).unwrap()
    };
    let range = |at: u64| TransmissionEvent::Payload(ReadRange { cookie, at, len: 64 - at });
    assert_eq!(next(&input, 0), ReceiveResult { used: head, messages: 1, event: range(0) });
    for took in 1..64 {
        // The bytes are not consumed here, whether they have arrived or not.
        let input = if took % 2 == 0 { &input[head..] } else { &[] };
        assert_eq!(next(input, 1), ReceiveResult { used: 0, messages: 0, event: range(took) });
    }
    assert!(matches!(
        next(&[], 1),
        ReceiveResult { used: 0, messages: 0, event: TransmissionEvent::End { .. } }
    ));
    assert!(machine.is_between_messages());
}

/// A request for 512 bytes.
fn header(command: CommandCode) -> RequestHeader {
    RequestHeader { flags: CommandFlags::NONE, command, cookie: 5, offset: 1024, length: 512 }
}

// nbd: transmission.cookies-differ, extended.write-flag, extended.compact-no-flag
#[test]
fn requests_have_cookies_of_their_own_and_the_flags_of_their_form() {
    for (headers, replies) in
        [(RequestForm::Compact, ReplyForm::Simple), (RequestForm::Extended, ReplyForm::Extended)]
    {
        let mut machine = Transmission::new(headers, replies);
        let mut cookies = std::collections::BTreeSet::new();
        for round in 0..100 {
            let (cookie, sent) =
                machine.begin(header(CommandCode::Write), Vec::new(), round).unwrap();
            let sent = RequestHeader::parse(&sent, headers).unwrap().unwrap().0;
            let flags = match headers {
                RequestForm::Compact => CommandFlags::NONE,
                RequestForm::Extended => CommandFlags::PAYLOAD_LEN,
            };
            assert_eq!(sent, RequestHeader { flags, cookie, ..header(CommandCode::Write) });
            assert!(cookies.insert(cookie));
            assert_eq!(machine.get_mut(cookie), Some(&mut round.clone()));
            if round % 3 > 0 {
                assert_eq!(machine.withdraw(cookie), Some(round));
                assert_eq!(machine.withdraw(cookie), None);
            }
        }
        assert_eq!(machine.in_flight(), 34);
        assert_eq!(machine.drain().count(), 34);
        assert_eq!(machine.in_flight(), 0);
        let (cookie, _) = machine.begin(header(CommandCode::Read), Vec::new(), 0).unwrap();
        assert!(cookies.insert(cookie));
    }
}

#[test]
fn a_request_that_is_too_long_comes_back() {
    let mut machine = Transmission::new(RequestForm::Compact, ReplyForm::Simple);
    let long = RequestHeader { length: 1 << 32, ..header(CommandCode::Trim) };
    let (with, error) = machine.begin(long, Vec::new(), "it").unwrap_err();
    assert_eq!(with, "it");
    assert!(matches!(error, ProtocolError::TooLong { .. }));
    assert_eq!(machine.in_flight(), 0);
}

// nbd: disc.zero
#[test]
fn the_disconnect_request_has_no_range() {
    for (headers, replies) in
        [(RequestForm::Compact, ReplyForm::Simple), (RequestForm::Extended, ReplyForm::Extended)]
    {
        let machine = Transmission::<Memory>::new(headers, replies);
        let sent = machine.disconnect().unwrap();
        let sent = RequestHeader::parse(&sent, headers).unwrap().unwrap().0;
        assert_eq!((sent.command, sent.cookie), (CommandCode::Disconnect, 0));
        assert_eq!((sent.flags, sent.offset, sent.length), (CommandFlags::NONE, 0, 0));
    }
}
