//! Servers that are old, slow, silent or wrong: each gives an error that says what happened, or works;
//! nothing hangs, nothing panics, and wrong bytes are never taken for right ones.
#![allow(clippy::unwrap_used)]

mod common;

use std::sync::Arc;
use std::time::{Duration, Instant};

use block::{Can, Contexts, Device, Error, Kind, Pending, Reply, Request};
use io::{Data, Room, Runtime};
use testkit::model::Model;
use testkit::peer::{Conversation, HandshakeFault, How, Offer, Said, Scripted, Spoil, Style};
use wire::request::Header;
use wire::{Command, Headers, Replies, magic};

const SIZE: u64 = 1 << 20;
const FORMS: [Replies; 3] = [Replies::Simple, Replies::Structured, Replies::Extended];
const CHUNKS: [Replies; 2] = [Replies::Structured, Replies::Extended];

fn content(at: u64, len: u64) -> Vec<u8> {
    (at..at + len).map(|at| (at % 251) as u8 + 1).collect()
}

fn offer() -> Offer {
    Offer::new(Model::new(SIZE).with_content(content(0, SIZE)))
}

fn options() -> client::Options {
    client::Options {
        connect_timeout: Duration::from_millis(500),
        timeout: Duration::from_millis(300),
        ..client::Options::default()
    }
}

/// Runs a test's part on a worker; it must end in time.
fn on_worker<M, F>(make: M) -> F::Output
where
    M: FnOnce() -> F + Send + 'static,
    F: Future + 'static,
    F::Output: Send + 'static,
{
    let runtime = Runtime::start(&io::Config { workers: 1, ..io::Config::default() }).unwrap();
    runtime.block_on(move || async move {
        let limit = Duration::from_secs(10);
        io::timeout(limit, make()).await.expect("it hangs")
    })
}

/// Opens the server's export and hands it to `work`.
fn with<F, T>(
    server: &Scripted,
    options: client::Options,
    work: impl FnOnce(Arc<dyn Device>) -> F + Send + 'static,
) -> Result<T, Error>
where
    F: Future<Output = T> + 'static,
    T: Send + 'static,
{
    let uri = server.uri();
    on_worker(move || async move {
        let device = common::open(&uri, options).await?.device().clone();
        Ok(work(device).await)
    })
}

async fn read(device: &dyn Device, at: u64, len: usize) -> Result<Vec<u8>, Error> {
    bytes(device.submit(Request::read(at, Room::unpooled(len))).await, len)
}

fn bytes(outcome: Result<Reply, Error>, len: usize) -> Result<Vec<u8>, Error> {
    match outcome? {
        Reply::Data(data) => Ok(data.bytes().to_vec()),
        Reply::Hole => Ok(vec![0; len]),
        other => panic!("{other:?}"),
    }
}

/// The error of opening the server's export.
fn refused(server: &Scripted) -> Error {
    let started = Instant::now();
    let error = with(server, options(), |_| async {}).unwrap_err();
    assert!(started.elapsed() < Duration::from_secs(3), "{error}");
    error
}

#[test]
fn handshakes_that_fail_say_why() {
    use HandshakeFault as Fault;
    let cases = [
        (Fault::Silent, Kind::TimedOut, "is this an NBD server?"),
        (Fault::CloseAtOnce, Kind::Disconnected, ""),
        (Fault::NotNbd, Kind::Io, "not an NBD server"),
        (Fault::WrongSecondMagic, Kind::Io, ""),
        (Fault::HalfGreeting, Kind::Disconnected, ""),
        (Fault::WrongReplyMagic, Kind::Io, "magic"),
        (Fault::AnswerToAnother, Kind::Io, ""),
        (Fault::HugeAnswer, Kind::Io, "4294967295"),
        (Fault::NoExportInfo, Kind::Io, ""),
        (
            Fault::Refuse(magic::REP_ERR_UNKNOWN, "who is that".into()),
            Kind::NotFound,
            "who is that",
        ),
        (Fault::Refuse(magic::REP_ERR_POLICY, "not you".into()), Kind::Refused, "not you"),
        (Fault::Refuse(magic::REP_ERR_TLS_REQD, "".into()), Kind::Refused, "TLS"),
        (Fault::Refuse(magic::REP_ERR_SHUTDOWN, "".into()), Kind::ShuttingDown, ""),
        (Fault::Refuse(magic::REP_ERR_INVALID, "\x1b[31m".into()), Kind::Invalid, ""),
        (Fault::Size(1 << 63), Kind::TooLarge, "9223372036854775808"),
        (Fault::Size(u64::MAX), Kind::TooLarge, "18446744073709551615"),
    ];
    for (fault, kind, text) in cases {
        let server = Scripted::offer(offer().handshake(fault.clone()));
        let error = refused(&server);
        let told = error.to_string();
        assert_eq!(error.kind(), kind, "{fault:?}: {told}");
        assert!(told.contains(text), "{fault:?}: {told}");
        assert!(told.contains("cannot connect to Unix socket"), "{told}");
        assert!(!told.contains(['\n', '\x1b']), "{told:?}");
    }
}

#[test]
fn servers_that_stop_or_close_at_any_option() {
    for number in 1..=3 {
        let server = Scripted::offer(offer().handshake(HandshakeFault::StopAtOption(number)));
        assert_eq!(refused(&server).kind(), Kind::TimedOut, "option {number}");
        let server = Scripted::offer(offer().handshake(HandshakeFault::CloseAtOption(number)));
        assert_eq!(refused(&server).kind(), Kind::Disconnected, "option {number}");
    }
}

#[test]
fn garbage_instead_of_a_greeting() {
    for seed in 1..20 {
        let server = Scripted::start(move |talk, _| {
            talk.send_garbage(seed, 5000)?;
            talk.hang()
        });
        assert_eq!(refused(&server).kind(), Kind::Io);
        // Behind a right greeting.
        let server = Scripted::start(move |talk, _| {
            talk.greet(3)?;
            talk.send_garbage(seed, 5000)?;
            talk.hang()
        });
        assert_eq!(refused(&server).kind(), Kind::Io);
    }
}

/// What a client does with every server that it can use at all.
async fn use_it(device: Arc<dyn Device>) -> Result<(), Error> {
    let facts = device.facts();
    assert_eq!(facts.size, SIZE);
    assert_eq!(read(&*device, 1000, 5000).await?, content(1000, 5000));
    device.submit(Request::write(3000, Data::copy_of(b"hello"))).await?;
    device.submit(Request::zero(5000, 100)).await?;
    device.submit(Request::flush()).await?;
    let mut expected = content(2990, 20);
    expected[10..15].copy_from_slice(b"hello");
    assert_eq!(read(&*device, 2990, 20).await?, expected);
    assert_eq!(read(&*device, 5000, 100).await?, [0; 100]);
    let Reply::Extents(lists) = device.submit(Request::extents(0, SIZE, Contexts::first())).await?
    else {
        panic!("no extents")
    };
    assert!(lists[0].total() > 0);
    Ok(())
}

#[test]
fn old_servers_are_used_as_they_are() {
    let styles = [Style::Oldstyle, Style::Newstyle, Style::FixedWithoutGo, Style::Fixed];
    for style in styles {
        for replies in FORMS {
            if style == Style::FixedWithoutGo && replies == Replies::Extended {
                continue; // Such a server does not exist: there is no way on from there.
            }
            let server = Scripted::offer(offer().style(style).replies(replies));
            with(&server, options(), use_it).unwrap().unwrap();
            server.finish().unwrap();
        }
    }
}

#[test]
fn a_server_that_knows_no_option_but_the_export_name() {
    for no_zeroes in [true, false] {
        let server = Scripted::start(move |talk, _| {
            talk.greet(if no_zeroes { 3 } else { 1 })?;
            loop {
                let (code, _) = talk.receive_option()?;
                if code == magic::OPT_EXPORT_NAME {
                    break;
                }
                talk.reply_option(code, magic::REP_ERR_UNSUP, b"what?")?;
            }
            talk.send(&[&SIZE.to_be_bytes()[..], &[0, 1]].concat())?;
            if !no_zeroes {
                talk.send(&[0; 124])?;
            }
            answer_reads(talk)
        });
        let found = with(&server, options(), |device| async move { read(&*device, 7, 700).await });
        assert_eq!(found.unwrap().unwrap(), content(7, 700));
        server.finish().unwrap();
    }
}

/// Answers reads rightly, by simple replies.
fn answer_reads(talk: &mut Conversation) -> Said {
    while let Some((request, _)) = talk.receive_request()? {
        if request.command == Command::Disconnect {
            return Ok(());
        }
        let answer = talk.simple(request.cookie, 0);
        talk.send(&[answer, content(request.offset, request.length)].concat())?;
    }
    Ok(())
}

#[test]
fn odd_block_sizes_are_bent_into_shape_or_ignored() {
    let cases = [
        ((1, 4096, 32 << 20), (1, 4096, 32 << 20)),
        ((512, 512, u32::MAX), (512, 512, 32 << 20)),
        ((4096, 4096, 10_000), (4096, 4096, 8192)),
        ((1, 64 << 20, 64 << 20), (1, 32 << 20, 32 << 20)),
        ((65_536, 65_536, 65_537), (65_536, 65_536, 65_536)),
        // Those that break the rules.
        ((0, 4096, 32 << 20), (1, 4096, 32 << 20)),
        ((3, 4096, 32 << 20), (1, 4096, 32 << 20)),
        ((512, 256, 32 << 20), (1, 4096, 32 << 20)),
        ((512, 5000, 32 << 20), (1, 4096, 32 << 20)),
        ((1 << 20, 1 << 20, 32 << 20), (1, 4096, 32 << 20)),
        ((512, 4096, 1024), (1, 4096, 32 << 20)),
    ];
    for ((minimum, preferred, maximum), expected) in cases {
        let fault = HandshakeFault::BlockSizes(minimum, preferred, maximum);
        let server = Scripted::offer(offer().handshake(fault));
        let path = server.path().to_path_buf();
        let found = on_worker(move || async move {
            let address = client::Address::Unix(path);
            let connected = client::connect("test", &address, "", &options()).await?;
            let facts = connected.device.facts();
            Ok::<_, Error>((facts.block.minimum, facts.block.preferred, facts.block.maximum))
        });
        assert_eq!(found.unwrap(), expected, "{minimum} {preferred} {maximum}");
    }
}

#[test]
fn the_largest_size_and_none_are_taken() {
    for size in [0, 1, 511, i64::MAX as u64] {
        let server = Scripted::offer(offer().handshake(HandshakeFault::Size(size)));
        let found = with(&server, options(), |device| async move { device.facts().size });
        assert_eq!(found.unwrap(), size);
    }
}

#[test]
fn a_slow_handshake_works_and_unknown_information_is_ignored() {
    let slow = HandshakeFault::Slow(Duration::from_millis(30));
    for fault in [slow, HandshakeFault::UnknownInfo] {
        let server = Scripted::offer(offer().handshake(fault));
        with(&server, options(), use_it).unwrap().unwrap();
    }
}

/// What the second read leads to when it is spoiled, and the third one afterwards.
fn spoiled(replies: Replies, how: How) -> (Result<Vec<u8>, Error>, Result<Vec<u8>, Error>) {
    let offer = offer().replies(replies).spoil(Spoil::nth(Command::Read, 2, how));
    let server = Scripted::offer(offer);
    with(&server, options(), |device| async move {
        assert_eq!(read(&*device, 0, 512).await.unwrap(), content(0, 512));
        let second = read(&*device, 8192, 4096).await;
        (second, read(&*device, 100, 512).await)
    })
    .unwrap()
}

#[test]
fn wrong_answers_to_reads_end_the_connection() {
    let any: &[(How, Kind, &str)] = &[
        (How::Close, Kind::Disconnected, "closed the connection"),
        (How::CloseInHead, Kind::Disconnected, "in the middle of a reply"),
        (How::CloseInPayload, Kind::Disconnected, "in the middle of a reply"),
        (How::WrongCookie, Kind::Io, "not in flight"),
        (How::Garbage, Kind::Io, "broke the protocol"),
        (How::Hang, Kind::TimedOut, "no byte from the server"),
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
    let chunks: &[(How, &str)] = &[
        (How::ErrorZero, "broke the protocol"),
        (How::UnknownChunk, "unknown kind of chunk"),
        (How::Oversized, "broke the protocol"),
        (How::OutsideRange, "outside of the request"),
        (How::NeverDone, "not the last"),
    ];
    for replies in CHUNKS {
        for (how, text) in chunks {
            let (second, third) = spoiled(replies, how.clone());
            for error in [second.unwrap_err(), third.unwrap_err()] {
                assert_eq!(error.kind(), Kind::Io, "{replies:?} {how:?}: {error}");
                assert!(error.to_string().contains(text), "{replies:?} {how:?}: {error}");
            }
        }
        let (second, third) = spoiled(replies, How::SimpleInstead);
        assert!(second.unwrap_err().to_string().contains("broke the protocol"));
        third.unwrap_err();
    }
    let (second, third) = spoiled(Replies::Extended, How::WrongOffset);
    assert!(second.unwrap_err().to_string().contains("another offset"));
    third.unwrap_err();
}

#[test]
fn a_reply_that_comes_twice_ends_the_connection_after_the_first() {
    for replies in FORMS {
        let (second, third) = spoiled(replies, How::Twice);
        assert_eq!(second.unwrap(), content(8192, 4096));
        let error = third.unwrap_err();
        assert!(error.to_string().contains("not in flight"), "{error}");
    }
}

#[test]
fn errors_and_gaps_end_the_request_only() {
    for replies in FORMS {
        let (second, third) = spoiled(replies, How::Error(28));
        assert_eq!(second.unwrap_err().kind(), Kind::NoSpace);
        assert_eq!(third.unwrap(), content(100, 512));
        let (second, third) = spoiled(replies, How::Error(4711));
        assert!(second.unwrap_err().to_string().contains("the server answers"));
        assert_eq!(third.unwrap(), content(100, 512));
    }
    let chunks = [
        (How::ErrorAt(5, 8200, "no luck\n".into()), Kind::Io, "no luck"),
        (How::ErrorAt(5, 8200, String::new()), Kind::Io, "at offset 8200"),
        (How::ErrorAt(28, 1, "full".into()), Kind::NoSpace, "full at offset 1"),
        (How::UnknownError, Kind::Io, "??"),
        (How::ErrorHalfway(5), Kind::Io, "the server answers"),
        (How::Missing, Kind::Io, "left out bytes"),
        (How::Overlap, Kind::Io, ""),
    ];
    for replies in CHUNKS {
        for (how, kind, text) in chunks.clone() {
            let (second, third) = spoiled(replies, how.clone());
            let error = second.unwrap_err();
            assert_eq!(error.kind(), kind, "{how:?}: {error}");
            assert!(error.to_string().contains(text), "{how:?}: {error}");
            assert!(!error.to_string().contains('\n'));
            if how != How::Overlap {
                assert_eq!(third.unwrap(), content(100, 512), "{how:?}");
            }
        }
        for how in [How::Backwards, How::Hole] {
            let (second, third) = spoiled(replies, how.clone());
            let expected = if how == How::Hole { vec![0; 4096] } else { content(8192, 4096) };
            assert_eq!(second.unwrap(), expected);
            assert_eq!(third.unwrap(), content(100, 512));
        }
    }
}

#[test]
fn wrong_answers_to_other_commands() {
    for replies in FORMS {
        for command in [Command::Write, Command::WriteZeroes, Command::Trim, Command::Flush] {
            for (how, kind) in [
                (How::Close, Kind::Disconnected),
                (How::WrongCookie, Kind::Io),
                (How::Hang, Kind::TimedOut),
                (How::Error(28), Kind::NoSpace),
                (How::Error(1), Kind::ReadOnly),
            ] {
                let offer = offer().replies(replies).spoil(Spoil::nth(command, 1, how.clone()));
                let server = Scripted::offer(offer);
                let outcome = with(&server, options(), move |device| async move {
                    let request = match command {
                        Command::Write => Request::write(0, Data::copy_of(&[1; 70_000])),
                        Command::WriteZeroes => Request::zero(0, 4096),
                        Command::Trim => Request::trim(0, 4096),
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

/// What a spoiled block status leads to: an error, or runs.
fn status(replies: Replies, how: How) -> (Result<Vec<(u64, u64)>, Error>, bool) {
    let offer = offer().replies(replies).spoil(Spoil::nth(Command::BlockStatus, 1, how));
    let server = Scripted::offer(offer);
    with(&server, options(), |device| async move {
        let outcome = device.submit(Request::extents(4096, 8192, Contexts::first())).await;
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

#[test]
fn wrong_extents_are_errors() {
    for replies in CHUNKS {
        for (how, alive) in [
            (How::WrongContext, true),
            (How::NoStatus, true),
            (How::EmptyExtent, false),
            (How::NoExtents, false),
            (How::Error(22), true),
            (How::UnknownError, true),
            (How::Close, false),
        ] {
            let (runs, lives) = status(replies, how.clone());
            runs.expect_err("no extents came");
            assert_eq!(lives, alive, "{replies:?} {how:?}");
        }
        // Allowed, and cut to what was asked for.
        let (runs, lives) = status(replies, How::LongExtent);
        assert_eq!((runs.unwrap(), lives), (vec![(8192, 0)], true));
    }
}

/// A server that goes on as the script says after the first read has come.
fn scripted_reply(
    replies: Replies,
    script: impl Fn(&mut Conversation, &Header) -> Said + Send + Sync + 'static,
) -> Scripted {
    Scripted::start(move |talk, _| {
        handshake(talk, replies)?;
        let Some((request, _)) = talk.receive_request()? else { return Ok(()) };
        script(talk, &request)?;
        talk.hang()
    })
}

/// The handshake of a server with one context.
fn handshake(talk: &mut Conversation, replies: Replies) -> Said {
    talk.greet(3)?;
    loop {
        let (code, _) = talk.receive_option()?;
        match (code, replies) {
            (magic::OPT_EXTENDED_HEADERS, Replies::Extended) => {
                talk.reply_option(code, magic::REP_ACK, &[])?;
                (talk.headers, talk.replies) = (Headers::Extended, Replies::Extended);
            }
            (magic::OPT_STRUCTURED_REPLY, Replies::Structured) => {
                talk.reply_option(code, magic::REP_ACK, &[])?;
                talk.replies = Replies::Structured;
            }
            (magic::OPT_SET_META_CONTEXT, _) => {
                let context = [&[0, 0, 0, 9], &b"base:allocation"[..]].concat();
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
        // A hole behind all of the data.
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
        assert!(error.to_string().contains("more pieces"), "{error}");
    }
}

#[test]
fn one_extent_is_one_whatever_the_server_sends() {
    let server = scripted_reply(Replies::Structured, |talk, request| {
        let runs = [9_u32, 4096, 0, 512, 3, 9000, 0].map(u32::to_be_bytes).concat();
        talk.send(&talk.chunk(request, 1, magic::REPLY_BLOCK_STATUS, &runs))
    });
    let found = with(&server, options(), |device| async move {
        let request = Request::extents(0, SIZE, Contexts::first());
        device.submit(request.with(block::Flags::ONE_EXTENT)).await
    });
    let Reply::Extents(lists) = found.unwrap().unwrap() else { panic!("no extents") };
    assert_eq!((lists[0].len(), lists[0].total()), (1, 4096));
}

#[test]
fn more_extents_than_there_can_be_end_the_connection() {
    let server = scripted_reply(Replies::Structured, |talk, request| {
        let len = 4 + 8 * ((1 << 20) + 1);
        talk.send(&talk.chunk_head(request, 1, magic::REPLY_BLOCK_STATUS, len))
    });
    let found = with(&server, options(), |device| async move {
        device.submit(Request::extents(0, SIZE, Contexts::first())).await
    });
    assert!(found.unwrap().unwrap_err().to_string().contains("broke the protocol"));
}

/// Submits 64 requests of several kinds.
fn sixty_four(device: &dyn Device) -> Vec<Pending> {
    let one = |index: u64| match index % 4 {
        0 => Request::read(index * 4096, Room::unpooled(4096)),
        1 => Request::write(index * 4096, Data::copy_of(&[1; 4096])),
        2 => Request::zero(index * 4096, 4096),
        _ => Request::extents(index * 4096, 4096, Contexts::first()),
    };
    (0..64).map(|index| device.submit(one(index))).collect()
}

#[test]
fn a_cut_connection_fails_all_that_is_in_flight() {
    let server = Scripted::start(|talk, _| {
        handshake(talk, Replies::Structured)?;
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
fn silence_with_requests_in_flight_is_an_error_and_none_without() {
    let server = Scripted::start(|talk, _| {
        handshake(talk, Replies::Structured)?;
        let Some((request, _)) = talk.receive_request()? else { return Ok(()) };
        talk.send(&talk.done(&request, 0))?;
        talk.hang()
    });
    let timeout = Duration::from_millis(300);
    with(&server, client::Options { timeout, ..options() }, move |device| async move {
        io::sleep(timeout * 3).await;
        device.submit(Request::flush()).await.unwrap();
        io::sleep(timeout * 3).await;
        let started = Instant::now();
        for pending in sixty_four(&*device) {
            let error = pending.await.unwrap_err();
            assert_eq!(error.kind(), Kind::TimedOut, "{error}");
        }
        let took = started.elapsed();
        assert!(took >= timeout && took < timeout * 3, "{took:?}");
    })
    .unwrap();
}

#[test]
fn bytes_that_come_slowly_are_no_silence() {
    for replies in FORMS {
        // All in all far longer than the timeout, in the head and in the payload.
        let server = scripted_reply(replies, |talk, request| {
            let bytes = content(0, 120_000);
            let head = match talk.replies {
                Replies::Simple => talk.simple(request.cookie, 0),
                _ => {
                    let kind = magic::REPLY_OFFSET_DATA;
                    let head = talk.chunk_head(request, 1, kind, 120_008);
                    [head, vec![0; 8]].concat()
                }
            };
            talk.send_slowly(&head, 1, Duration::from_millis(20))?;
            talk.send_slowly(&bytes, 4000, Duration::from_millis(40))
        });
        let timeout = Duration::from_millis(300);
        let found = with(&server, client::Options { timeout, ..options() }, |device| async move {
            read(&*device, 0, 120_000).await
        });
        assert_eq!(found.unwrap().unwrap(), content(0, 120_000), "{replies:?}");
    }
}

#[test]
fn everything_byte_by_byte_works() {
    let slow = How::Slow { first: Duration::ZERO, piece: Duration::from_micros(100) };
    for replies in FORMS {
        let offer = offer().replies(replies);
        let offer = offer.spoil(Spoil::from(Command::Read, 1, slow.clone()));
        let server = Scripted::offer(offer.spoil(Spoil::from(Command::Write, 1, slow.clone())));
        with(&server, options(), use_it).unwrap().unwrap();
    }
}

/// Payloads around the size of socket buffers (208 KiB by default), which fill them exactly or not.
#[test]
fn payloads_around_the_size_of_socket_buffers() {
    for replies in FORMS {
        let server = Scripted::offer(offer().replies(replies));
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
                let reads = [0, 7].map(|at| device.submit(Request::read(at, Room::unpooled(len))));
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

/// A zeroing that has to go out in pieces is finished although the device is dropped in the middle.
#[test]
fn a_long_request_is_finished_after_its_device_is_dropped() {
    let size = 100 << 32;
    let server = Scripted::start(move |talk, _| {
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
                Command::Disconnect if zeroed == size => return Ok(()),
                Command::Disconnect => return Err(format!("goodbye after {zeroed} bytes")),
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

/// A server that does not close after the goodbye cannot keep the connection open.
#[test]
fn a_dropped_device_ends_its_connection() {
    let server = Scripted::start(|talk, _| {
        handshake(talk, Replies::Structured)?;
        let Some((bye, _)) = talk.receive_request()? else { return Err("no goodbye".into()) };
        if bye.command != Command::Disconnect {
            return Err(format!("{:?} instead of a goodbye", bye.command));
        }
        match talk.receive_request()? {
            None => Ok(()),
            Some(more) => Err(format!("{:?} after the goodbye", more.0.command)),
        }
    });
    let uri = server.uri();
    // The worker lives on: it is the client, not the end of the test, that closes.
    on_worker(move || async move {
        drop(common::open(&uri, client::Options::default()).await.unwrap());
        io::sleep(Duration::from_millis(300)).await;
    });
    server.finish().unwrap();
}

#[test]
fn nobody_listens() {
    let scratch = testkit::tools::Scratch::new().unwrap();
    let nowhere = scratch.socket("nowhere");
    let uri = format!("nbd+unix:///?socket={}", nowhere.display());
    let error = on_worker(move || async move { common::open(&uri, options()).await.map(drop) });
    let error = error.unwrap_err();
    assert_eq!(error.kind(), Kind::NotFound);
    assert!(error.to_string().contains("No such file or directory"), "{error}");
    let error =
        on_worker(|| async { common::open("nbd://127.0.0.1:1/", options()).await.map(drop) });
    assert!(error.unwrap_err().to_string().contains("127.0.0.1:1"));
}
