//! Servers that are slow, silent or wrong in transmission: each gives an error that says what
//! happened, or works; nothing hangs, nothing panics, and wrong bytes are never accepted.

use std::sync::Mutex;
use std::sync::mpsc::TryRecvError;
use std::time::{Duration, Instant};

use crate::common::{
    CHUNKS, FORMS, SIZE, bytes, content, hasty, offer, on_worker, options, read, use_it, with,
};
use blockhaul_block::{Can, ContextSet, Device, Error, Kind, PendingRequest, Reply, Request};
use blockhaul_client::options::{ConnectTarget, OptionSession};
use blockhaul_io::{Data, Pool, Reservation};
use blockhaul_testkit::peer::{
    Conversation, ReplyFault, ReplyFaultKind, ScriptResult, ScriptedServer,
};
use blockhaul_wire::request::RequestHeader;
use blockhaul_wire::{CommandCode, CommandFlags, ReplyForm, RequestForm, magic};

/// The results of the second read, which is spoiled, and of the third one.
fn spoiled(
    replies: ReplyForm,
    how: ReplyFaultKind,
) -> (Result<Vec<u8>, Error>, Result<Vec<u8>, Error>) {
    let offer = offer().replies(replies).spoil(ReplyFault::nth(CommandCode::Read, 2, how));
    let server = ScriptedServer::offer(offer);
    with(&server, options(), |device| async move {
        assert_eq!(read(&*device, 0, 512).await.unwrap(), content(0, 512));
        let second = read(&*device, 8192, 4096).await;
        (second, read(&*device, 100, 512).await)
    })
    .unwrap()
}

// nbd: structured.simple-read-refused, chunk.unknown, error.inconsistent
// nbd: extended.offset-checked
#[test]
fn wrong_answers_to_reads_end_the_connection() {
    let any: &[(ReplyFaultKind, Kind, &str)] = &[
        (ReplyFaultKind::Close, Kind::Disconnected, "closed the connection"),
        (ReplyFaultKind::CloseInHead, Kind::Disconnected, "in the middle of a reply"),
        (ReplyFaultKind::CloseInPayload, Kind::Disconnected, "in the middle of a reply"),
        (ReplyFaultKind::WrongCookie, Kind::Io, "not in flight"),
        (ReplyFaultKind::Garbage, Kind::Io, "broke the protocol"),
    ];
    for replies in FORMS {
        for (how, kind, text) in any {
            let (second, third) = spoiled(replies, how.clone());
            for error in [second.unwrap_err(), third.unwrap_err()] {
                assert_eq!(error.kind(), *kind, "{replies:?} {how:?}: {error}");
                assert!(error.to_string().contains(text), "{replies:?} {how:?}: {error}");
            }
        }
    }
    let chunks: &[(ReplyFaultKind, &str)] = &[
        (ReplyFaultKind::ErrorZero, "broke the protocol"),
        (ReplyFaultKind::UnknownChunk, "unknown kind of chunk"),
        (ReplyFaultKind::Oversized, "broke the protocol"),
        (ReplyFaultKind::OutsideRange, "outside of the request"),
        (ReplyFaultKind::NeverDone, "not the last"),
    ];
    for replies in CHUNKS {
        for (how, text) in chunks {
            let (second, third) = spoiled(replies, how.clone());
            for error in [second.unwrap_err(), third.unwrap_err()] {
                assert_eq!(error.kind(), Kind::Io, "{replies:?} {how:?}: {error}");
                assert!(error.to_string().contains(text), "{replies:?} {how:?}: {error}");
            }
        }
        let (second, third) = spoiled(replies, ReplyFaultKind::SimpleInstead);
        assert!(second.unwrap_err().to_string().contains("broke the protocol"));
        third.unwrap_err();
    }
    let (second, third) = spoiled(ReplyForm::Extended, ReplyFaultKind::WrongOffset);
    assert!(second.unwrap_err().to_string().contains("another offset"));
    third.unwrap_err();
}

#[test]
fn a_read_that_is_not_answered_ends_the_connection() {
    for replies in FORMS {
        let offer = offer().replies(replies).spoil(ReplyFault::nth(
            CommandCode::Read,
            1,
            ReplyFaultKind::Hang,
        ));
        let errors = with(&ScriptedServer::offer(offer), hasty(), |device| async move {
            let first = read(&*device, 8192, 4096).await.unwrap_err();
            [first, read(&*device, 100, 512).await.unwrap_err()]
        });
        for error in errors.unwrap() {
            assert_eq!(error.kind(), Kind::TimedOut, "{replies:?}: {error}");
            assert!(error.to_string().contains("no byte from the server"), "{error}");
        }
    }
}

// nbd: transmission.cookies-differ
#[test]
fn a_reply_that_comes_twice_ends_the_connection_after_the_first() {
    for replies in FORMS {
        let (second, third) = spoiled(replies, ReplyFaultKind::Twice);
        assert_eq!(second.unwrap(), content(8192, 4096));
        let error = third.unwrap_err();
        assert!(error.to_string().contains("not in flight"), "{error}");
    }
}

// nbd: chunk.overlap-refused, error.unknown, read.incomplete-refused, errors.unknown
#[test]
fn errors_and_gaps_end_the_request_only() {
    for replies in FORMS {
        let (second, third) = spoiled(replies, ReplyFaultKind::Error(28));
        assert_eq!(second.unwrap_err().kind(), Kind::NoSpace);
        assert_eq!(third.unwrap(), content(100, 512));
        let (second, third) = spoiled(replies, ReplyFaultKind::Error(4711));
        assert!(second.unwrap_err().to_string().contains("the server answers"));
        assert_eq!(third.unwrap(), content(100, 512));
    }
    let chunks = [
        (ReplyFaultKind::ErrorAt(5, 8200, "no luck\n".into()), Kind::Io, "no luck"),
        (ReplyFaultKind::ErrorAt(5, 8200, String::new()), Kind::Io, "at offset 8200"),
        (ReplyFaultKind::ErrorAt(28, 1, "full".into()), Kind::NoSpace, "full at offset 1"),
        (ReplyFaultKind::UnknownError, Kind::Io, "??"),
        (ReplyFaultKind::ErrorHalfway(5), Kind::Io, "the server answers"),
        (ReplyFaultKind::Missing, Kind::Io, "left out bytes"),
        (ReplyFaultKind::Overlap, Kind::Io, ""),
    ];
    for replies in CHUNKS {
        for (how, kind, text) in chunks.clone() {
            let (second, third) = spoiled(replies, how.clone());
            let error = second.unwrap_err();
            assert_eq!(error.kind(), kind, "{how:?}: {error}");
            assert!(error.to_string().contains(text), "{how:?}: {error}");
            assert!(!error.to_string().contains('\n'));
            if how != ReplyFaultKind::Overlap {
                assert_eq!(third.unwrap(), content(100, 512), "{how:?}");
            }
        }
        for how in [ReplyFaultKind::Backwards, ReplyFaultKind::Hole] {
            let (second, third) = spoiled(replies, how.clone());
            let expected =
                if how == ReplyFaultKind::Hole { vec![0; 4096] } else { content(8192, 4096) };
            assert_eq!(second.unwrap(), expected);
            assert_eq!(third.unwrap(), content(100, 512));
        }
    }
}

#[test]
fn wrong_answers_to_other_commands() {
    for replies in FORMS {
        for command in
            [CommandCode::Write, CommandCode::WriteZeroes, CommandCode::Trim, CommandCode::Flush]
        {
            for (how, kind) in [
                (ReplyFaultKind::Close, Kind::Disconnected),
                (ReplyFaultKind::WrongCookie, Kind::Io),
                (ReplyFaultKind::Hang, Kind::TimedOut),
                (ReplyFaultKind::Error(28), Kind::NoSpace),
                (ReplyFaultKind::Error(1), Kind::ReadOnly),
            ] {
                let offer =
                    offer().replies(replies).spoil(ReplyFault::nth(command, 1, how.clone()));
                let server = ScriptedServer::offer(offer);
                let options = if how == ReplyFaultKind::Hang { hasty() } else { options() };
                let outcome = with(&server, options, move |device| async move {
                    let request = match command {
                        CommandCode::Write => Request::write(0, Data::copy_of(&[1; 70_000])),
                        CommandCode::WriteZeroes => Request::zero(0, 4096),
                        CommandCode::Trim => Request::trim(0, 4096),
                        _ => Request::flush(),
                    };
                    device.submit(request).await
                });
                let error = outcome.unwrap().unwrap_err();
                assert_eq!(error.kind(), kind, "{replies:?} {command:?} {how:?}: {error}");
            }
        }
    }
}

/// The result of a spoiled block status: an error, or runs.
fn status(replies: ReplyForm, how: ReplyFaultKind) -> (Result<Vec<(u64, u64)>, Error>, bool) {
    let offer = offer().replies(replies).spoil(ReplyFault::nth(CommandCode::BlockStatus, 1, how));
    let server = ScriptedServer::offer(offer);
    with(&server, options(), |device| async move {
        let outcome = device.submit(Request::extents(4096, 8192, ContextSet::first())).await;
        let runs = outcome.map(|reply| match reply {
            Reply::Extents(lists) => {
                lists[0].runs().iter().map(|run| (run.len, run.state)).collect()
            }
            other => panic!("{other:?}"),
        });
        (runs, read(&*device, 0, 512).await.is_ok())
    })
    .unwrap()
}

// nbd: error.inconsistent
#[test]
fn wrong_extents_are_errors() {
    for replies in CHUNKS {
        for (how, alive) in [
            (ReplyFaultKind::WrongContext, true),
            (ReplyFaultKind::NoStatus, true),
            (ReplyFaultKind::EmptyExtent, false),
            (ReplyFaultKind::NoExtents, false),
            (ReplyFaultKind::Error(22), true),
            (ReplyFaultKind::UnknownError, true),
            (ReplyFaultKind::Close, false),
        ] {
            let (runs, lives) = status(replies, how.clone());
            runs.expect_err("no extents came");
            assert_eq!(lives, alive, "{replies:?} {how:?}");
        }
        // Allowed, and cut to the requested range.
        let (runs, lives) = status(replies, ReplyFaultKind::LongExtent);
        assert_eq!((runs.unwrap(), lives), (vec![(8192, 0)], true));
    }
}

/// A server that follows the script after the first read request.
fn scripted_reply(
    replies: ReplyForm,
    script: impl Fn(&mut Conversation, &RequestHeader) -> ScriptResult + Send + Sync + 'static,
) -> ScriptedServer {
    ScriptedServer::start(move |talk, _| {
        handshake(talk, replies)?;
        let Some((request, _)) = talk.receive_request()? else { return Ok(()) };
        script(talk, &request)?;
        talk.hang()
    })
}

/// The handshake of a server with one context.
fn handshake(talk: &mut Conversation, replies: ReplyForm) -> ScriptResult {
    handshake_numbered(talk, replies, 9)
}

/// The same; the context has this number.
fn handshake_numbered(talk: &mut Conversation, replies: ReplyForm, id: u32) -> ScriptResult {
    talk.greet(3)?;
    loop {
        let (code, _) = talk.receive_option()?;
        match (code, replies) {
            (magic::OPT_EXTENDED_HEADERS, ReplyForm::Extended) => {
                talk.reply_option(code, magic::REP_ACK, &[])?;
                (talk.headers, talk.replies) = (RequestForm::Extended, ReplyForm::Extended);
            }
            (magic::OPT_STRUCTURED_REPLY, ReplyForm::Structured) => {
                talk.reply_option(code, magic::REP_ACK, &[])?;
                talk.replies = ReplyForm::Structured;
            }
            (magic::OPT_SET_META_CONTEXT, _) => {
                let context = [&id.to_be_bytes()[..], b"base:allocation"].concat();
                talk.reply_option(code, magic::REP_META_CONTEXT, &context)?;
                talk.reply_option(code, magic::REP_ACK, &[])?;
            }
            (magic::OPT_GO, _) => {
                let info = [&[0, 0][..], &SIZE.to_be_bytes(), &[0, 0b0110_1101]].concat();
                talk.reply_option(code, magic::REP_INFO, &info)?;
                return talk.reply_option(code, magic::REP_ACK, &[]);
            }
            _ => talk.reply_option(code, magic::REP_ERR_UNSUP, &[])?,
        }
    }
}

#[test]
fn data_after_all_of_it_is_an_error_and_no_panic() {
    for replies in CHUNKS {
        for (at, len) in [(0, 100_000), (0, 1), (99_999, 1), (5, 5000)] {
            let server = scripted_reply(replies, move |talk, request| {
                for (at, len) in [(0, 100_000), (at, len)] {
                    let payload = [&u64::to_be_bytes(at)[..], &content(at, len)].concat();
                    talk.send(&talk.chunk(request, 0, magic::REPLY_OFFSET_DATA, &payload))?;
                }
                talk.send(&talk.chunk(request, 1, magic::REPLY_NONE, &[]))
            });
            let outcome =
                with(&server, options(), |device| async move { read(&*device, 0, 100_000).await });
            assert_eq!(outcome.unwrap().unwrap_err().kind(), Kind::Io);
        }
        // A hole after all of the data.
        let server = scripted_reply(replies, move |talk, request| {
            let payload = [&[0; 8][..], &content(0, 100_000)].concat();
            talk.send(&talk.chunk(request, 0, magic::REPLY_OFFSET_DATA, &payload))?;
            let hole = [&8_u64.to_be_bytes()[..], &100_u32.to_be_bytes()].concat();
            talk.send(&talk.chunk(request, 1, magic::REPLY_OFFSET_HOLE, &hole))
        });
        let outcome =
            with(&server, options(), |device| async move { read(&*device, 0, 100_000).await });
        assert_eq!(outcome.unwrap().unwrap_err().kind(), Kind::Io);
    }
}

// nbd: read.reassemble
#[test]
fn data_in_many_pieces_in_any_order_is_put_together() {
    for replies in CHUNKS {
        let server = scripted_reply(replies, move |talk, request| {
            let mut bytes = Vec::new();
            for piece in (0..200_u64).rev() {
                let at = request.offset + piece * 512;
                if piece % 3 == 0 {
                    let hole = [&at.to_be_bytes()[..], &512_u32.to_be_bytes()].concat();
                    bytes.extend(talk.chunk(request, 0, magic::REPLY_OFFSET_HOLE, &hole));
                } else {
                    let payload = [&at.to_be_bytes()[..], &content(at, 512)].concat();
                    bytes.extend(talk.chunk(request, 0, magic::REPLY_OFFSET_DATA, &payload));
                }
            }
            bytes.extend(talk.chunk(request, 1, magic::REPLY_NONE, &[]));
            talk.send(&bytes)
        });
        let found =
            with(&server, options(), |device| async move { read(&*device, 512, 102_400).await });
        let mut expected = content(512, 102_400);
        for piece in (0..200).step_by(3) {
            expected[piece * 512..(piece + 1) * 512].fill(0);
        }
        assert_eq!(found.unwrap().unwrap(), expected);
    }
}

#[test]
fn a_reply_without_end_is_cut() {
    for replies in CHUNKS {
        let server = scripted_reply(replies, |talk, request| {
            let error = [&5_u32.to_be_bytes()[..], &[0, 0]].concat();
            let chunk = talk.chunk(request, 0, magic::REPLY_ERROR, &error).repeat(1000);
            while talk.send(&chunk).is_ok() {}
            Ok(())
        });
        let outcome =
            with(&server, options(), |device| async move { read(&*device, 0, 512).await });
        let error = outcome.unwrap().unwrap_err();
        assert!(error.to_string().contains("too many chunks"), "{error}");
    }
}

#[test]
fn one_extent_is_one_whatever_the_server_sends() {
    let server = scripted_reply(ReplyForm::Structured, |talk, request| {
        let runs = [9_u32, 4096, 0, 512, 3, 9000, 0].map(u32::to_be_bytes).concat();
        talk.send(&talk.chunk(request, 1, magic::REPLY_BLOCK_STATUS, &runs))
    });
    let found = with(&server, options(), |device| async move {
        let request = Request::extents(0, SIZE, ContextSet::first());
        device.submit(request.with(blockhaul_block::RequestFlags::ONE_EXTENT)).await
    });
    let Reply::Extents(lists) = found.unwrap().unwrap() else { panic!("no extents") };
    assert_eq!((lists[0].len(), lists[0].total()), (1, 4096));
}

#[test]
fn more_extents_than_there_can_be_end_the_connection() {
    let server = scripted_reply(ReplyForm::Structured, |talk, request| {
        let len = 4 + 8 * ((1 << 20) + 1);
        talk.send(&talk.chunk_head(request, 1, magic::REPLY_BLOCK_STATUS, len))
    });
    let found = with(&server, options(), |device| async move {
        device.submit(Request::extents(0, SIZE, ContextSet::first())).await
    });
    assert!(found.unwrap().unwrap_err().to_string().contains("broke the protocol"));
}

/// Submits 64 requests of several kinds.
fn sixty_four(device: &dyn Device) -> Vec<PendingRequest> {
    let one = |index: u64| match index % 4 {
        0 => Request::read(index * 4096, Reservation::unpooled(4096)),
        1 => Request::write(index * 4096, Data::copy_of(&[1; 4096])),
        2 => Request::zero(index * 4096, 4096),
        _ => Request::extents(index * 4096, 4096, ContextSet::first()),
    };
    (0..64).map(|index| device.submit(one(index))).collect()
}

#[test]
fn a_cut_connection_fails_all_that_is_in_flight() {
    let server = ScriptedServer::start(|talk, _| {
        handshake(talk, ReplyForm::Structured)?;
        for _ in 0..20 {
            talk.receive_request()?;
        }
        Ok(())
    });
    with(&server, options(), |device| async move {
        for pending in sixty_four(&*device) {
            assert_eq!(pending.await.unwrap_err().kind(), Kind::Disconnected);
        }
        let late = device.submit(Request::flush()).await.unwrap_err();
        assert_eq!(late.kind(), Kind::Disconnected);
    })
    .unwrap();
}

#[test]
fn a_read_that_fails_in_its_payload_has_given_its_memory_back() {
    for replies in FORMS {
        let server = scripted_reply(replies, move |talk, request| {
            let head = match talk.replies {
                ReplyForm::Simple => talk.simple(request.cookie, 0),
                _ => {
                    let kind = magic::REPLY_OFFSET_DATA;
                    [talk.chunk_head(request, 1, kind, 120_008), vec![0; 8]].concat()
                }
            };
            talk.send(&[head, content(0, 60_000)].concat())
        });
        let timeout = Duration::from_millis(300);
        let options = blockhaul_client::ConnectOptions { timeout, ..options() };
        with(&server, options, move |device| async move {
            let pool = Pool::new(1 << 20);
            let room = pool.reserve(120_000).await.unwrap();
            let error = device.submit(Request::read(0, room)).await.unwrap_err();
            assert_eq!(error.kind(), Kind::TimedOut, "{replies:?} {error}");
            assert_eq!(pool.reserved(), 0, "{replies:?}");
        })
        .unwrap();
    }
}

#[test]
fn silence_with_requests_in_flight_is_an_error_and_none_without() {
    let server = ScriptedServer::start(|talk, _| {
        handshake(talk, ReplyForm::Structured)?;
        let Some((request, _)) = talk.receive_request()? else { return Ok(()) };
        talk.send(&talk.done(&request, 0))?;
        talk.hang()
    });
    longer_and_longer(Duration::from_secs(1), |timeout| {
        with(
            &server,
            blockhaul_client::ConnectOptions { timeout, ..options() },
            move |device| async move {
                blockhaul_io::sleep(timeout * 3 / 2).await;
                device.submit(Request::flush()).await?;
                blockhaul_io::sleep(timeout * 3 / 2).await;
                let started = Instant::now();
                for pending in sixty_four(&*device) {
                    let error = pending.await.unwrap_err();
                    assert_eq!(error.kind(), Kind::TimedOut, "{error}");
                }
                let took = started.elapsed();
                assert!(took >= timeout, "{took:?}");
                Ok(())
            },
        )
        .unwrap()
    });
}

/// Tries with a timeout, and with longer ones if the server itself did not get to run for that
/// long.
fn longer_and_longer<T>(
    mut timeout: Duration,
    mut attempt: impl FnMut(Duration) -> Result<T, Error>,
) -> T {
    loop {
        match attempt(timeout) {
            Ok(done) => return done,
            Err(error) => {
                assert_eq!(error.kind(), Kind::TimedOut, "{error}");
                timeout *= 2;
                assert!(timeout < Duration::from_secs(10), "{error}");
            }
        }
    }
}

#[test]
fn bytes_that_come_slowly_are_no_silence() {
    let takes = |replies| {
        let timeout = Duration::from_millis(800);
        let found = longer_and_longer(timeout, |timeout| slowly(replies, timeout));
        assert_eq!(found, content(0, 120_000), "{replies:?}");
    };
    std::thread::scope(|scope| {
        for replies in FORMS {
            scope.spawn(move || takes(replies));
        }
    });
}

/// The result of a reply that takes longer than the timeout, in the head and in the payload.
fn slowly(replies: ReplyForm, timeout: Duration) -> Result<Vec<u8>, Error> {
    let pause = timeout * 3 / 40;
    let server = scripted_reply(replies, move |talk, request| {
        let bytes = content(0, 120_000);
        let head = match talk.replies {
            ReplyForm::Simple => talk.simple(request.cookie, 0),
            _ => {
                let kind = magic::REPLY_OFFSET_DATA;
                let head = talk.chunk_head(request, 1, kind, 120_008);
                [head, vec![0; 8]].concat()
            }
        };
        talk.send_slowly(&head, 1, pause)?;
        talk.send_slowly(&bytes, 4000, pause)
    });
    let options = blockhaul_client::ConnectOptions { timeout, ..options() };
    with(&server, options, |device| async move { read(&*device, 0, 120_000).await }).unwrap()
}

/// Warnings of this process.
struct Warnings(Mutex<Vec<String>>);

static WARNINGS: Warnings = Warnings(Mutex::new(Vec::new()));

impl log::Log for Warnings {
    fn enabled(&self, data: &log::Metadata<'_>) -> bool {
        data.level() <= log::Level::Warn
    }

    fn log(&self, record: &log::Record<'_>) {
        if self.enabled(record.metadata()) {
            self.0.lock().unwrap().push(record.args().to_string());
        }
    }

    fn flush(&self) {}
}

/// A server that replies to a read byte by byte, so slowly that the reply never ends; and its name.
fn trickle(min_rate: u64) -> (String, Result<Result<Vec<u8>, Error>, blockhaul_io::TimeoutError>) {
    let pause = Duration::from_millis(20);
    let server = scripted_reply(ReplyForm::Simple, move |talk, request| {
        let head = talk.simple(request.cookie, 0);
        talk.send_slowly(&head, 100, pause)?;
        talk.send_slowly(&content(0, 120_000), 1, pause)
    });
    let timeout = Duration::from_millis(300);
    let options = blockhaul_client::ConnectOptions { timeout, min_rate, ..options() };
    let read = with(&server, options, move |device| async move {
        let name = device.facts().name.to_string();
        (name, blockhaul_io::timeout(timeout * 10, read(&*device, 0, 120_000)).await)
    });
    read.unwrap()
}

#[test]
fn a_reply_that_never_ends_gets_a_warning_and_with_a_minimum_rate_an_error() {
    log::set_logger(&WARNINGS).unwrap();
    log::set_max_level(log::LevelFilter::Warn);
    let (name, read) = trickle(0);
    assert!(read.is_err(), "without a minimum it is waited for");
    // Warnings of other tests are there, too.
    let warnings = WARNINGS.0.lock().unwrap().clone();
    let its = |text: &&String| text.contains(&name) && text.contains("no complete reply");
    assert_eq!(warnings.iter().filter(its).count(), 1, "once a minute: {warnings:?}");
    let (_, read) = trickle(1000);
    let error = read.unwrap().unwrap_err();
    assert_eq!(error.kind(), Kind::TimedOut);
    assert!(error.to_string().contains("of --min-rate"), "{error}");
}

#[test]
fn everything_byte_by_byte_works() {
    let slow = ReplyFaultKind::Slow { first: Duration::ZERO, piece: Duration::from_micros(100) };
    for replies in FORMS {
        let offer = offer().replies(replies);
        let offer = offer.spoil(ReplyFault::from(CommandCode::Read, 1, slow.clone()));
        let server = ScriptedServer::offer(offer.spoil(ReplyFault::from(
            CommandCode::Write,
            1,
            slow.clone(),
        )));
        with(&server, options(), use_it).unwrap().unwrap();
    }
}

/// Payloads around the size of socket buffers (208 KiB by default), which fill them exactly or not.
#[test]
fn payloads_around_the_size_of_socket_buffers() {
    for replies in FORMS {
        let server = ScriptedServer::offer(offer().replies(replies));
        with(&server, options(), |device| async move {
            let buffer = 208 << 10;
            let mut model = content(0, SIZE);
            for len in [buffer - 33, buffer - 16, buffer - 1, buffer, buffer + 1, 3 * buffer] {
                let bytes = content(len as u64, len as u64);
                let writes = [0, 1].map(|at| {
                    let at = at * len as u64 / 4;
                    model[at as usize..][..len].copy_from_slice(&bytes);
                    device.submit(Request::write(at, Data::copy_of(&bytes)))
                });
                let [first, second] = writes;
                first.await.unwrap();
                second.await.unwrap();
                let reads =
                    [0, 7].map(|at| device.submit(Request::read(at, Reservation::unpooled(len))));
                for (at, pending) in [0, 7].into_iter().zip(reads) {
                    assert!(bytes_of(pending.await, len) == model[at..at + len], "{len}");
                }
            }
        })
        .unwrap();
    }
}

fn bytes_of(outcome: Result<Reply, Error>, len: usize) -> Vec<u8> {
    bytes(outcome, len).unwrap()
}

/// A zero request in pieces is finished although the device is dropped in the middle.
#[test]
fn a_long_request_is_finished_after_its_device_is_dropped() {
    let size = 100 << 32;
    let server = ScriptedServer::start(move |talk, _| {
        talk.greet(1)?;
        loop {
            let (code, _) = talk.receive_option()?;
            if code == magic::OPT_EXPORT_NAME {
                break;
            }
            talk.reply_option(code, magic::REP_ERR_UNSUP, &[])?;
        }
        talk.send(&[&u64::to_be_bytes(size)[..], &[0, 0b0110_1101], &[0; 124]].concat())?;
        let mut zeroed = 0;
        while let Some((request, _)) = talk.receive_request()? {
            match request.command {
                CommandCode::Disconnect if zeroed == size => return Ok(()),
                CommandCode::Disconnect => return Err(format!("goodbye after {zeroed} bytes")),
                _ => zeroed += request.length,
            }
            talk.send(&talk.done(&request, 0))?;
        }
        Err(format!("the end without a goodbye after {zeroed} bytes"))
    });
    let outcome = with(&server, options(), move |device| async move {
        assert!(device.facts().can.contains(Can::ZERO));
        let pending = device.submit(Request::zero(0, size));
        drop(device);
        pending.await
    });
    outcome.unwrap().unwrap();
    server.finish().unwrap();
}

// nbd: disconnect.only-as-allowed, disc.nothing-after
/// A server that does not close after the disconnect request cannot keep the connection open.
#[test]
fn a_dropped_device_ends_its_connection() {
    let (sender, ended) = std::sync::mpsc::channel();
    let server = ScriptedServer::start(move |talk, _| {
        handshake(talk, ReplyForm::Structured)?;
        let Some((bye, _)) = talk.receive_request()? else { return Err("no goodbye".into()) };
        if bye.command != CommandCode::Disconnect {
            return Err(format!("{:?} instead of a goodbye", bye.command));
        }
        let ended = match talk.receive_request()? {
            None => Ok(()),
            Some(more) => Err(format!("{:?} after the goodbye", more.0.command)),
        };
        sender.send(()).unwrap();
        ended
    });
    let uri = server.uri();
    // The worker continues: the client closes, not the end of the test.
    on_worker(move || async move {
        drop(crate::common::open(&uri, blockhaul_client::ConnectOptions::default()).await.unwrap());
        while let Err(TryRecvError::Empty) = ended.try_recv() {
            blockhaul_io::sleep(Duration::from_millis(2)).await;
        }
    });
    server.finish().unwrap();
}

/// The next request, which must be this one.
fn expect(talk: &mut Conversation, command: CommandCode) -> ScriptResult<RequestHeader> {
    match talk.receive_request()? {
        Some((request, _)) if request.command == command => Ok(request),
        other => Err(format!("{other:?} instead of {command:?}")),
    }
}

// nbd: disconnect.shutdown, disc.nothing-after
#[test]
fn a_server_that_shuts_down_is_left_politely() {
    for replies in FORMS {
        let server = ScriptedServer::start(move |talk, _| {
            handshake(talk, replies)?;
            let first = expect(talk, CommandCode::Read)?;
            let second = expect(talk, CommandCode::Read)?;
            talk.send(&talk.done(&first, 108))?;
            expect(talk, CommandCode::Disconnect)?;
            let bytes = content(second.offset, second.length);
            match replies {
                ReplyForm::Simple => {
                    talk.send(&[talk.simple(second.cookie, 0), bytes].concat())?;
                }
                _ => {
                    let payload = [&second.offset.to_be_bytes()[..], &bytes].concat();
                    talk.send(&talk.chunk(&second, 1, magic::REPLY_OFFSET_DATA, &payload))?;
                }
            }
            match talk.receive_request()? {
                None => Ok(()),
                Some(more) => Err(format!("{:?} after the goodbye", more.0.command)),
            }
        });
        let outcomes = with(&server, options(), |device| async move {
            let at = |at| device.submit(Request::read(at, Reservation::unpooled(512)));
            let first = at(0);
            let second = at(4096);
            let first = first.await.map(drop);
            let third = at(0).await.map(drop);
            (first, bytes(second.await, 512), third)
        });
        let (first, second, third) = outcomes.unwrap();
        assert_eq!(first.unwrap_err().kind(), Kind::ShuttingDown, "{replies:?}");
        assert_eq!(second.unwrap(), content(4096, 512), "it was in flight already");
        assert_eq!(third.unwrap_err().kind(), Kind::ShuttingDown, "{replies:?}");
        server.finish().unwrap();
    }
}

// nbd: disc.zero, flush.zero
#[test]
fn the_goodbye_has_no_range() {
    for replies in FORMS {
        let server = ScriptedServer::start(move |talk, _| {
            handshake(talk, replies)?;
            for command in [CommandCode::Flush, CommandCode::Disconnect] {
                let request = expect(talk, command)?;
                if (request.offset, request.length) != (0, 0) {
                    return Err(format!("{request:?} has a range"));
                }
                if command == CommandCode::Flush {
                    talk.send(&talk.done(&request, 0))?;
                }
            }
            Ok(())
        });
        let outcome =
            with(&server, options(), |device| async move { device.submit(Request::flush()).await });
        outcome.unwrap().unwrap();
        server.finish().unwrap();
    }
}

#[test]
fn an_export_that_is_too_large_is_left_politely() {
    let server = ScriptedServer::start(move |talk, _| {
        talk.greet(3)?;
        loop {
            let (code, _) = talk.receive_option()?;
            if code == magic::OPT_GO {
                let info = [&[0, 0][..], &u64::MAX.to_be_bytes(), &[0, 1]].concat();
                talk.reply_option(code, magic::REP_INFO, &info)?;
                talk.reply_option(code, magic::REP_ACK, &[])?;
                break;
            }
            talk.reply_option(code, magic::REP_ERR_UNSUP, &[])?;
        }
        expect(talk, CommandCode::Disconnect).map(drop)
    });
    let error = with(&server, options(), |_| async {}).unwrap_err();
    assert_eq!(error.kind(), Kind::TooLarge);
    server.finish().unwrap();
}

// nbd: extended.compact-no-flag, extended.write-flag
#[test]
fn payload_lengths_are_flagged_with_extended_headers_only() {
    for replies in FORMS {
        let server = ScriptedServer::start(move |talk, _| {
            handshake(talk, replies)?;
            for command in [CommandCode::Write, CommandCode::Trim, CommandCode::Flush] {
                let request = expect(talk, command)?;
                let due = command == CommandCode::Write && replies == ReplyForm::Extended;
                if request.flags.contains(CommandFlags::PAYLOAD_LEN) != due {
                    return Err(format!("{request:?} with {replies:?}"));
                }
                talk.send(&talk.done(&request, 0))?;
            }
            Ok(())
        });
        let outcome = with(&server, options(), |device| async move {
            device.submit(Request::write(512, Data::copy_of(&[1; 512]))).await?;
            device.submit(Request::trim(0, 4096)).await?;
            device.submit(Request::flush()).await
        });
        outcome.unwrap().unwrap();
        server.finish().unwrap();
    }
}

/// Block status of 4096 bytes in two extents with these states, with the context's number.
fn answer_status(talk: &mut Conversation, id: u32, states: [u32; 2]) -> ScriptResult {
    let request = expect(talk, CommandCode::BlockStatus)?;
    let (kind, bytes) = match talk.replies {
        ReplyForm::Extended => {
            let runs = states.map(|state| [2048, u64::from(state)].map(u64::to_be_bytes).concat());
            let head = [id, 2].map(u32::to_be_bytes).concat();
            (magic::REPLY_BLOCK_STATUS_EXT, [head, runs.concat()].concat())
        }
        _ => {
            let runs = [id, 2048, states[0], 2048, states[1]].map(u32::to_be_bytes);
            (magic::REPLY_BLOCK_STATUS, runs.concat())
        }
    };
    talk.send(&talk.chunk(&request, 1, kind, &bytes))
}

async fn states(device: &dyn Device) -> Result<Vec<(u64, u64)>, Error> {
    let reply = device.submit(Request::extents(0, 4096, ContextSet::first())).await?;
    let Reply::Extents(lists) = reply else { panic!("no extents") };
    Ok(lists[0].runs().iter().map(|run| (run.len, run.state)).collect())
}

// nbd: base.unknown-flags
#[test]
fn unknown_status_flags_are_ignored() {
    for replies in CHUNKS {
        let server = ScriptedServer::start(move |talk, _| {
            handshake(talk, replies)?;
            answer_status(talk, 9, [0xdead_bee3, 0x8000_0004])?;
            talk.hang()
        });
        let found = with(&server, options(), |device| async move { states(&*device).await });
        assert_eq!(found.unwrap().unwrap(), [(2048, 3), (2048, 0)]);
    }
}

// nbd: tls.no-memory, meta.id-opaque
/// What a connection negotiated is no news of the next one: not the form of replies, and not the
/// number of a context.
#[test]
fn each_connection_is_negotiated_anew() {
    let order = [ReplyForm::Extended, ReplyForm::Structured, ReplyForm::Extended];
    let server = ScriptedServer::start(move |talk, number| {
        let id = [u32::MAX, 0, 77][number];
        handshake_numbered(talk, order[number], id)?;
        answer_status(talk, id, [3, 0])?;
        expect(talk, CommandCode::Disconnect).map(drop)
    });
    for _ in order {
        let found = with(&server, options(), |device| async move { states(&*device).await });
        assert_eq!(found.unwrap().unwrap(), [(2048, 3), (2048, 0)]);
    }
    server.finish().unwrap();
}

/// Refuses options until `code`; refuses that as well, with `refusal`, and expects ABORT after it.
fn refusing(code: u32, refusal: u32) -> ScriptedServer {
    ScriptedServer::start(move |talk, _| {
        talk.greet(3)?;
        loop {
            let (sent, _) = talk.receive_option()?;
            if sent == code {
                talk.reply_option(sent, refusal, &[])?;
                break;
            }
            talk.reply_option(sent, magic::REP_ERR_UNSUP, &[])?;
        }
        let (sent, data) = talk.receive_option()?;
        if sent != magic::OPT_ABORT || !data.is_empty() {
            return Err(format!("option {sent} instead of ABORT"));
        }
        // No reply: clients must not need one.
        talk.shut();
        Ok(())
    })
}

// nbd: abort.then-close, abort.soft, abort.no-hard-disconnect, abort.no-reply
#[test]
fn a_client_says_goodbye_in_the_handshake() {
    let server = refusing(magic::OPT_GO, magic::REP_ERR_UNKNOWN);
    let error = with(&server, options(), |_| async {}).unwrap_err();
    assert_eq!(error.kind(), Kind::NotFound);
    server.finish().unwrap();

    let server = refusing(magic::OPT_LIST, magic::REP_ERR_POLICY);
    let place = ConnectTarget::parse(&server.uri()).unwrap();
    on_worker(move || async move {
        let mut session = OptionSession::connect(place, &options()).await.unwrap();
        session.list().await.unwrap_err();
        session.abort().await;
    });
    server.finish().unwrap();
}

// nbd: abort.shutdown
#[test]
fn a_stopping_server_gets_an_abort() {
    for code in [magic::OPT_EXTENDED_HEADERS, magic::OPT_STRUCTURED_REPLY, magic::OPT_GO] {
        let server = refusing(code, magic::REP_ERR_SHUTDOWN);
        let error = with(&server, options(), |_| async {}).unwrap_err();
        assert_eq!(error.kind(), Kind::ShuttingDown, "option {code}");
        server.finish().unwrap();
    }
    let server = refusing(magic::OPT_LIST, magic::REP_ERR_SHUTDOWN);
    let place = ConnectTarget::parse(&server.uri()).unwrap();
    on_worker(move || async move {
        let mut session = OptionSession::connect(place, &options()).await.unwrap();
        assert_eq!(session.list().await.unwrap_err().kind(), Kind::ShuttingDown);
    });
    server.finish().unwrap();
}
